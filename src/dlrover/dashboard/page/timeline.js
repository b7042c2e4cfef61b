// The time of each node by cause, with marks for incidents and plans, and the number of nodes below.
"use strict";

const ROW = 18, GAP = 6, TOP = 44, SIZE_HEIGHT = 56;
const TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];

class Timeline extends HTMLElement {
  connectedCallback() {
    if (this.watch) return;
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this);
  }

  disconnectedCallback() {
    this.watch.disconnect();
    this.watch = null;
  }

  set data(value) {
    this.value = value;
    this.draw();
  }

  draw() {
    if (!this.value || !this.clientWidth) return;
    const { timeline, incidents, plans, rounds, submitted, causes } = this.value;
    const width = this.clientWidth;
    const left = width < 560 ? 52 : 84;
    const right = 14;
    const seconds = Math.max(timeline.seconds, 1e-3);
    const x = (at) => left + (width - left - right) * Math.min(1, Math.max(0, at / seconds));
    const bottom = TOP + timeline.nodes.length * (ROW + GAP);
    const sizes = rounds.map((r) => [r.at - submitted, r.nodes]);
    const hasSizes = plans.length > 0 || new Set(sizes.map(([, nodes]) => nodes)).size > 1;
    const height = bottom + (hasSizes ? SIZE_HEIGHT + 40 : 4);
    this.place = { left, right, width, seconds, timeline, causes };
    D.render(this,
      h("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Time of each node by cause",
          on: { mousemove: (e) => this.point(e), mouseleave: () => this.hide(), keydown: (e) => this.move(e) } },
        h("g", { class: "axis", "aria-hidden": "true" }, this.ticks(seconds, width).map((at) => [
          h("line", { x1: x(at), x2: x(at), y1: TOP - 10, y2: bottom }),
          h("text", { x: x(at), y: 12, "text-anchor": at === 0 ? "start" : "middle" }, at === 0 ? "0" : D.duration(at).replace(/\.0 s$/, " s")),
        ])),
        timeline.nodes.map((node, place) => this.row(node, place, x, left)),
        incidents.map((incident, i) => this.mark(incident, i, x(incident.since - submitted), bottom)),
        hasSizes && this.sizes(sizes, plans, submitted, x, bottom + 30, width - right, left),
      ),
      h("div", { class: "tip", hidden: !this.tip, role: "status" }, this.tip ? this.tip.lines.map((line, i) => h("span", { class: i ? "" : "strong" }, line)) : []),
    );
  }

  ticks(seconds, width) {
    const most = Math.max(2, Math.floor(width / 96));
    const step = TICKS.find((each) => seconds / each <= most) || 86400 * Math.ceil(seconds / (86400 * most));
    return Array.from({ length: Math.floor(seconds / step) + 1 }, (_, i) => i * step).filter((at) => at / seconds < 0.985);
  }

  row(node, place, x, left) {
    const { causes } = this.value;
    const paths = new Map(), times = new Map();
    for (let i = 0; i < node.spans.length; i += 3) {
      const [since, length, cause] = node.spans.slice(i, i + 3);
      paths.set(cause, `${paths.get(cause) || ""}M${x(since / 1000).toFixed(1)} 0H${x((since + length) / 1000).toFixed(1)}`);
      times.set(cause, (times.get(cause) || 0) + length);
    }
    const whole = [...times.values()].reduce((a, b) => a + b, 0) || 1;
    const words = [...times].sort((a, b) => b[1] - a[1]).map(([cause, time]) => `${causes[cause].label} ${D.percent(time / whole)}`);
    const name = left < 80 ? String(node.id) : `node ${node.id}`;
    return h("g", { key: `n${node.id}`, class: "row", transform: `translate(0 ${TOP + place * (ROW + GAP) + ROW / 2})`, tabindex: place ? "-1" : "0",
        role: "img", "aria-label": `node ${node.id}${node.host ? ` on ${node.host}` : ""}: ${words.join(", ") || "no time yet"}` },
      h("rect", { class: "back", x: left, y: -ROW / 2, width: Math.max(0, x(Infinity) - left), height: ROW, rx: 3 }),
      h("text", { x: left - 10, y: 4, "text-anchor": "end" }, name),
      [...paths].map(([cause, path]) => h("path", { class: `c-${causes[cause].key}`, d: path })));
  }

  mark(incident, number, x, bottom) {
    const words = `Incident ${number + 1}: ${incident.title}, ${D.duration(incident.until - incident.since)}`;
    const open = () => this.dispatchEvent(new CustomEvent("incident", { bubbles: true, detail: number }));
    return h("g", { key: `i${number}`, class: `mark ${incident.kind}`, role: "button", tabindex: "0", "aria-label": words,
        on: { click: open, keydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); open(); } }, mouseenter: () => this.say([words], x, 26) } },
      h("line", { x1: x, x2: x, y1: TOP - 12, y2: bottom }),
      h("circle", { cx: x, cy: TOP - 20, r: 8 }),
      h("text", { x, y: TOP - 16.5, "text-anchor": "middle" }, number + 1));
  }

  sizes(sizes, plans, submitted, x, top, end, left) {
    if (!sizes.length) return null;
    const most = Math.max(...sizes.map(([, nodes]) => nodes));
    const bottom = top + SIZE_HEIGHT;
    const y = (nodes) => bottom - (SIZE_HEIGHT - 14) * nodes / most;
    let path = `M${x(sizes[0][0]).toFixed(1)} ${y(sizes[0][1])}`;
    for (const [at, nodes] of sizes.slice(1)) path += `H${x(at).toFixed(1)}V${y(nodes)}`;
    const labels = [...new Set([0, most, sizes[sizes.length - 1][1]])];
    return h("g", { key: "sizes", class: "sizes", role: "img", "aria-label": `Number of nodes: now ${sizes[sizes.length - 1][1]}, at most ${most}` },
      h("text", { x: left - 10, y: top - 6, "text-anchor": "end" }, "nodes"),
      h("line", { class: "base", x1: left, x2: end, y1: bottom, y2: bottom }),
      labels.map((nodes) => h("text", { x: left - 10, y: y(nodes) + 4, "text-anchor": "end" }, nodes)),
      h("path", { d: `${path}H${end}` }),
      plans.map((plan) => {
        const at = x(plan.time - submitted);
        const words = [`Plan ${plan.number}: ${plan.before} → ${plan.nodes} nodes`, plan.outcome];
        return h("g", { class: "plan", on: { mouseenter: () => this.say(words, at, top) } },
          h("line", { x1: at, x2: at, y1: top, y2: bottom }), h("path", { d: `M${at - 5} ${top - 6}h10l-5 9z` }));
      }));
  }

  // ---- what the pointer or the focus is on

  point(event) {
    if (event.target.closest(".mark, .plan")) return;
    const { left, right, width, seconds, timeline, causes } = this.place;
    const box = this.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const node = timeline.nodes[Math.floor((py - TOP + GAP / 2) / (ROW + GAP))];
    if (!node || px < left || px > width - right || py < TOP - GAP) { this.hide(); return; }
    const at = 1000 * seconds * (px - left) / (width - left - right);
    for (let i = 0; i < node.spans.length; i += 3) {
      const [since, length, cause] = node.spans.slice(i, i + 3);
      if (since <= at && at < since + length) {
        const began = this.value.submitted + since / 1000;
        this.say([causes[cause].label, `node ${node.id}${node.host ? ` · ${node.host}` : ""}`, `${D.clock(began)} to ${D.clock(began + length / 1000)}, ${D.duration(length / 1000)}`], px, py);
        return;
      }
    }
    this.hide();
  }

  move(event) {
    const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const rows = [...this.querySelectorAll(".row")];
    const next = rows[rows.indexOf(document.activeElement) + way];
    if (!way || !next || !rows.includes(document.activeElement)) return;
    event.preventDefault();
    next.focus();
  }

  say(lines, x, y) {
    this.tip = { lines };
    this.draw();
    const tip = this.querySelector(".tip");
    tip.style.setProperty("left", `${Math.max(0, Math.min(x + 12, this.clientWidth - tip.offsetWidth - 4))}px`);
    tip.style.setProperty("top", `${y + 16}px`);
  }

  hide() {
    if (!this.tip) return;
    this.tip = null;
    this.draw();
  }
}

customElements.define("dlrover-timeline", Timeline);
