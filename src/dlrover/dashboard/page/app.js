// The frame: routes, live streams, dialogs, keys, theme.
"use strict";

const main = document.getElementById("main");
const frozen = document.getElementById("content");
const KEPT = 90;

const state = { route: {}, jobs: null, filter: "", job: null, link: "", logs: null };

// ---- routes

const route = () => {
  const [, kind, id, section] = location.hash.split("/");
  return kind === "job" && id ? { job: decodeURIComponent(id), section } : {};
};

const go = (path) => { location.hash = path; };

const follow = () => {
  const next = route();
  const other = next.job !== state.route.job;
  if (other || !state.stream) open(next);
  if (other) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
  state.route = next;
  draw();
  if (next.section) focusSection(next.section);
};

const open = (next) => {
  if (state.stream) state.stream.close();
  if (state.log) closeLog();
  state.job = next.job ? newJob(next.job) : null;
  connect();
};

const connect = () => {
  const { job } = state;
  const stream = state.stream = new EventSource(job ? `/api/jobs/${encodeURIComponent(job.id)}/live` : "/api/jobs/live");
  stream.onopen = () => { state.link = "live"; draw(); };
  stream.onerror = () => { state.link = stream.readyState === 2 ? "closed" : "waiting"; if (state.link === "closed") refused(stream); draw(); };
  const listen = (name, take) => stream.addEventListener(name, (event) => { take(JSON.parse(event.data)); draw(); });
  if (!job) {
    listen("jobs", (value) => { state.jobs = value; state.fixed = value; });
    return;
  }
  listen("fixed", ({ causes, activities }) => Object.assign(job, { causes, activities })); // never the id
  listen("status", (value) => { job.status = value; if (!value.outcome) job.rates = [...job.rates, value.rate].slice(-KEPT); });
  listen("ranks", (value) => { job.earlier = new Map((job.ranks || []).map((rank) => [rank.rank, rank])); job.ranks = value; });
  for (const name of ["report", "roles", "checkpoints", "logs", "unlisted", "master", "unreachable", "known"]) listen(name, (value) => { job[name] = value; });
  listen("problem", (value) => say(value.text, true));
};

// The server refused the stream, and the browser does not ask again by itself: say why, and do.
const refused = async (stream) => {
  const stop = new AbortController();
  try {
    const answer = await fetch(stream.url, { signal: stop.signal });
    state.why = answer.ok ? "" : (await answer.json()).error;
    stop.abort();
  } catch { state.why = ""; }
  draw();
  setTimeout(() => { if (state.stream === stream) connect(); }, 5000);
};

const newJob = (id) => ({
  id, rates: [], earlier: new Map(), report: {}, causes: [], activities: [],
  show(change) { Object.assign(this, change); draw(); },
  openLog: (name) => openLog(name),
});

// ---- drawing: at most once a frame

let due = false;
const draw = () => {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; D.render(main, lost(), state.job ? jobPage(state.job) : jobsPage()); frame(); });
};

const frame = () => {
  const link = document.getElementById("link");
  if (!link) return;
  if (frozen) { link.remove(); return; }
  const words = { live: "live", waiting: "reconnecting …", closed: "not connected" }[state.link] || "connecting …";
  D.render(link, h("span", { class: `light ${state.link}`, "aria-hidden": "true" }), words);
};

const lost = () => (frozen || !["waiting", "closed"].includes(state.link) ? null
  : h("p", { class: "banner bad", key: "lost", role: "status" }, (state.link === "closed" && state.why) || "The dashboard's server does not answer; this is what it said last."));

const jobPage = (job) => {
  const { report } = job;
  const status = job.status || job.roles; // a job of several roles has those instead
  const name = (status && status.name) || report.job || job.id;
  document.title = `${name} · DLRover`;
  const known = job.known && job.known.text; // there is no master to ask
  const away = !known && job.master && !job.master.answers && status && !status.outcome;
  const over = Boolean(status && status.outcome);
  const unreachable = !over && job.unreachable && job.unreachable.text;
  const act = frozen || over || !status || away || known || unreachable ? null : actions(job);
  const blank = !status && !report.dir;
  const sections = blank && (unreachable || state.link !== "live") ? [] : [job.roles ? D.roles(job) : D.overview(job), D.timeline(job), D.nodes(job, act), D.incidents(job), D.plans(job), D.datasets(job), D.checkpoints(job), D.events(job), frozen || (known && !job.logs) ? null : D.logs(job, state.log)].filter(Boolean);
  const present = new Set(sections.map((section) => section.props.id));
  return [
    h("div", { class: "head", key: "head" },
      h("div", { class: "title" }, h("h1", {}, name), blank ? null : D.phase((status && status.phase) || report.phase)),
      h("p", { class: "soft" }, [report.submitted ? `submitted ${D.moment(report.submitted)}` : "", status && status.size, job.roles ? `${over ? "ran" : "has run"} for ${D.duration(job.roles.seconds)}` : "", frozen ? `frozen ${D.moment(job.frozenAt)}` : ""].filter(Boolean).join(" · ")),
      h("p", { class: "soft small dir" }, report.dir || ""),
      act ? h("div", { class: "buttons" }, job.roles ? null : [h("button", { on: { click: act.stacks } }, "Stacks"), h("button", { on: { click: act.save } }, "Save"), h("button", { on: { click: act.scale } }, "Scale …")], h("button", { class: "danger", on: { click: act.stop } }, "Stop …")) : null),
    unreachable ? h("p", { class: "banner bad", key: "unreachable", role: "status" }, unreachable) : null,
    known ? h("p", { class: "banner", key: "known", role: "status" }, known) : null,
    away && !unreachable ? h("p", { class: "banner", key: "away", role: "status" }, `The ${job.roles ? "coordinator" : "master"} does not answer; this is where its journal ends.`) : null,
    status && status.waiting_for ? h("p", { class: "banner", key: "waits", role: "status" }, status.waiting_for) : null,
    over ? h("div", { class: `banner ${status.outcome.exit_code ? "bad" : "good"}`, key: "end" }, h("p", { class: "strong" }, status.outcome.reason),
      status.outcome.advice ? h("p", {}, "Next: ", status.outcome.advice) : null, status.outcome.others.map((line) => h("p", { class: "small" }, line))) : null,
    h("nav", { class: "sections", key: "nav", "aria-label": "Sections" }, D.SECTIONS.filter(([id]) => present.has(id)).map(([id, title]) =>
      h("a", { key: id, href: frozen ? `#${id}` : `#/job/${encodeURIComponent(job.id)}/${id}` }, title))),
    sections,
  ];
};

const jobsPage = () => {
  document.title = "Jobs · DLRover";
  if (!state.jobs) return h("p", { class: "soft loading" }, "Looking for jobs …");
  const { jobs, more, cluster } = state.jobs;
  return [
    h("div", { class: "head", key: "head" }, h("div", { class: "title" }, h("h1", {}, "Jobs")), h("p", { class: "soft" }, "The latest first. Arrow keys and Enter open one."),
      h("input", { id: "jobs-filter", type: "search", class: "filter", placeholder: "Filter by name, phase or text", "aria-label": "Filter jobs", on: { input: (e) => { state.filter = e.target.value.trim().toLowerCase(); draw(); } } })),
    h("section", { class: "card", key: "here", "aria-label": "Jobs of this machine" }, jobs.length ? [D.jobTable(matching(jobs), cluster.length ? "This machine" : ""), noMatch(jobs), more ? left(`The latest ${D.count(jobs.length, "job")}`) : null]
      : D.empty("No job has run here yet.", "Start one with ", D.code("dlrover-run --nproc-per-node 2 train.py"), "; it appears here by itself.")),
    cluster.map((source) => h("section", { class: "card", key: source.name, "aria-label": source.name }, h("header", {}, h("h2", {}, source.name)),
      source.problem ? h("p", { class: "warning" }, source.problem) : null, source.jobs.length ? [D.clusterTable({ ...source, jobs: matching(source.jobs) }), noMatch(source.jobs)] : source.problem ? null : D.empty("It knows no jobs.", ""),
      source.more ? left(`The jobs that run and the latest others, ${D.count(source.jobs.length, "job")} in all`) : null)),
  ];
};

const matching = (jobs) => (state.filter ? jobs.filter((job) => [job.name, job.phase, job.problem, job.reason, job.dir, job.note].some((text) => text && text.toLowerCase().includes(state.filter))) : jobs);

const noMatch = (jobs) => (matching(jobs).length ? null : h("p", { class: "soft" }, "No job in this list has that."));

const left = (what) => h("p", { class: "soft" }, `${what}; earlier ones are not listed. Start the dashboard with `, D.code("--jobs"), " to list more.");

D.jobTable = (jobs, title) => [
  title ? h("header", {}, h("h2", {}, title)) : null,
  D.table("Jobs", [["job"], ["phase"], ["began", "opt"], ["nodes", "num opt"], ["time", "num"], ["steps", "num opt"], ["goodput", "num"]],
    jobs.map((job) => h("tr", { key: job.id, class: "open" },
      h("td", { class: "main-cell" }, h("a", { href: `#/job/${encodeURIComponent(job.id)}` }, job.name), h("span", { class: "small soft cut" }, job.problem || job.reason || job.dir)),
      h("td", {}, D.phase(job.phase)), h("td", { class: "opt", title: D.moment(job.began) }, D.ago(job.began)), h("td", { class: "num opt" }, job.nodes || "–"),
      h("td", { class: "num" }, job.seconds === undefined ? "–" : D.duration(job.seconds)), h("td", { class: "num opt" }, job.steps === undefined ? "–" : D.whole(job.steps)),
      h("td", { class: "num" }, typeof job.goodput === "number" ? D.percent(job.goodput) : "–")))),
];

D.clusterTable = (source) => D.table(source.name, [["job"], ["phase"], ["size", "opt"], ["began", "opt"], ["time", "num"], ["goodput", "num"], ["note", "opt"]],
  source.jobs.map((job) => h("tr", { key: job.name, class: job.id ? "open" : "" }, h("td", { class: "main-cell" }, job.id ? h("a", { href: `#/job/${encodeURIComponent(job.id)}` }, job.name) : job.name), h("td", {}, D.phase(job.phase)), h("td", { class: "opt" }, job.size), h("td", { class: "opt", title: job.began ? D.moment(job.began) : "" }, job.began ? D.ago(job.began) : "–"),
    h("td", { class: "num" }, typeof job.seconds === "number" ? D.duration(job.seconds) : "–"), h("td", { class: "num" }, typeof job.goodput === "number" ? D.percent(job.goodput) : "–"), h("td", { class: "opt" }, job.note))));

// ---- logs

D.logs = (job, log) => card("logs", "Logs", job.logs && job.logs.length ? h("select", { "aria-label": "Log file", class: "filter", on: { change: (e) => openLog(e.target.value) } },
    h("option", { value: "", selected: !log }, "Choose a file …"), job.logs.map((file) => h("option", { key: file.name, value: file.name, selected: Boolean(log) && log.name === file.name }, `${file.name} (${file.size === null ? file.note : D.bytes(file.size)})`))) : null,
  job.unlisted && job.unlisted.text ? h("p", { class: "warning" }, job.unlisted.text) : null,
  !job.logs || !job.logs.length ? job.known ? D.empty("The pods of this job are gone,", "and their logs with them: look where the cluster collects the logs of its pods.") : D.empty("There are no log files here.", "Workers write their output below the job directory, on the machine where they run.")
    : !log ? h("div", { class: "files" }, job.logs.slice(0, 8).map((file) => h("button", { key: file.name, class: "quiet", on: { click: () => openLog(file.name) } }, file.name)))
    : h("div", { class: "log" }, h("div", { class: "log-head" }, h("span", { class: "soft small" }, log.note || (log.cut ? "the end of the file, as it grows" : "as it grows")),
      h("input", { key: `filter-${log.name}`, type: "search", class: "filter", placeholder: "Filter lines, as by [default1]", "aria-label": "Filter lines", on: { input: (e) => { log.filter = e.target.value; draw(); } } }),
      h("label", {}, h("input", { type: "checkbox", initially: { checked: true }, on: { change: (e) => { log.follows = e.target.checked; } } }), " follow")),
    log.problem ? h("p", { class: "warning", role: "status" }, log.problem) : null,
    h("pre", { key: `log-${log.name}`, class: "tail", tabindex: "0", role: "log", "aria-label": log.name, "aria-live": "off" }, lines(log) || "(empty so far)")));

const lines = ({ text, filter }) => (filter ? D.plain(text).split("\n").filter((line) => line.includes(filter)).join("\n") || "(no line has that)" : D.plain(text));

const openLog = (name) => {
  closeLog();
  if (!name) return draw();
  const log = state.log = { name, text: "", cut: false, follows: true };
  log.stream = new EventSource(`/api/jobs/${encodeURIComponent(state.job.id)}/log?file=${encodeURIComponent(name)}`);
  log.stream.onmessage = (event) => {
    const { text, fresh, cut, note } = JSON.parse(event.data);
    log.problem = "";
    if (note) { log.note = note; return draw(); }
    if (fresh) { log.text = log.note = ""; log.cut = cut; }
    log.text = (log.text + text).slice(-400000);
    draw();
    if (log.follows) requestAnimationFrame(() => requestAnimationFrame(() => { const end = document.querySelector(".tail"); if (end) end.scrollTop = end.scrollHeight; }));
  };
  log.stream.addEventListener("problem", (event) => { log.problem = JSON.parse(event.data).text; draw(); });
  draw();
  focusSection("logs");
};

const closeLog = () => { if (state.log) state.log.stream.close(); state.log = null; };

// ---- buttons that act

const actions = (job) => ({
  stop: () => ask("Stop the job?", [`The workers of ${(job.status || job.roles).name} get SIGTERM and time to end. A program that saves on SIGTERM, or a Checkpointer with save at breakpoint, loses no step.`], "Stop the job", true).then((yes) => yes && send(job, { action: "stop" })),
  scale: () => {
    const now = job.status.nodes.filter((node) => node.node_rank >= 0 && node.role !== "ps").length;
    const field = h("label", { class: "field" }, "Nodes", h("input", { id: "wanted", type: "number", min: "1", max: "100000", initially: { value: String(now || 1) } }));
    ask("Another number of nodes", [`The job has ${job.status.size || D.count(now, "node")} now. Training goes on with the new number after a new round.`, field], "Scale", false)
      .then((yes) => yes && send(job, { action: "scale", nodes: Number(yes.nodes) }));
  },
  drain: (node) => ask(`Drain node ${node.id}?`, ["Another node is started; this one trains on until it has taken its place."], "Drain the node", false).then((yes) => yes && send(job, { action: "drain", node: node.id })),
  save: () => {
    say("Storing what is in memory …");
    return send(job, { action: "save" });
  },
  stacks: async () => {
    say("Asking every rank where it is …");
    const answer = await post(job, { action: "stacks" });
    if (answer) ask("Where every rank is", [h("pre", { class: "tall", tabindex: "0" }, answer.text)], "", false);
  },
});

const send = async (job, body) => {
  const answer = await post(job, body);
  if (answer) say(answer.text, answer.refused);
};

const post = async (job, body) => {
  try {
    const answer = await fetch(`/api/jobs/${encodeURIComponent(job.id)}/actions`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    const value = await answer.json();
    if (answer.ok) return value;
    say(value.error, true);
  } catch {
    say("The dashboard's server does not answer.", true);
  }
  return null;
};

const ask = (title, lines, yes, danger) => new Promise((resolve) => {
  const dialog = document.getElementById("ask");
  const end = (value) => { dialog.close(); resolve(value); };
  const accept = () => { const nodes = dialog.querySelector("#wanted"); end({ nodes: nodes ? nodes.value : "" }); };
  dialog.replaceChildren();
  D.render(dialog, h("h2", { id: "ask-title" }, title), lines.map((line) => (typeof line === "string" ? h("p", {}, line) : line)),
    h("div", { class: "buttons" }, yes ? h("button", { class: danger ? "danger" : "primary", on: { click: accept } }, yes) : null, h("button", { on: { click: () => end(null) } }, yes ? "Cancel" : "Close")));
  dialog.onkeydown = (event) => { if (event.key === "Enter" && event.target.tagName === "INPUT") accept(); };
  dialog.oncancel = () => resolve(null);
  dialog.showModal();
});

let quiet;
const say = (text, bad) => {
  const box = document.getElementById("say");
  D.render(box, h("p", { class: bad ? "bad" : "" }, text));
  clearTimeout(quiet);
  quiet = setTimeout(() => D.render(box), 8000);
};

// ---- keys and theme

const KEYS = [["?", "these keys"], ["j", "all jobs"], ["1 – 9", "sections of a job"], ["/", "filter the jobs or the events"], ["t", "dark or light"], ["↑ ↓", "rows of a table or of the timeline"], ["Esc", "close"]];
const help = () => ask("Keys", [h("dl", { class: "keys" }, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]))], "", false);

const focusSection = (id) => requestAnimationFrame(() => requestAnimationFrame(() => {
  const section = document.getElementById(id);
  if (section) { section.scrollIntoView({ block: "start" }); section.focus({ preventScroll: true }); }
}));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) { if (event.key === "Escape") event.target.blur(); return; }
  const links = [...document.querySelectorAll(".main-cell a")];
  const at = links.indexOf(document.activeElement);
  const shown = [...document.querySelectorAll("main section.card[id]")];
  if (event.key === "?") help();
  else if (event.key === "j" && !frozen) go("#/");
  else if (event.key === "t") toggle();
  else if (event.key === "/" && document.querySelector("#events input, #jobs-filter")) document.querySelector("#events input, #jobs-filter").focus();
  else if (/^[1-9]$/.test(event.key) && shown[event.key - 1]) focusSection(shown[event.key - 1].id);
  else if (event.key === "ArrowDown" && links.length) links[Math.min(at + 1, links.length - 1)].focus();
  else if (event.key === "ArrowUp" && at > 0) links[at - 1].focus();
  else return;
  event.preventDefault();
});

const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const paint = () => { document.getElementById("theme").setAttribute("aria-pressed", String(dark())); };
const toggle = () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  try { localStorage.setItem("dlrover-theme", document.documentElement.dataset.theme); } catch { /* a page from a file may store nothing */ }
  paint();
};

try { const kept = localStorage.getItem("dlrover-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* as above */ }
document.getElementById("theme").onclick = toggle;
document.getElementById("keys").onclick = help;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
main.addEventListener("incident", (event) => {
  const shown = document.getElementById(`incident-${event.detail}`);
  shown.open = true;
  shown.scrollIntoView({ block: "center" });
  shown.querySelector("summary").focus({ preventScroll: true });
});
paint();

if (frozen) {
  state.job = Object.assign(newJob(""), JSON.parse(frozen.textContent), { frozen: true });
  document.getElementById("home").removeAttribute("href");
  document.getElementById("all").remove();
  draw();
} else {
  addEventListener("hashchange", follow);
  follow();
}
