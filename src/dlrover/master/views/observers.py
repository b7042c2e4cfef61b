"""Optional observers of a job: Prometheus and OpenTelemetry."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from dlrover import extras
from dlrover._util.doors import install
from dlrover.errors import ConfigurationError
from dlrover.master.journal.history import History
from dlrover.master.service import Master
from dlrover.spec.jobdir import MetricsAddress

logger = logging.getLogger(__name__)


class Observers:
    """The metrics and spans of one master. Packages that are not needed are not imported.

    Raises:
        ConfigurationError: metrics are requested and cannot be served; after a takeover, the job goes on
            without them instead.
    """

    def __init__(
        self, master: Master, history: History, metrics: MetricsAddress, env: Mapping[str, str]
    ) -> None:
        self._closers: list[Callable[[], None]] = []
        try:
            self._serve_metrics(master, metrics)
        except ConfigurationError:
            if not master.replayed:
                raise
            logger.exception("The job goes on without metrics")
        self._send_spans(history, env)

    def _serve_metrics(self, master: Master, address: MetricsAddress) -> None:
        if not address.port:
            return
        with extras.needed(f"metrics_port {address.port}", "metrics"):
            from dlrover.master.views.metrics import MetricsServer  # noqa: PLC0415 - an extra
        self._closers.append(MetricsServer(master, address).close)

    def _send_spans(self, history: History, env: Mapping[str, str]) -> None:
        if not wants_spans(env):
            return
        try:
            from dlrover.master.views.spans import JobSpans  # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            logger.warning(
                "OpenTelemetry's variables are set, but no spans are sent without its packages: %s",
                install("otel"),
            )
            return
        spans = JobSpans(env, history.events)
        history.listeners.append(spans.add)
        self._closers.append(spans.close)

    def close(self) -> None:
        """Stop serving and sending; this may take some seconds."""
        for close in self._closers:
            close()


def wants_spans(env: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's variables ask for spans, by the protocol supported here."""
    endpoint = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if not endpoint or env.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    if protocol not in (None, "", "http/protobuf"):
        logger.warning("No spans are sent: the OTLP protocol is %s, not http/protobuf", protocol)
        return False
    return env.get("OTEL_SDK_DISABLED", "").lower() != "true"
