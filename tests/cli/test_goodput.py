"""``dlrover goodput``: the report, the page and the trace of jobs whose journals are simulated."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dlrover.cli.main import app
from dlrover.dashboard import content
from dlrover.dashboard.inspect import goodput, timeline, trace as tracing
from dlrover.dashboard.inspect.goodput import GoodputReport
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
    ratio = content["seconds"]["productive"] / content["wall_seconds"]
    assert content["goodput_ratio"] == pytest.approx(ratio)
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
    shown = content.of_report(report, [])
    assert shown["timeline"]["nodes"] == []
    assert shown["goodput"]["ratio"] is None
    json.loads(tracing.trace(report))


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


def test_the_page_shows_each_node_cause_and_incident(found: GoodputReport) -> None:
    shown = content.of_report(found, [])
    assert [node["id"] for node in shown["timeline"]["nodes"]] == [0, 1, 2, 3]
    drawn = {c for node in shown["timeline"]["nodes"] for c in node["spans"][2::3]}
    assert drawn == {CAUSES.index(cause) for cause, _ in goodput.spent(found.goodput)}
    first, second = shown["incidents"]
    assert first["title"].startswith("rank 4 was killed by SIGKILL")
    assert first["root"]["rank"] == 4
    assert first["root"]["origin"] == "infrastructure"
    assert first["root"]["advice"]
    assert (first["steps_lost"], second["steps_lost"]) == (6, 7)


def test_spans_lie_on_the_axis_in_order(found: GoodputReport) -> None:
    shown = content.of_report(found, [])["timeline"]
    for node in shown["nodes"]:
        spans = list(zip(node["spans"][::3], node["spans"][1::3], strict=True))
        assert all(
            since >= 0 and since + length <= 1000 * shown["seconds"] + 1 for since, length in spans
        )
        assert all(a[0] + a[1] <= b[0] + 1 for a, b in itertools.pairwise(spans))


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
    shown = content.of_report(scaled, [])
    assert [plan["number"] for plan in shown["plans"]] == [plan.number for plan in scaled.plans]
    assert all(plan["predicted"]["low"] <= plan["predicted"]["high"] for plan in shown["plans"])
    assert [round_["nodes"] for round_ in shown["rounds"]] == sizes


def test_of_many_nodes_those_with_incidents_are_drawn(tmp_path: Path) -> None:
    count = content.ROWS + 20
    job = JobSpec(name="wide", min_nodes=count, max_nodes=count)
    cluster = Cluster(job, nodes=count, nproc=1, steps=4, seed=1)
    cluster.run_until(lambda: cluster.program.steps_done == 2)
    struck = next(n for n in cluster.nodes if n.machine.node_id == count - 1)
    cluster.kill_worker(struck)
    cluster.finish()
    shown = content.of_report(goodput.report(journal_of(cluster, tmp_path)), [])["timeline"]
    assert len(shown["nodes"]) == content.ROWS
    assert shown["nodes"][-1]["id"] == count - 1
    assert shown["left_out"] == 20


# ---- the trace


def test_the_trace_follows_the_format_of_trace_events(found: GoodputReport) -> None:
    trace = json.loads(tracing.trace(found))
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
    events = json.loads(tracing.trace(found))["traceEvents"]
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
    events = json.loads(tracing.trace(scaled))["traceEvents"]
    plans = [e for e in events if e.get("cat") == "plan"]
    assert [e["name"] for e in plans] == [
        f"plan {plan.number}: {plan.before} -> {plan.nodes} nodes" for plan in scaled.plans
    ]
    assert [e["args"]["measured"] for e in plans] == [plan.measured for plan in scaled.plans]
    counted = [(e["ts"], e["args"]["nodes"]) for e in events if e["ph"] == "C"]
    assert [nodes for _, nodes in counted] == [nodes for _, nodes in scaled.sizes]
    assert counted == sorted(counted)
