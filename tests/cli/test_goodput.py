"""``dlrover goodput``: the report, the page and the trace of jobs whose journals are simulated."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dlrover.cli.main import app
from dlrover.dashboard.inspect import goodput, page, timeline
from dlrover.dashboard.inspect.goodput import GoodputReport
from dlrover.dashboard.inspect.plans import interval
from dlrover.dashboard.inspect.timeline import Timeline
from dlrover.errors import ConfigurationError
from dlrover.master.journal.file import FileJournal
from dlrover.master.machine.goodput.roundtime import nothing
from dlrover.spec.events import SizeSettled
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import CAUSES, Cause, Goodput
from tests.simulation.cluster import Cluster


def journal_of(cluster: Cluster, directory: Path) -> JobDir:
    """The directory that a simulated job would have left."""
    job_dir = JobDir(directory)
    journal = FileJournal(job_dir.journal)
    for time, event in cluster.journal:
        journal.append(event, time)
    journal.close()
    return job_dir


def troubled(name: str = "demo") -> Cluster:
    """A job that loses a worker and a node, and repeats steps after each."""
    job = JobSpec(name=name, min_nodes=2, max_nodes=3, managed_nodes=3)
    cluster = Cluster(job, steps=80, seed=3)
    cluster.program.checkpoint_every = 10
    cluster.run_until(lambda: cluster.program.steps_done == 26)
    cluster.kill_worker(cluster.nodes[2])
    cluster.run_until(lambda: cluster.program.steps_done == 47)
    cluster.kill_agent(cluster.nodes[1])
    return cluster


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> JobDir:
    cluster = troubled()
    cluster.finish()
    cluster.run(5.0)
    return journal_of(cluster, tmp_path_factory.mktemp("ended"))


@pytest.fixture(scope="module")
def found(ended: JobDir) -> GoodputReport:
    return goodput.report(ended)


# ---- the report


def test_json_has_the_documented_keys_and_adds_up(ended: JobDir) -> None:
    shown = CliRunner().invoke(app, ["goodput", "--job-dir", str(ended.path), "-o", "json"])
    assert shown.exit_code == 0, shown.output
    content = json.loads(shown.stdout)
    assert content["job"] == "demo"
    assert content["phase"] == "succeeded"
    assert content["nodes"] == 4
    assert content["seconds"].keys() == {cause.value for cause in Cause}
    assert sum(content["seconds"].values()) == pytest.approx(content["wall_seconds"], abs=1e-5)
    assert content["goodput_ratio"] == content["seconds"]["productive"] / content["wall_seconds"]
    assert [incident["steps_lost"] for incident in content["incidents"]] == [6, 7]
    assert [incident["node"] for incident in content["incidents"]] == [2, 1]
    assert content["incidents"][0]["title"].startswith("rank 4 was killed by SIGKILL")


def test_text_has_a_row_for_each_cause_and_incident(ended: JobDir, found: GoodputReport) -> None:
    shown = CliRunner().invoke(
        app, ["goodput", "--job-dir", str(ended.path)], env={"COLUMNS": "120"}
    )
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    seconds = found.goodput.seconds
    ratio = f"{100 * found.goodput.goodput_ratio:.1f} %"
    assert lines[0] == f"demo: succeeded, {found.goodput.job_seconds:.1f} s, 4 nodes"
    assert lines[1].startswith(f"Goodput {ratio}: of ")
    assert f"productive {seconds['productive']:.1f} s {ratio}" in lines
    assert f"all {found.goodput.wall_seconds:.1f} s 100.0 %" in lines
    assert not any(line.startswith("eval") for line in lines)
    assert sum("killed by SIGKILL" in line for line in lines) == 2


def test_times_of_long_jobs_are_hours() -> None:
    assert goodput.Amounts(36_000.0)(5400.0) == "1.50 h"
    assert goodput.Amounts(35_999.0)(5400.0) == "5,400.0 s"


def test_what_the_tables_leave_out_is_said() -> None:
    zero = {cause.value: 0.0 for cause in Cause}
    found = Goodput(
        goodput_ratio=0.0,
        wall_seconds=1.0,
        job_seconds=1.0,
        nodes=1,
        seconds=zero,
        earlier_incidents=7,
        earlier_incident_seconds=30.0,
        rounds_without_first_step=2,
    )
    earlier, unknown = goodput.notes(found, goodput.Amounts(1.0))
    assert earlier == "7 earlier incidents cost 30.0 s in all."
    assert unknown.startswith("Recomputed steps are not measured")
    assert found.in_words() == "at most 0.0 %"
    assert "in 2 of the later rounds" in unknown


def test_a_job_without_any_time_can_be_shown(tmp_path: Path) -> None:
    cluster = Cluster(JobSpec(name="new", min_nodes=1, max_nodes=1))
    report = goodput.report(journal_of(cluster, tmp_path))
    assert report.goodput.wall_seconds == 0.0
    assert report.goodput.goodput_ratio is None
    text = io.StringIO()
    goodput.render(report, Console(file=text))
    assert "Goodput is not measured: the program has reported no training step." in text.getvalue()
    drawn = page.render(report)
    assert "<svg" in drawn
    assert "Goodput is not measured" in drawn
    json.loads(page.trace(report))


def test_a_job_whose_master_is_gone_is_told_to_the_end_of_its_journal(tmp_path: Path) -> None:
    cluster = troubled()
    cluster.run(3.0)
    report = goodput.report(journal_of(cluster, tmp_path))
    assert report.phase in ("running", "restarting")
    last = cluster.journal[-1][0]
    assert report.goodput.job_seconds == pytest.approx(last)
    assert report.goodput == cluster.ledger.goodput(last)


def test_a_directory_without_a_journal_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no journal; it is on the machine that"):
        goodput.report(JobDir(tmp_path))


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_file_that_cannot_be_written_is_refused_in_a_sentence(ended: JobDir, option: str) -> None:
    arguments = ["goodput", "--job-dir", str(ended.path), option, "/nowhere/file"]
    shown = CliRunner().invoke(app, arguments)
    assert isinstance(shown.exception, ConfigurationError)
    assert str(shown.exception).startswith(
        f"{option} /nowhere/file cannot be written: No such file"
    )


# ---- the timeline


def test_the_timeline_of_each_node_has_no_gap_and_the_reports_sums(found: GoodputReport) -> None:
    sums: Counter[Cause] = Counter()
    for node in found.timeline.nodes:
        spans = found.timeline.spans(node)
        for a, b in itertools.pairwise(spans):
            assert a.until == b.since
            assert a.cause is not b.cause
        for span in spans:
            sums[span.cause] += span.until - span.since
    for cause in Cause:
        assert sums[cause] == pytest.approx(1e6 * found.goodput.seconds[cause.value], abs=1.0)


@pytest.mark.parametrize("resolution", [0, 1_000, 3_000_000, 10**12])
def test_a_coarser_timeline_has_the_same_sums(found: GoodputReport, resolution: int) -> None:
    def sums(spans: list[timeline.CauseSpan]) -> Counter[Cause]:
        return sum((Counter({s.cause: s.until - s.since}) for s in spans), Counter())

    for node in found.timeline.nodes:
        fine, coarse = found.timeline.spans(node), found.timeline.spans(node, resolution)
        assert sums(fine) == sums(coarse)
        assert resolution < 10**12 or len(coarse) <= len(CAUSES)


def test_the_memory_for_a_timeline_is_bounded() -> None:
    line, parts = Timeline(), nothing()
    parts[0], parts[1] = 5, 2
    count = 20 * timeline.KEPT
    for number in range(count):
        line.round_spent(1, 7 * number, 7 * number + 7, parts)
    line.node_ran(0, 1, 0, 7 * count)
    assert len(line._rounds[1]) <= timeline.KEPT
    spans = line.spans(0)
    assert sum(s.until - s.since for s in spans) == 7 * count
    assert sum(s.until - s.since for s in spans if s.cause is CAUSES[0]) == 5 * count


# ---- the page


class Reader(HTMLParser):
    """Checks that tags are closed, and keeps what matters."""

    VOID = frozenset({"meta", "br", "line"})
    OPTIONAL = frozenset({"tr", "td", "th"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID | self.OPTIONAL:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_needs_nothing_from_outside(found: GoodputReport) -> None:
    text = page.render(found)
    reader = read(text)
    assert not {"script", "link", "img", "iframe", "object", "use", "image"} & reader.tags.keys()
    assert not {name for name, _ in reader.attributes} & {"src", "href", "xlink:href", "data"}
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme:dark" in text


def test_the_page_shows_each_node_cause_and_incident(found: GoodputReport) -> None:
    reader = read(page.render(found))
    classes = Counter(value for name, value in reader.attributes if name == "class")
    assert classes["row"] == 4
    assert classes["incident"] == len(found.goodput.incidents) == 2
    hover = [title for title in reader.titles if title[:2] in ("1.", "2.")]
    assert hover[0].startswith("1. rank 4 was killed by SIGKILL")
    assert hover[0].endswith("s until the next new step, 6 steps made again.")
    strokes = {value for name, value in reader.attributes if name == "stroke"}
    assert strokes == {page.COLOURS[cause] for cause, _ in goodput.spent(found.goodput)}
    assert page.COLOURS.keys() == set(Cause)
    assert len(set(page.COLOURS.values())) == len(Cause)


def test_strokes_lie_on_the_axis_in_order(found: GoodputReport) -> None:
    reader = read(page.render(found))
    for data in (value for name, value in reader.attributes if name == "d"):
        strokes = [(float(x), float(end)) for x, end in re.findall(r"M([\d.]+) 0H([\d.]+)", data)]
        for x, end in strokes:
            assert 110.0 <= x <= end <= 1110.01
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(strokes))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> GoodputReport:
    """A job that finds its size by itself: two nodes, of which more do not pay."""
    pytest.importorskip("scipy")
    limits = Limits(autoscale_window=10.0, autoscale_interval=120.0, autoscale_patience=120.0)
    job = JobSpec(
        name="auto", min_nodes=1, max_nodes=8, managed_nodes=1, auto_scale=True, limits=limits
    )
    cluster = Cluster(job, nproc=1, steps=100_000, seed=0)
    cluster.program.law = lambda n: ({1: 0.1, 2: 0.12}.get(n, 0.1 * n), 0.1)
    cluster.run_until(lambda: any(isinstance(e.body, SizeSettled) for e in cluster.events), 3600)
    return goodput.report(journal_of(cluster, tmp_path_factory.mktemp("scaled")))


def test_the_page_shows_the_number_of_nodes_and_each_plan(scaled: GoodputReport) -> None:
    assert len(scaled.plans) >= 2
    sizes = [nodes for _, nodes in scaled.sizes]
    assert (sizes[0], sizes[-1]) == (1, scaled.plans[-1].nodes)
    assert {plan.nodes for plan in scaled.plans} <= set(sizes)
    reader = read(text := page.render(scaled))
    classes = Counter(value for name, value in reader.attributes if name == "class")
    assert (classes["plan"], classes["size"]) == (len(scaled.plans), 1)
    for plan in scaled.plans:
        assert (
            f"plan {plan.number}, {plan.kind.value}: {plan.reason}; {plan.outcome}" in reader.titles
        )
        assert plan.predicted is not None
        assert f"<td>{interval(plan.predicted)} worker steps/s" in text
        assert f"<td>{plan.measured:.3g} ({plan.error:+.0%})" in text
    line = re.findall(r'<path class=size d="([^"]+)"', text)[0]
    changes = len(scaled.sizes) - 1
    assert re.fullmatch(rf"M[\d.]+ [\d.]+(H[\d.]+V[\d.]+){{{changes}}}H1110", line)
    places = [float(x) for x in re.findall(r"[MH]([\d.]+)", line)]
    assert places == sorted(places)
    assert 110.0 <= places[0] < places[-1] == 1110.0


def test_a_job_whose_size_never_changes_has_no_line_of_it(tmp_path: Path) -> None:
    cluster = Cluster(JobSpec(name="fixed", min_nodes=2, max_nodes=2), nodes=2, steps=10)
    cluster.finish()
    assert "<h2>Nodes</h2>" not in page.render(goodput.report(journal_of(cluster, tmp_path)))


def test_texts_of_a_job_cannot_become_markup(tmp_path: Path) -> None:
    cluster = troubled("<script>alert(1)</script>")
    cluster.finish()
    text = page.render(goodput.report(journal_of(cluster, tmp_path)))
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_of_many_nodes_those_with_incidents_are_drawn(tmp_path: Path) -> None:
    count = page.ROWS + 20
    job = JobSpec(name="wide", min_nodes=count, max_nodes=count)
    cluster = Cluster(job, nodes=count, nproc=1, steps=4, seed=1)
    cluster.run_until(lambda: cluster.program.steps_done == 2)
    struck = next(n for n in cluster.nodes if n.machine.node_id == count - 1)
    cluster.kill_worker(struck)
    cluster.finish()
    text = page.render(goodput.report(journal_of(cluster, tmp_path)))
    assert text.count("class=row") == page.ROWS
    assert f">node {count - 1}</text>" in text
    assert "20 more nodes are not drawn." in text


@pytest.mark.parametrize("seconds", [0.5, 59.0, 3_000.0, 90_000.0, 86_400.0 * 54])
def test_the_axis_has_a_few_ticks(seconds: float) -> None:
    ticks = page._Axis(1000.0, seconds).ticks()
    assert 1 <= len(ticks) <= 11
    assert ticks[0] == (110.0, "0 s")
    assert len({name for _, name in ticks}) == len(ticks)
    assert not any(name.endswith((" 0 s", " 0 min", " 0 h")) for _, name in ticks)


# ---- the trace


def test_the_trace_follows_the_format_of_trace_events(found: GoodputReport) -> None:
    trace = json.loads(page.trace(found))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X", "i", "C")
        assert isinstance(event["pid"], int)
        if event["ph"] == "C":
            assert event["args"]["nodes"] > 0
            continue
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert event["args"]["name"]
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert event["cat"]
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] > 0
        else:
            assert event["s"] == "g"


def test_the_trace_has_a_track_for_each_node_and_each_incident(found: GoodputReport) -> None:
    events = json.loads(page.trace(found))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {n: f"node {n} (machine of agent {n})" for n in range(4)}
    for node in range(4):
        track = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == node)
        assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(track))
    total = sum(e["dur"] for e in events if e["ph"] == "X")
    assert total == pytest.approx(found.goodput.wall_seconds * 1e6, abs=1.0)
    marks = [e for e in events if e["ph"] == "i" and e["cat"] == "incident"]
    assert [e["name"] for e in marks] == [i.title for i in found.goodput.incidents]
    assert [e["tid"] for e in marks] == [2, 1]


def test_the_trace_has_each_plan_and_the_number_of_nodes(scaled: GoodputReport) -> None:
    events = json.loads(page.trace(scaled))["traceEvents"]
    plans = [e for e in events if e.get("cat") == "plan"]
    assert [e["name"] for e in plans] == [
        f"plan {plan.number}: {plan.before} -> {plan.nodes} nodes" for plan in scaled.plans
    ]
    assert [e["args"]["measured"] for e in plans] == [plan.measured for plan in scaled.plans]
    counted = [(e["ts"], e["args"]["nodes"]) for e in events if e["ph"] == "C"]
    assert [nodes for _, nodes in counted] == [nodes for _, nodes in scaled.sizes]
    assert counted == sorted(counted)
