"""OpenTelemetry spans of a job, its rounds and its incidents, made from its events.

Their ids are computed from the job, so a master that takes over continues the same trace. Spans that ended
before the takeover are not sent again.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from dlrover.spec import events
from dlrover.spec.events import Event

LAST_EXPORT = 5.0
"""Maximum seconds to send the last spans when the master exits."""
_NANO = 1e9

_RECORDED = (
    events.NodeConnected
    | events.NodeLost
    | events.WorkerFailed
    | events.RestartDecided
    | events.MasterRecovered
)
"""Events recorded in the job's span."""


class _Ids(IdGenerator):
    """Generator that returns preset ids."""

    trace = 1
    span = 1

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span


class JobSpans:
    """The spans of one job: give it the past events, then each new one."""

    def __init__(
        self, env: Mapping[str, str], past: Sequence[Event], exporter: SpanExporter | None = None
    ) -> None:
        """Start to send spans to the place that OpenTelemetry's environment variables name.

        Args:
            env: The environment, which may also name the service.
            past: The events before this master's start.
            exporter: Takes the spans; by default they are sent by OTLP over HTTP.
        """
        named = {"OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"} & env.keys()
        resource = Resource.create({} if named else {SERVICE_NAME: "dlrover"})
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("dlrover.master")
        self._open: dict[str, Span] = {}
        self._incidents = 0
        self._live = False
        for event in past:
            self.add(event)
        self._live = True

    def add(self, event: Event) -> None:
        """Process the next event."""
        body, at = event.body, event.time
        match body:
            case events.JobSubmitted(name):
                digest = hashlib.sha256(f"{name} {at}".encode()).digest()
                self._ids.trace = int.from_bytes(digest[:16], "big")
                self._begin("job", "job", at, {"dlrover.job.name": name})
            case events.RoundOpened(round_, reason):
                self._end("round", at)
                self._begin("rendezvous", f"rendezvous {round_}", at, {"dlrover.reason": reason})
            case events.RoundCompleted(round_, nodes, world_size):
                self._end("rendezvous", at)
                sizes = {"dlrover.nodes": nodes, "dlrover.world_size": world_size}
                self._begin("round", f"round {round_}", at, sizes)
            case events.WorkerFailed() | events.RestartDecided():
                self._fault(body, at)
            case events.Recovered():
                self._end("incident", at)
            case events.JobEnded():
                self._job_ended(body, at)
        if isinstance(body, _RECORDED) and "job" in self._open:
            self._open["job"].add_event(
                event.sentence(),
                {"dlrover.event": str(type(body).__struct_config__.tag)},
                timestamp=round(at * _NANO),
            )

    def _fault(self, body: events.WorkerFailed | events.RestartDecided, at: float) -> None:
        if "incident" not in self._open:
            self._incidents += 1
            self._begin("incident", f"incident {self._incidents}", at, {})
        if isinstance(body, events.RestartDecided):
            self._open["incident"].set_attribute("dlrover.reason", body.reason)
        else:
            self._open["incident"].set_attribute("dlrover.failure", body.verdict.title)
            self._open["incident"].set_attribute("dlrover.origin", body.verdict.origin.value)

    def _job_ended(self, body: events.JobEnded, at: float) -> None:
        job = self._open.get("job")
        if job is not None:
            job.set_attribute("dlrover.exit_code", body.exit_code)
            code = StatusCode.ERROR if body.exit_code else StatusCode.OK
            job.set_status(Status(code, body.reason if body.exit_code else None))
        for kind in ("incident", "rendezvous", "round", "job"):
            self._end(kind, at)

    def _begin(self, kind: str, name: str, at: float, facts: Mapping[str, AttributeValue]) -> None:
        digest = hashlib.sha256(f"{self._ids.trace} {name}".encode()).digest()
        self._ids.span = int.from_bytes(digest[:8], "big")
        parent = self._open.get("job")
        context = set_span_in_context(parent) if parent is not None else None
        self._open[kind] = self._tracer.start_span(
            name, context=context, attributes=facts, start_time=round(at * _NANO)
        )

    def _end(self, kind: str, at: float) -> None:
        span = self._open.pop(kind, None)
        if span is not None and self._live:
            span.end(round(at * _NANO))

    def close(self) -> None:
        """Send the spans that have ended and are not sent yet, for at most `LAST_EXPORT` seconds."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(LAST_EXPORT)
