"""The operator's HTTP port: ``/healthz``, ``/readyz`` and Prometheus metrics at ``/metrics``."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as NoAnswerError
from socketserver import ThreadingMixIn
from typing import Any, ClassVar, TypeVar, get_args
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dlrover.errors import ConfigurationError
from dlrover.kubernetes.operator.operator import Operator
from dlrover.kubernetes.operator.stats import Durations
from dlrover.kubernetes.resources.types import Phase

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT = 5.0
"""Seconds allowed for the operator's event loop to answer."""
REQUEST_TIMEOUT = 10.0
"""Seconds without a byte after which a connection is closed."""

T = TypeVar("T")
Start = Callable[[str, list[tuple[str, str]]], Any]
App = Callable[[Mapping[str, Any], Start], Iterable[bytes]]


def metrics(operator: Operator) -> Iterator[Metric]:
    """Yield an operator's current metrics."""
    stats = operator.stats
    yield _histogram(
        "dlrover_operator_reconcile_duration_seconds",
        "Seconds from reading a job until its decision is carried out.",
        stats.reconciles,
    )
    yield CounterMetricFamily(
        "dlrover_operator_reconcile_errors",
        "Decisions that could not be carried out; they are retried.",
        stats.failures,
    )
    yield GaugeMetricFamily(
        "dlrover_operator_queue_depth", "Jobs that wait to be reconciled.", operator.waiting
    )
    yield _histogram(
        "dlrover_operator_queue_duration_seconds",
        "Seconds that a job waited to be reconciled.",
        stats.waits,
    )
    jobs = GaugeMetricFamily("dlrover_operator_jobs", "ElasticJobs by state.", labels=["phase"])
    count = Counter(operator.phases())
    for phase in get_args(Phase):
        jobs.add_metric([phase], count[phase])
    yield jobs
    calls = CounterMetricFamily(
        "dlrover_operator_api_requests",
        "Calls to the API server by HTTP status; code is empty without a response.",
        labels=["method", "code"],
    )
    for (method, code), number in sorted(stats.calls.items()):
        calls.add_metric([method, code], number)
    yield calls
    yield GaugeMetricFamily(
        "dlrover_operator_leader", "1 while this operator leads, else 0.", int(stats.leads)
    )


def _histogram(name: str, what: str, durations: Durations) -> Metric:
    family = HistogramMetricFamily(name, what)
    family.add_metric([], buckets=durations.buckets(), sum_value=durations.sum)
    return family


class HealthServer(Collector):
    """Serves the port from its own threads until closed.

    The operator's event loop produces all answers, so ``/healthz`` fails if the loop is blocked.

    Raises:
        ConfigurationError: the server cannot listen on the address.
    """

    def __init__(self, operator: Operator, host: str, port: int) -> None:
        self._operator = operator
        self._loop = asyncio.get_running_loop()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._metrics: App = make_wsgi_app(registry)
        try:
            self._server = make_server(host, port, self._answer, _Server, _HealthHandler)
        except OSError as error:
            raise ConfigurationError(
                f"--http-port {port} cannot be used on {host}: {error.strerror}; choose a free "
                "port, or 0 for none."
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> list[Metric]:
        """Return all metrics, read on the event loop."""
        return self._ask(lambda: list(metrics(self._operator)))

    def _ask(self, question: Callable[[], T]) -> T:
        async def answer() -> T:
            return question()

        asked = asyncio.run_coroutine_threadsafe(answer(), self._loop)
        return asked.result(ANSWER_TIMEOUT)

    def _answer(self, environ: Mapping[str, Any], start: Start) -> Iterable[bytes]:
        path = environ["PATH_INFO"].rstrip("/")
        try:
            if path == "/metrics":
                return self._metrics(environ, start)
            if path == "/healthz":
                return _text(start, "200 OK", self._ask(lambda: "ok"))
            if path == "/readyz":
                obstacle = self._ask(lambda: self._operator.obstacle)
                status = "503 Service Unavailable" if obstacle else "200 OK"
                return _text(start, status, obstacle or "ok")
        except NoAnswerError:
            said = f"The event loop did not answer within {ANSWER_TIMEOUT:g} s."
            return _text(start, "503 Service Unavailable", said)
        return _text(start, "404 Not Found", "There are /healthz, /readyz and /metrics.")


def _text(start: Start, status: str, said: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{said}\n".encode()]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a defect; a connection that broke, or that said nothing, is none."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            logger.error("The answer to %s failed", client_address, exc_info=error)


class _HealthHandler(WSGIRequestHandler):
    timeout: ClassVar[float | None] = REQUEST_TIMEOUT  # each connection has a thread

    def log_message(self, *_: object) -> None:
        """Log nothing; scrapes are not worth a log line."""
