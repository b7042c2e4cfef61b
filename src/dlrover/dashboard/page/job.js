// The sections of a job's page, each a function of the job's content.
"use strict";

const MOST_ROWS = 200;

D.SECTIONS = [["overview", "Overview"], ["roles", "Roles"], ["timeline", "Timeline"], ["nodes", "Nodes"], ["incidents", "Incidents"], ["plans", "Plans"],
  ["data", "Data"], ["checkpoints", "Checkpoints"], ["events", "Events"], ["logs", "Logs"]];

const card = (name, title, aside, ...kids) => h("section", { id: name, key: name, class: "card", "aria-labelledby": `${name}-title`, tabindex: "-1" },
  h("header", {}, h("h2", { id: `${name}-title` }, title), aside ? h("div", { class: "aside" }, aside) : null), ...kids);

// ---- overview

const tile = (label, value, note, extra) => h("div", { class: "tile" }, h("dt", {}, label), h("dd", {}, h("span", { class: "value" }, value), note ? h("span", { class: "note" }, note) : null, extra || null));

D.spark = (values) => {
  const most = Math.max(...values);
  if (values.length < 3 || !most) return null;
  const points = values.map((value, i) => `${(100 * i / (values.length - 1)).toFixed(1)},${(22 - 20 * value / most).toFixed(1)}`).join(" ");
  return h("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, h("polyline", { points }));
};

D.overview = (job) => {
  const { status, report } = job;
  const goodput = report.goodput;
  const over = Boolean(status && status.outcome);
  const running = status && !over && !job.known;
  const tiles = status ? [
    tile(status.step >= 0 ? "Step" : "Steps", status.step < 0 && status.total_steps < 0 ? "–" : D.whole(status.step >= 0 ? status.step : status.total_steps), status.step >= 0 && status.total_steps !== status.step ? `${D.whole(status.total_steps)} made in all` : ""),
    running && tile("Speed", status.rate ? `${D.figure(status.rate)} /s` : "–", status.rate ? "steps, last minute" : "no steps measured yet", D.spark(job.rates)),
    running && tile("Time left", status.seconds_left >= 0 ? D.duration(status.seconds_left) : "–", status.seconds_left >= 0 ? `until ${D.clock(Date.now() / 1000 + status.seconds_left)}` : "the program does not say"),
    tile("Running time", D.duration(status.seconds), status.restarts < 0 ? "" : D.count(status.restarts, "restart")),
    status.processes && tile("World", status.processes, status.nodes.length ? D.count(status.nodes.filter((n) => n.node_rank >= 0).length, "node") : ""),
    ...(report.facts || []).map((fact) => tile(...fact)),
  ] : [];
  return card("overview", "Overview", null,
    h("div", { class: "overview" },
      h("div", { class: "goodput" },
        h("p", { class: "eyebrow" }, "Goodput"),
        goodput && goodput.ratio !== null ? [h("p", { class: "big" }, goodput.words.startsWith("at most ") ? h("span", { class: "bound" }, "at most ") : null, goodput.words.replace("at most ", "")), h("p", { class: "soft" }, goodput.summary.replace(/^Goodput [^:]*: o/, "O"))]
          : h("p", { class: "soft" }, goodput ? goodput.summary : report.absent || "Reading the journal …")),
      h("dl", { class: "tiles" }, tiles)),
    goodput && causes(job, goodput));
};

const causes = (job, goodput) => {
  const spent = job.causes.filter((cause) => goodput.seconds[cause.key] > 0);
  if (!spent.length) return null;
  const wall = goodput.wall || 1;
  return [
    h("div", { class: "bar", role: "img", "aria-label": `Time of all nodes: ${spent.map((c) => `${c.label} ${D.percent(goodput.seconds[c.key] / wall)}`).join(", ")}` },
      spent.map((cause) => h("span", { key: cause.key, class: `c-${cause.key}`, title: `${cause.label}: ${D.percent(goodput.seconds[cause.key] / wall)}`, style: { width: `${100 * goodput.seconds[cause.key] / wall}%` } }))),
    h("ul", { class: "legend" }, spent.map((cause) => h("li", { key: cause.key },
      h("span", { class: `key c-${cause.key}` }), h("span", { class: "name" }, cause.label),
      h("span", { class: "num" }, D.duration(goodput.seconds[cause.key])), h("span", { class: "num soft" }, D.percent(goodput.seconds[cause.key] / wall))))),
    goodput.notes.map((note) => h("p", { class: "soft" }, note)),
  ];
};

// ---- roles

D.roles = (job) => {
  const { roles, weights, queues } = job.roles;
  const rows = roles.flatMap((role) => (role.instances.length ? role.instances : [null]).map((one, at) => [role, one, at]));
  const states = { serving: "good", running: "good", stale: "busy" };
  return card("roles", "Roles", D.count(roles.length, "role"),
    D.table("Roles and their instances", [["role"], ["kind", "opt"], ["status"], ["restarts", "num opt"], ["instance", "num"], ["state"], ["phase"], ["weights", "opt"], ["last end", "opt"]],
      rows.map(([role, one, at]) => h("tr", { key: `${role.name} ${at}` },
        at ? [h("td", {}), h("td", { class: "opt" }), h("td", {}), h("td", { class: "opt" })] : [
          h("td", {}, role.page ? h("a", { href: `#/job/${encodeURIComponent(role.page)}` }, role.name) : role.name), h("td", { class: "opt" }, role.kind),
          h("td", {}, D.badge(role.status, D.phases[role.status] || "busy"), role.waits_for.length ? ` for ${role.waits_for.join(", ")}` : ""), h("td", { class: "num opt" }, role.restarts)],
        one ? [h("td", { class: "num" }, one.index), h("td", {}, D.badge(one.state, states[one.state] || "")), h("td", {}, one.phase ? `${one.phase} ${D.duration(one.phase_seconds)}` : "–"),
          h("td", { class: "opt" }, Object.entries(one.weights).map(([name, version]) => `${name} ${version}`).join(", ") || "–"), h("td", { class: "opt" }, one.reason || "–")]
          : ["num", "", "", "opt", "opt"].map((kind) => h("td", { class: kind }, "–"))))),
    weights.map((each) => h("p", { key: `w ${each.name}` }, `Weights ${each.name} of ${each.role}: ${each.version ? `version ${each.version}` : "no version yet"}`)),
    Object.entries(queues).map(([name, queue]) => h("div", { class: "part", key: `q ${name}` }, h("h3", {}, `Queue ${name}`),
      h("div", { class: "bar thin", role: "img", "aria-label": `${D.whole(queue.waiting)} waiting, ${D.whole(queue.leased)} leased of ${D.whole(queue.size)}` },
        h("span", { class: "acknowledged", style: { width: `${100 * queue.waiting / Math.max(1, queue.size)}%` } }), h("span", { class: "leased", style: { width: `${100 * queue.leased / Math.max(1, queue.size)}%` } })),
      h("p", { class: "small soft" }, `${D.whole(queue.waiting)} waiting, ${D.whole(queue.leased)} leased of ${D.whole(queue.size)}; ${D.whole(queue.done)} of ${D.count(queue.added, "item")} done`,
        queue.redelivered ? `, ${D.whole(queue.redelivered)} redelivered` : "", queue.lost ? `, ${D.whole(queue.lost)} lost` : ""))));
};

// ---- timeline

D.timeline = (job) => {
  const { report } = job;
  if (!report.timeline) return null;
  const left = report.timeline.left_out;
  return card("timeline", "Timeline", report.rounds.length ? D.count(report.rounds.length, "round") : "",
    report.timeline.nodes.length
      ? h("dlrover-timeline", { data: { ...report, causes: job.causes } })
      : D.empty("No node has been here yet.", "The timeline begins when the first node connects."),
    left ? h("p", { class: "soft" }, `${D.count(left, "more node")} not drawn: those with the most incidents are.`) : null,
    report.rounds.length ? h("details", {}, h("summary", {}, "Rounds"),
      D.table("Rounds", [["round", "num"], ["complete at"], ["nodes", "num"], ["workers", "num"], ["formed in", "num"]],
        report.rounds.slice(-50).map((r) => h("tr", { key: r.round }, h("td", { class: "num" }, r.round), h("td", {}, D.moment(r.at)),
          h("td", { class: "num" }, r.nodes), h("td", { class: "num" }, r.world_size - r.servers), h("td", { class: "num" }, D.duration(r.seconds)))))) : null);
};

// ---- nodes and ranks

D.nodes = (job, actions) => {
  const { status } = job;
  if (!status || (job.known && !status.nodes.length)) return null;
  const gone = (node) => ["lost", "released", "failed", "succeeded"].includes(node.status) && !node.connected;
  const all = job.frozen || job.allNodes || status.outcome ? status.nodes : status.nodes.filter((node) => !gone(node));
  const hidden = status.nodes.length - all.length;
  const shown = all.slice(0, MOST_ROWS);
  const roles = shown.some((node) => node.role);
  const drains = actions && !status.outcome;
  return card("nodes", "Nodes and ranks", D.count(all.length, "node"),
    status.slow.map((sentence) => h("p", { class: "warning" }, sentence)),
    shown.length ? D.table("Nodes", [["node", "num"], ["rank", "num opt"], ...(roles ? [["role"]] : []), ["status"], ["doing", "opt"], ["steps", "num"], ["memory"], ["cores", "num opt"], ["accelerators", "opt"], ["host", "opt"], ...(drains ? [["", "act"]] : [])],
      shown.map((node) => h("tr", { key: node.id },
        h("td", { class: "num" }, node.id), h("td", { class: "num opt" }, node.node_rank >= 0 ? node.node_rank : "–"),
        roles && h("td", {}, node.role), h("td", {}, D.badge(node.status, node.connected ? D.phases[node.status] || "" : gone(node) ? "" : "busy")),
        h("td", { class: "opt" }, node.doing || "–"), h("td", { class: "num" }, D.whole(node.steps)),
        h("td", {}, node.memory_limit ? [h("span", {}, D.of(node.memory, node.memory_limit)), D.meter(`memory of node ${node.id}`, node.memory / node.memory_limit, node.memory / node.memory_limit > 0.9 ? "bad" : "")] : "–"),
        h("td", { class: "num opt" }, node.cores ? `${node.cpu.toFixed(2)} of ${D.figure(node.cores)}` : "–"),
        h("td", { class: "opt" }, node.busy >= 0 ? [h("span", {}, `${D.percent(node.busy, 0)} busy`), D.meter(`accelerators of node ${node.id}`, node.busy)] : "–"),
        h("td", { class: "opt host" }, node.hostname || "–"),
        drains && h("td", { class: "act" }, node.status === "running" ? h("button", { class: "quiet", "aria-label": `Drain node ${node.id}`, on: { click: () => actions.drain(node) } }, "Drain") : null))))
      : D.empty("No node is connected.", status.waiting_for || "The job waits for its first node."),
    all.length > shown.length ? h("p", { class: "soft" }, `${D.count(all.length - shown.length, "more node")} not shown.`) : null,
    hidden ? h("button", { class: "quiet", on: { click: () => job.show({ allNodes: true }) } }, `Show ${D.count(hidden, "earlier node")}`) : null,
    ranks(job));
};

const ranks = (job) => {
  if (!job.ranks || !job.ranks.length || job.status.outcome) return null;
  const paced = job.ranks.map((rank) => ({ ...rank, pace: D.pace(job, rank) }));
  const known = paced.map((rank) => rank.pace).filter((pace) => pace > 0).sort((a, b) => a - b);
  const median = known.length ? known[Math.floor(known.length / 2)] : 0;
  const most = Math.max(...known, 1e-9);
  const spent = (rank, kind) => { const sum = rank.seconds.slice(1).reduce((a, b) => a + b, 0); return sum ? rank.seconds[kind] / sum : 0; };
  return h("details", { key: "ranks", initially: { open: job.ranks.length <= 16 } }, h("summary", {}, D.count(job.ranks.length, "rank")),
    D.table("Ranks", [["rank", "num"], ["node", "num"], ["doing"], ["steps", "num"], ["own step time"], ["data wait", "num opt"], ["optimizer state", "num opt"]],
      paced.slice(0, MOST_ROWS).map((rank) => h("tr", { key: rank.rank },
        h("td", { class: "num" }, rank.rank), h("td", { class: "num" }, rank.node),
        h("td", {}, rank.ended ? "ended" : `${job.activities[rank.doing]} ${D.duration(rank.since)}`), h("td", { class: "num" }, D.whole(rank.steps)),
        h("td", {}, rank.pace ? [h("span", {}, rank.pace < 1 ? `${(1000 * rank.pace).toFixed(rank.pace < 0.1 ? 1 : 0)} ms` : D.duration(rank.pace)), D.meter(`own step time of rank ${rank.rank} beside the slowest`, rank.pace / most, median && rank.steps > 9 && rank.pace > 1.2 * median ? "bad" : "")] : "–"),
        h("td", { class: "num opt" }, D.percent(spent(rank, 2))), h("td", { class: "num opt" }, rank.state_bytes ? D.bytes(rank.state_bytes) : "–")))));
};

// A rank's own time for a step, without waits for others where that is measured: since the last report, or in all.
D.pace = (job, rank) => {
  const before = job.earlier.get(rank.rank);
  const steps = before && before.steps < rank.steps ? rank.steps - before.steps : rank.steps;
  const from = before && before.steps < rank.steps ? before : { seconds: rank.seconds.map(() => 0), compute: 0 };
  const own = rank.compute ? rank.compute - from.compute : rank.seconds[1] - from.seconds[1];
  return steps > 0 && own > 0 ? own / steps : 0;
};

// ---- incidents

D.incidents = (job) => {
  const { report } = job;
  if (!report.incidents) return null;
  const newest = report.incidents.map((incident, number) => [incident, number]).reverse();
  return card("incidents", "Incidents", newest.length ? `${D.duration(report.incidents.reduce((sum, i) => sum + i.lost, 0))} of all nodes lost` : "",
    newest.length ? newest.map(([incident, number]) => one(job, incident, number))
      : D.empty("Nothing has gone wrong.", "A fault, its root cause and what it cost appear here."));
};

const one = (job, incident, number) => {
  const { root, hang } = incident;
  const fault = root ? { "user code": "user", infrastructure: "infra" }[root.origin] || "" : "";
  return h("details", { id: `incident-${number}`, key: `incident-${number}`, class: "incident" },
    h("summary", {},
      h("span", { class: `dot ${incident.kind}`, "aria-hidden": "true" }, number + 1),
      h("span", { class: "what" }, h("span", { class: "strong" }, incident.title || "Incident"), h("span", { class: "soft small" }, D.moment(incident.since))),
      h("span", { class: "cost" }, incident.over ? D.duration(incident.until - incident.since) : "under way", h("span", { class: "soft small" }, `${D.duration(incident.lost)} of nodes${incident.steps_lost > 0 ? `, ${D.count(incident.steps_lost, "step")} again` : ""}`))),
    h("div", { class: "inside" },
      root && h("dl", { class: "facts" },
        h("dt", {}, "Root cause"), h("dd", {}, root.title, " ", D.badge(root.origin, fault)),
        root.evidence ? [h("dt", {}, "Evidence"), h("dd", {}, h("code", { class: "wrap" }, root.evidence))] : null,
        root.advice ? [h("dt", {}, "Next"), h("dd", { class: "strong" }, root.advice)] : null,
        h("dt", {}, "Action"), h("dd", {}, root.action.replace(/_/g, " ")),
        root.others ? [h("dt", {}, "Others"), h("dd", {}, `${D.count(root.others, "other rank")} failed in this round`)] : null,
        root.facts.length ? [h("dt", {}, "The node says"), h("dd", {}, root.facts.map((fact) => h("code", { class: "wrap line" }, fact)))] : null,
        root.log ? [h("dt", {}, "Log"), h("dd", {}, h("code", { class: "wrap" }, root.log))] : null),
      hang && h("dl", { class: "facts" }, h("dt", {}, "Hang"), h("dd", {}, hang.text), hang.file ? [h("dt", {}, "Stacks"), h("dd", {}, D.code(hang.file), job.frozen ? null : [" ", h("button", { class: "quiet", on: { click: () => job.openLog(hang.file) } }, "Show")])] : null),
      root && root.detail ? h("pre", { tabindex: "0", "aria-label": "Traceback or standard error of the root cause" }, D.plain(root.detail)) : null,
      h("ul", { class: "legend" }, job.causes.filter((c) => incident.seconds[c.key] > 0).map((c) => h("li", { key: c.key }, h("span", { class: `key c-${c.key}` }), h("span", { class: "name" }, c.label), h("span", { class: "num" }, D.duration(incident.seconds[c.key])))))));
};

// ---- plans

D.plans = (job) => {
  const { report } = job;
  if (!report.plans) return null;
  if (!report.plans.length && job.frozen) return null;
  return card("plans", "Plans", "",
    report.plans.length ? D.table("Plans of the auto-scaler", [["plan", "num"], ["nodes", "num"], ["why"], ["predicted and measured"], ["outcome"]],
      [...report.plans].reverse().map((plan) => h("tr", { key: plan.number },
        h("td", { class: "num" }, plan.number), h("td", { class: "num" }, `${plan.before} → ${plan.nodes}`),
        h("td", {}, `${plan.kind}: ${plan.reason}`, h("span", { class: "small soft" }, D.moment(plan.time))), h("td", {}, effect(plan)), h("td", {}, plan.outcome))))
      : D.empty("No plan was made.", "With ", D.code("dlrover-run --auto-scale --nnodes 1:4"), " DLRover looks for the number of nodes that pays, and shows here what it expects and what it gets."));
};

const effect = (plan) => {
  if (!plan.predicted) return "–";
  const { low, high, throughput, before } = plan.predicted;
  const most = 1.1 * Math.max(high, plan.measured || 0, before || 0, 1e-9);
  const at = (value) => 160 * value / most;
  const measured = plan.measured === null ? "" : `, measured ${D.figure(plan.measured)} (${plan.error >= 0 ? "+" : ""}${(100 * plan.error).toFixed(0)} %)`;
  const words = `predicted ${D.figure(throughput)} ${plan.unit} (${D.figure(low)} to ${D.figure(high)})${measured}`;
  return [h("svg", { class: "effect", viewBox: "0 0 160 16", width: "160", height: "16", role: "img", "aria-label": words },
    h("line", { class: "base", x1: 0, x2: 160, y1: 8, y2: 8 }), h("rect", { x: at(low), y: 4, width: Math.max(1, at(high) - at(low)), height: 8, rx: 2 }),
    h("line", { class: "tick", x1: at(throughput), x2: at(throughput), y1: 2, y2: 14 }),
    plan.measured === null ? null : h("circle", { class: plan.within ? "within" : "outside", cx: at(plan.measured), cy: 8, r: 4.5 })), h("span", { class: "small" }, words)];
};

// ---- data, checkpoints, events

D.datasets = (job) => {
  const { report } = job;
  if (!report.datasets || (job.frozen && !report.datasets.length)) return null;
  return card("data", "Data", "", report.datasets.length ? report.datasets.map((data) => {
    const parts = data.partitions;
    const last = parts[parts.length - 1] || { number: 0, begin: 0, end: 0, acknowledged: 0, leased: 0 };
    const rows = data.stream ? parts : [last];
    return h("div", { key: data.name, class: "dataset" },
      h("h3", {}, data.name, h("span", { class: "soft small" }, data.stream ? D.count(parts.length, "partition") : `epoch ${last.number + 1}${data.epochs ? ` of ${data.epochs}` : ""}`, ` · ${D.count(data.workers, "reader")} · shards of ${D.whole(data.shard)}`)),
      rows.map((part) => {
        const size = Math.max(1, part.end - part.begin);
        return h("div", { class: "part", key: part.number }, data.stream ? h("span", { class: "small soft" }, `partition ${part.number}`) : null,
          h("div", { class: "bar thin", role: "img", "aria-label": `${D.whole(part.acknowledged)} of ${D.whole(size)} samples acknowledged, ${D.whole(part.leased)} leased` },
            h("span", { class: "acknowledged", style: { width: `${100 * part.acknowledged / size}%` } }), h("span", { class: "leased", style: { width: `${100 * part.leased / size}%` } })),
          h("p", { class: "small soft" }, `${D.whole(part.acknowledged)} of ${D.whole(size)} samples acknowledged (${D.percent(part.acknowledged / size)}), ${D.whole(part.leased)} leased`));
      }),
      data.skipped ? h("p", { class: "warning" }, `${D.count(data.skipped, "range")} of samples skipped: see the events.`) : null);
  }) : D.empty("No dataset is dealt by this job.", "An ", D.code("ElasticDataset"), " shows here how far its samples are read, and by whom."));
};

D.checkpoints = (job) => {
  const found = job.checkpoints;
  if (!found || (job.frozen && !found.length)) return null;
  return card("checkpoints", "Checkpoints", "", found.length ? found.map((place) => h("div", { key: place.path },
    h("h3", {}, D.code(place.path)), place.problem ? h("p", { class: "warning" }, place.problem) : null,
    place.steps.length ? D.table(`Stored steps in ${place.path}`, [["step", "num"], ["stored"], ["size", "num"], ["ranks", "num opt"], ["files", "num opt"], ["state"]],
      place.steps.map((step) => h("tr", { key: step.name }, h("td", { class: "num" }, step.step), h("td", {}, D.moment(step.time)), h("td", { class: "num" }, D.bytes(step.nbytes)),
        h("td", { class: "num opt" }, step.ranks === null ? "–" : step.ranks), h("td", { class: "num opt" }, step.files), h("td", {}, D.badge(step.state, { complete: "good", damaged: "bad", bad: "bad" }[step.state] || ""), step.latest ? [" ", D.badge("latest")] : null))))
      : D.empty("No step is stored yet.", "Saves to memory do not appear here; those to storage do.")))
    : D.empty("This job has stored no checkpoint.", "Save with ", D.code("dlrover.checkpoint.Checkpointer"), " to resume from memory after a fault, and from storage afterwards."));
};

const KINDS = { worker_failed: "bad", node_lost: "bad", hang_found: "bad", job_ended: "", restart_decided: "busy", slow_rank: "busy", samples_skipped: "busy", recovered: "good", round_completed: "good" };

D.events = (job) => {
  const { report } = job;
  if (!report.events) return null;
  const wanted = (job.eventFilter || "").toLowerCase();
  const found = report.events.filter((event) => !wanted || event.text.toLowerCase().includes(wanted) || event.kind.includes(wanted));
  const shown = found.slice(-(job.moreEvents ? 1000 : 40)).reverse();
  return card("events", "Events", h("input", { type: "search", placeholder: "Filter events", "aria-label": "Filter events", class: "filter", on: { input: (e) => job.show({ eventFilter: e.target.value }) } }),
    shown.length ? h("ol", { class: "events" }, shown.map((event) => h("li", { key: event.seq, class: KINDS[event.kind] || "" },
      h("time", { datetime: new Date(1000 * event.at).toISOString(), title: D.moment(event.at) }, D.clock(event.at)), h("span", {}, event.text))))
      : D.empty(wanted ? "No event matches." : "Nothing has happened yet.", wanted ? "Clear the filter to see all of them." : "Each decision of the master appears here in one sentence."),
    found.length > shown.length ? h("button", { class: "quiet", on: { click: () => job.show({ moreEvents: true }) } }, `Show ${D.count(found.length - shown.length, "earlier event")}`) : null);
};
