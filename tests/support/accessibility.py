"""What a page owes to everyone: names, roles, order and contrast, as far as a program can tell."""

from __future__ import annotations

CHECK = r"""
const problems = [];
const seen = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && !e.closest('.unseen, [aria-hidden=true]');
const words = (e) => `${e.tagName.toLowerCase()}.${e.getAttribute('class') || ''} "${(e.textContent || '').trim().slice(0, 40)}"`;
const labelled = (e) => (e.getAttribute('aria-labelledby') || '').split(' ').map((id) => document.getElementById(id)?.textContent || '').join('').trim();
const named = (e) => e.getAttribute('aria-label') || labelled(e) || e.textContent.trim() || e.title || e.labels?.[0]?.textContent.trim();

if (!document.documentElement.lang) problems.push('the page has no language');
if (!document.title) problems.push('the page has no title');
if (document.querySelectorAll('main').length !== 1) problems.push('there is not one main');
const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) problems.push(`two elements have the id ${id}`);
for (const e of document.querySelectorAll('button, a[href], input, select, summary, [role=button], [role=img], [role=meter], [role=log], [role=group], dialog[open]'))
  if (seen(e) && !named(e)) problems.push(`no name: ${words(e)}`);
for (const e of document.querySelectorAll('[tabindex]')) if (e.tabIndex > 0) problems.push(`a place of its own in the order: ${words(e)}`);
for (const e of document.querySelectorAll('[aria-labelledby], [aria-describedby]'))
  for (const id of (e.getAttribute('aria-labelledby') || e.getAttribute('aria-describedby')).split(' '))
    if (!document.getElementById(id) && !(e.tagName === 'DIALOG' && !e.open)) problems.push(`${words(e)} is labelled by ${id}, which is absent`);
for (const t of document.querySelectorAll('table')) {
  if (!t.caption?.textContent.trim()) problems.push('a table has no caption');
  if (![...t.querySelectorAll('thead th')].every((th) => th.scope === 'col')) problems.push('a head of a table has no scope');
}
let level = 0;
for (const e of document.querySelectorAll('h1, h2, h3, h4')) {
  if (!seen(e)) continue;
  const now = Number(e.tagName[1]);
  if (now > level + 1) problems.push(`the heading ${words(e)} skips a level`);
  level = now;
}
for (const e of document.querySelectorAll('button, a[href], summary, select, input')) {
  const box = e.getBoundingClientRect();
  if (seen(e) && box.width && (box.width < 20 || box.height < 20) && getComputedStyle(e).display !== 'inline' && e.type !== 'checkbox') problems.push(`too small to press: ${words(e)}`);
}

// contrast, as WCAG 2 computes it
const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const parse = (text) => { const n = (text.match(/[\d.]+/g) || []).map(Number); return n.length === 3 ? [...n, 1] : n; };
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
const behind = (e) => {
  const layers = [];
  for (let up = e; up; up = up.parentElement) layers.push(parse(getComputedStyle(up).backgroundColor));
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
};
let least = 99;
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!own || !seen(e) || !e.getClientRects().length) continue;
  const style = getComputedStyle(e);
  const svg = e.namespaceURI === 'http://www.w3.org/2000/svg';
  const circle = svg && e.parentNode.querySelector('circle');
  const back = circle ? over(parse(getComputedStyle(circle).fill), behind(e)) : behind(e);
  const ink = over(parse(svg ? style.fill : style.color), back);
  const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  least = Math.min(least, ratio);
  if (ratio < (large ? 3 : 4.5)) problems.push(`contrast ${ratio.toFixed(2)}: ${words(e)}`);
}
return { problems, least };
"""
"""A script that returns ``problems``, a sentence each, and the ``least`` contrast of a text."""
