"""A real job that is watched: its goodput, its metrics over HTTP, its spans over OTLP."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dlrover.spec import events

pytest.importorskip("prometheus_client")
pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(90)]

NODES = 2
STEPS = 240
STEP_SECONDS = 0.05

BASE_UNITS = ("seconds", "bytes", "ratio")
LABELS = {
    "dlrover_job_seconds": {"cause"},
    "dlrover_job_restarts": {"origin"},
    "dlrover_job_nodes": {"status"},
}


class Receiver:
    """Takes spans by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            for attribute in resource.resource.attributes:
                if attribute.key == "service.name":
                    self.services.add(attribute.value.string_value)
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.close()


def scrape(port: int) -> dict[str, Metric]:
    """The metric families by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    found = [
        s.value
        for f in families.values()
        for s in f.samples
        if (s.name, s.labels) == (name, labels)
    ]
    (only,) = found
    return only


def lint(families: dict[str, Metric]) -> None:
    """The conventions of Prometheus for names, units, types and labels."""
    for family in families.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", family.name)
        assert family.name.startswith("dlrover_")
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge")
        for sample in family.samples:
            assert sample.name == family.name + ("_total" if family.type == "counter" else "")
            of_node = {"node"} if family.name.startswith("dlrover_node_") else set()
            assert sample.labels.keys() == LABELS.get(family.name, of_node)
            assert sample.value >= 0
        assert not re.search(r"_(total|count|sum|bucket|info|milliseconds|minutes)$", family.name)
        units = [unit for unit in BASE_UNITS if unit in family.name]
        assert all(family.name.endswith(unit) for unit in units)


def test_a_real_job_can_be_watched_while_it_runs_and_explained_when_it_has_ended(
    run, tmp_path, receiver: Receiver
) -> None:
    port = run.free_port()
    (tmp_path / "out").mkdir()
    launch = run(
        *("--local-nodes", NODES, "--nproc-per-node", 1, "--rdzv-conf", f"metrics_port={port}"),
        *(run.scripts / "train.py", tmp_path / "out", STEPS, STEP_SECONDS),
        env={"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint},
    )
    launch.until(lambda: launch.events_of(events.RoundCompleted), what="the first world")
    losses = tmp_path / "out" / "losses.jsonl"
    launch.until(lambda: losses.exists() and len(losses.read_text().splitlines()) >= 12, 40)
    first = scrape(port)
    lint(first)
    assert value(first, "dlrover_job_nodes", status="running") == 2
    assert value(first, "dlrover_job_world_size") == 2
    assert value(first, "dlrover_job_steps_total") >= 1
    assert value(first, "dlrover_incidents_total") == 0
    launch.of_kind("worker")[0].kill()
    launch.until(lambda: launch.events_of(events.Recovered), 40)
    second = scrape(port)
    lint(second)
    assert value(second, "dlrover_incidents_total") == 1
    assert value(second, "dlrover_job_restarts_total", origin="infrastructure") == 1
    assert value(second, "dlrover_job_restarts_total", origin="user_code") == 0
    counters = [f for f in first.values() if f.type == "counter"]
    for family in counters:
        for sample in family.samples:
            assert value(second, sample.name, **sample.labels) >= sample.value, sample
    token = (launch.job_dir / "token").read_text().strip()
    assert token not in str(second)
    running = json.loads(run.dlrover("goodput", "--job-dir", launch.job_dir, "-o", "json").stdout)
    assert running["phase"] == "running"
    launch.succeed(60)
    check_goodput(run, launch, running)
    check_spans(receiver)


def check_goodput(run, launch, running: dict) -> None:
    """What is said at the end, and what is said in the end's outcome."""
    files = [launch.job_dir / "page.html", launch.job_dir / "trace.json"]
    options = ["--html", files[0], "--trace", files[1], "--output", "json"]
    shown = run.dlrover("goodput", "--job-dir", launch.job_dir, *options)
    assert shown.returncode == 0, shown.stderr
    ended = json.loads(shown.stdout)
    assert ended["phase"] == "succeeded"
    assert ended["wall_seconds"] > running["wall_seconds"]
    assert sum(ended["seconds"].values()) == pytest.approx(ended["wall_seconds"], abs=1e-5)
    # Two nodes from the job's submission on; they leave soon after its end.
    assert 2 * ended["job_seconds"] <= ended["wall_seconds"] < 2 * ended["job_seconds"] + 10
    (incident,) = ended["incidents"]
    assert "killed by SIGKILL" in incident["title"]
    recovered, end = (launch.events_of(kind)[0] for kind in (events.Recovered, events.JobEnded))
    # Steps count from the first report of one; with three more jobs on two cores it came after half of this time.
    assert ended["seconds"]["productive"] > NODES * (end.time - recovered.time) * 0.3
    lasted = incident["until"] - incident["since"]
    assert lasted == pytest.approx(recovered.body.seconds, abs=0.5)
    outcome = json.loads((launch.job_dir / "outcome.json").read_text())
    assert outcome["goodput"]["seconds"] == pytest.approx(ended["seconds"], abs=0.5)
    assert "customElements" in files[0].read_text()
    assert json.loads(files[1].read_text())["traceEvents"]


def check_spans(receiver: Receiver) -> None:
    assert receiver.services == {"dlrover"}
    by_name = {span.name: span for span in receiver.spans}
    rounds = ["rendezvous 1", "round 1", "rendezvous 2", "round 2"]
    assert by_name.keys() == {"job", "incident 1", *rounds}
    job = by_name["job"]
    for span in receiver.spans:
        assert span.trace_id == job.trace_id
        assert job.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= job.end_time_unix_nano
        assert span is job or span.parent_span_id == job.span_id


# ---- what cannot be


def test_a_port_for_metrics_that_is_taken_ends_the_job_in_a_sentence(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--standalone", "--rdzv-conf", f"metrics_port={port}"]
        _, error = run(*options, run.scripts / "hello.py").end_with(2)
    sentence = f"metrics_port {port} cannot be used on 127.0.0.1: Address already in use"
    assert sentence in " ".join(error.split())


def test_a_collector_of_spans_that_does_not_answer_holds_nobody_up(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_TIMEOUT": "30"}
        launch = run("--standalone", run.scripts / "hello.py", env=env)
        assert "hello from rank 0" in launch.succeed()
    (ended,) = launch.events_of(events.JobEnded)
    assert time.time() - ended.time < 15, "five seconds for the last spans, and some to leave"


def test_a_job_of_another_machine_is_running_in_the_dashboards_list(run, tmp_path) -> None:
    """Its directory is on a shared disk; the process id of its master means nothing here."""
    from dlrover.dashboard import listing

    launch = run(run.scripts / "wait_for_file.py", tmp_path / "go")
    launch.wait_for("worker")
    address = json.loads((launch.job_dir / "master.json").read_text())
    (launch.job_dir / "master.json").write_text(json.dumps({**address, "pid": 2**22 + 1}))
    (row,) = (row for row in listing.JobList([], [launch.job_dir]).jobs())
    asyncio.run(listing.ask_masters([row]))
    assert (row["phase"], row["reason"]) == ("running", "")
    (tmp_path / "go").touch()
    launch.succeed()
