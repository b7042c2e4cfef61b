// What all parts of the page share: building elements from plain values, and words for numbers and times.
"use strict";

const D = {};

// ---- elements
//
// `h` describes an element, `D.render` makes a parent's children so. Texts become text nodes only: nothing that
// comes from a job is ever read as markup. Elements stay where they can, with their focus and their open state.

const ELEMENT = Symbol("made by h"); // which no JSON holds: an object of a job is a text, too
const h = (tag, props, ...kids) => ({ [ELEMENT]: true, tag, props: props || {}, kids: kids.flat(9).filter((k) => k !== null && k !== undefined && k !== false && k !== "") });

D.SVG = "http://www.w3.org/2000/svg";

D.render = (parent, ...kids) => {
  const wanted = kids.flat(9).filter((k) => k !== null && k !== undefined && k !== false && k !== "");
  const keyed = new Map();
  for (const node of parent.childNodes) if (node.vkey !== undefined) keyed.set(node.vkey, node);
  wanted.forEach((kid, place) => {
    let now = parent.childNodes[place];
    if (!kid[ELEMENT]) {
      if (now && now.nodeType === 3) { if (now.data !== String(kid)) now.data = String(kid); }
      else parent.insertBefore(document.createTextNode(String(kid)), now || null);
      return;
    }
    const key = kid.props.key;
    const known = key !== undefined ? keyed.get(key) : undefined;
    if (known && known.parentNode === parent && known.vtag === kid.tag) {
      if (known !== now) parent.insertBefore(known, now || null);
      now = known;
    } else if (!now || now.vtag !== kid.tag || now.vkey !== key) {
      const svg = kid.tag === "svg" || parent.namespaceURI === D.SVG;
      const made = svg ? document.createElementNS(D.SVG, kid.tag) : document.createElement(kid.tag);
      made.vtag = kid.tag;
      made.vkey = key;
      made.vprops = {};
      parent.insertBefore(made, now || null);
      now = made;
    }
    D.update(now, kid);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
  return parent;
};

D.update = (element, { props, kids }) => {
  const before = element.vprops;
  for (const [name, value] of Object.entries(props)) {
    if (name === "key" || name === "data") continue;
    if (name === "on") { for (const [event, handler] of Object.entries(value)) element["on" + event] = handler; continue; }
    if (name === "style") { for (const [rule, set] of Object.entries(value)) element.style.setProperty(rule, set); continue; }
    if (name === "initially") { if (!element.vbegun) Object.assign(element, value); continue; }
    if (before[name] === value) continue;
    if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const name of Object.keys(before)) if (!(name in props) && name !== "style" && name !== "on") element.removeAttribute(name);
  element.vprops = props;
  element.vbegun = true;
  if (props.data !== undefined) element.data = props.data; // a component draws itself from its data
  else D.render(element, kids);
};

// ---- words

D.count = (number, noun) => `${D.whole(number)} ${noun}${number === 1 ? "" : "s"}`;
D.whole = (number) => Math.round(number).toLocaleString("en-US");
D.percent = (ratio, digits = 1) => `${(100 * ratio).toFixed(digits)} %`;
D.figure = (number) => {
  if (!Number.isFinite(number)) return "–";
  if (number >= 1000) return D.whole(number);
  return number.toPrecision(3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
};

D.duration = (seconds) => {
  if (seconds < 0 || !Number.isFinite(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  for (const [unit, size, small, smallSize] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]]) {
    if (whole < size) continue;
    const rest = Math.floor((whole % size) / smallSize);
    return `${Math.floor(whole / size)} ${unit}${rest ? ` ${rest} ${small}` : ""}`;
  }
  return `${whole} s`;
};

D.of = (used, limit) => {
  const [mine, unit] = D.bytes(used).split(" "), [all, whole] = D.bytes(limit).split(" ");
  return unit === whole ? `${mine} of ${all} ${whole}` : `${mine} ${unit} of ${all} ${whole}`;
};

D.bytes = (amount) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (amount < 1024) return `${unit === "B" || amount >= 100 ? amount.toFixed(0) : amount.toFixed(1)} ${unit}`;
    amount /= 1024;
  }
  return `${amount.toFixed(1)} TiB`;
};

const pad = (number) => String(number).padStart(2, "0");
D.clock = (at) => { const t = new Date(1000 * at); return `${pad(t.getHours())}:${pad(t.getMinutes())}:${pad(t.getSeconds())}`; };
D.day = (at) => { const t = new Date(1000 * at); return `${t.getFullYear()}-${pad(t.getMonth() + 1)}-${pad(t.getDate())}`; };
D.moment = (at) => `${D.day(at)} ${D.clock(at)}`;
D.ago = (at) => {
  const seconds = Date.now() / 1000 - at;
  return seconds < 5 ? "just now" : `${D.duration(seconds).replace(/ (\d+ \w+)$/, seconds < 3600 ? " $1" : "")} ago`;
};

// What a program wrote, as lines: without colours and escape sequences; a progress bar overwrites its line.
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])/g;
D.plain = (text) => text.replace(ESCAPES, "").split("\n").map((line) => line.replace(/\r+$/, "").split("\r").pop())
  .join("\n").replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g, "");

// ---- small parts

D.empty = (title, ...hint) => h("p", { class: "empty" }, h("span", { class: "strong" }, title), " ", ...hint);
D.code = (text) => h("code", {}, text);
D.badge = (text, kind = "") => h("span", { class: `badge ${kind}` }, text);
D.meter = (label, share, kind = "") => h("span", { class: `meter ${kind}`, role: "meter", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": String(Math.round(100 * share)) },
  h("span", { style: { width: `${100 * Math.min(1, Math.max(0, share))}%` } }));
D.table = (name, heads, rows) => h("div", { class: "scroll" }, h("table", {},
  h("caption", { class: "unseen" }, name),
  h("thead", {}, h("tr", {}, heads.map(([text, kind]) => h("th", { scope: "col", class: kind || "" }, text)))),
  h("tbody", {}, rows)));
D.phases = { running: "good", succeeded: "good", failed: "bad", stopped: "" };
D.phase = (phase) => D.badge(phase || "unknown", D.phases[phase] || (phase ? "busy" : ""));
