"""OpenTelemetry spans: what is sent of a job, and by whom when its master is replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from dlrover.master.views.observers import wants_spans
from dlrover.master.views.spans import JobSpans
from dlrover.spec import events
from dlrover.spec.events import Event
from dlrover.spec.failure import Failure, FailureKind, Origin, Verdict

FAILURE = Failure(id="1", kind=FailureKind.SIGNAL, node_id=1, rank=2, local_rank=0, round=1)
VERDICT = Verdict(title="rank 2 was killed by SIGKILL", origin=Origin.INFRASTRUCTURE)

STORY = [
    (100.0, events.JobSubmitted("train", 2, 2)),
    (100.0, events.RoundOpened(1, "the job starts", 2)),
    (104.0, events.RoundCompleted(1, 2, 16, 4.0)),
    (150.0, events.WorkerFailed(FAILURE, VERDICT)),
    (150.0, events.RestartDecided(1, "rank 2 was killed by SIGKILL")),
    (150.0, events.RoundOpened(2, "rank 2 was killed by SIGKILL", 2)),
    (152.0, events.RoundCompleted(2, 2, 16, 2.0)),
    (155.0, events.Recovered(2, 5.0)),
    (200.0, events.JobEnded(0, "All workers succeeded.")),
]
EVENTS = [Event(seq, time, body) for seq, (time, body) in enumerate(STORY, 1)]


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    yield exporter
    exporter.shutdown()


def sent(
    exporter: InMemorySpanExporter, past: list[Event], new: list[Event], **env: str
) -> dict[str, ReadableSpan]:
    spans = JobSpans(env, past, exporter)
    for event in new:
        spans.add(event)
    spans.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def times(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def test_a_job_is_a_trace_of_rounds_and_incidents(exporter: InMemorySpanExporter) -> None:
    spans = sent(exporter, [], EVENTS)
    assert {name: times(span) for name, span in spans.items()} == {
        "job": (100.0, 200.0),
        "rendezvous 1": (100.0, 104.0),
        "round 1": (104.0, 150.0),
        "incident 1": (150.0, 155.0),
        "rendezvous 2": (150.0, 152.0),
        "round 2": (152.0, 200.0),
    }
    job = spans["job"]
    assert job.parent is None
    for name, span in spans.items():
        assert span.context.trace_id == job.context.trace_id
        assert name == "job" or span.parent.span_id == job.context.span_id
    assert len({span.context.span_id for span in spans.values()}) == len(spans)
    assert spans["round 1"].attributes == {"dlrover.nodes": 2, "dlrover.world_size": 16}
    assert spans["incident 1"].attributes["dlrover.failure"] == VERDICT.title
    assert spans["incident 1"].attributes["dlrover.reason"] == "rank 2 was killed by SIGKILL"
    assert job.attributes["dlrover.exit_code"] == 0
    assert job.status.status_code is StatusCode.OK
    assert job.resource.attributes["service.name"] == "dlrover"
    assert [event.attributes["dlrover.event"] for event in job.events] == [
        "worker_failed",
        "restart_decided",
    ]


@pytest.mark.parametrize("taken_over", range(1, len(EVENTS)))
def test_a_master_that_takes_over_goes_on_with_the_trace(taken_over: int) -> None:
    first, second, whole = (InMemorySpanExporter() for _ in range(3))
    before = sent(first, [], EVENTS[:taken_over])
    after = sent(second, EVENTS[:taken_over], EVENTS[taken_over:])
    both = sent(whole, [], EVENTS)
    assert not before.keys() & after.keys()
    ids = {name: span.context.span_id for name, span in (before | after).items()}
    assert ids == {name: span.context.span_id for name, span in both.items()}
    parts = (before | after).values()
    assert {s.context.trace_id for s in parts} == {both["job"].context.trace_id}


def test_each_job_has_a_trace_of_its_own() -> None:
    traces = set()
    for name, at in (("train", 100.0), ("train", 101.0), ("other", 100.0)):
        first = Event(1, at, events.JobSubmitted(name, 2, 2))
        spans = sent(InMemorySpanExporter(), [], [first, EVENTS[-1]])
        traces.add(spans["job"].context.trace_id)
    assert len(traces) == 3


def test_a_job_that_fails_ends_its_incident_and_says_why(exporter: InMemorySpanExporter) -> None:
    end = Event(5, 160.0, events.JobEnded(4, "all 2 restarts are used."))
    spans = sent(exporter, [], [*EVENTS[:4], end])
    assert times(spans["incident 1"]) == (150.0, 160.0)
    assert spans["job"].status.status_code is StatusCode.ERROR
    assert spans["job"].status.description == "all 2 restarts are used."


def test_a_name_for_the_service_is_the_users(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    spans = sent(exporter, [], EVENTS, OTEL_SERVICE_NAME="mine")
    assert spans["job"].resource.attributes["service.name"] == "mine"


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, True),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_spans_are_sent_where_the_standard_variables_ask_for_them(
    env: dict[str, str], wanted: bool
) -> None:
    assert wants_spans(env) is wanted
