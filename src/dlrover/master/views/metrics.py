"""Prometheus metrics of a job, read from the machine and its ledger at each scrape."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlrover.errors import ConfigurationError
from dlrover.master.machine.goodput.roundtime import MICRO, microseconds
from dlrover.master.service import Master
from dlrover.spec.jobdir import MetricsAddress
from dlrover.spec.node import NodeStatus
from dlrover.spec.outcome import CAUSES

ANSWER_TIMEOUT = 5.0
"""Seconds that the master's event loop has to answer one scrape."""


class JobCollector(Collector):
    """Collector of one job's metrics. The HTTP server's threads call `collect`."""

    def __init__(self, master: Master, loop: asyncio.AbstractEventLoop) -> None:
        self._master = master
        self._loop = loop

    def collect(self) -> list[Metric]:
        """Return all metrics, read on the master's event loop because that loop changes their sources."""

        async def read() -> list[Metric]:
            return list(metrics(self._master))

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(ANSWER_TIMEOUT)


def metrics(master: Master) -> Iterator[Metric]:
    """Yield the current metrics of a master's job."""
    machine, ledger, now = master.machine, master.ledger, master.clock()
    seconds = CounterMetricFamily(
        "dlrover_job_seconds",
        "Time of all nodes by what it went into; of a running world up to its last new step.",
        labels=["cause"],
    )
    for cause, spent in zip(CAUSES, ledger.certain(microseconds(now)), strict=True):
        seconds.add_metric([cause.value], spent / MICRO)
    yield seconds
    ratio = ledger.goodput(now).goodput_ratio
    yield GaugeMetricFamily(
        "dlrover_job_goodput_ratio",
        "Share of the nodes' time that went into new training steps; NaN before the first one.",
        math.nan if ratio is None else ratio,
    )
    yield CounterMetricFamily(
        "dlrover_job_steps",
        "Optimizer steps, repeated ones included.",
        machine.progress.total_steps,
    )
    restarts = CounterMetricFamily(
        "dlrover_job_restarts", "Rounds started after a failure, by its origin.", labels=["origin"]
    )
    policy = machine.restarts
    restarts.add_metric(["user_code"], policy.user_restarts)
    restarts.add_metric(["infrastructure"], policy.count - policy.user_restarts)
    yield restarts
    nodes = GaugeMetricFamily("dlrover_job_nodes", "Nodes of the job.", labels=["status"])
    count = Counter(node.status for node in machine.nodes.values())
    for status in NodeStatus:
        nodes.add_metric([status.value], count[status])
    yield nodes
    yield GaugeMetricFamily(
        "dlrover_job_world_size", "Workers of the last completed round.", machine.rounds.workers
    )
    yield CounterMetricFamily(
        "dlrover_job_rounds",
        "Rendezvous rounds that were completed.",
        machine.rendezvous.last_round,
    )
    yield CounterMetricFamily(
        "dlrover_incidents", "Interruptions of the job by a fault.", ledger.incidents.count
    )
    yield GaugeMetricFamily(
        "dlrover_incident_open",
        "1 from a fault to the first new step, else 0.",
        int(ledger.incidents.open is not None),
    )
    yield from _usage(master)


def _usage(master: Master) -> Iterator[Metric]:
    """Yield the resource usage of the nodes of the running world, as last reported."""
    reported = sorted(master.scaler.usage.items())
    for name, words, values in (
        ("memory_bytes", "Memory that a node uses.", [use.memory for _, use in reported]),
        ("memory_limit_bytes", "Memory that a node has.", [use.limit for _, use in reported]),
        ("cpu_cores", "Cores that a node keeps busy.", [use.cpu for _, use in reported]),
        ("cpu_limit_cores", "Cores that a node may keep busy.", [use.cores for _, use in reported]),
        (
            "accelerator_busy_ratio",
            "Share of time in which a node's accelerators work; absent for a node that reports none.",
            [use.busy for _, use in reported],
        ),
    ):
        gauge = GaugeMetricFamily(f"dlrover_node_{name}", words, labels=["node"])
        for (node_id, _), value in zip(reported, values, strict=True):
            if value >= 0:  # else it is not known
                gauge.add_metric([str(node_id)], value)
        yield gauge


class MetricsServer:
    """Server of ``/metrics``, in a thread of its own until it is closed.

    Raises:
        ConfigurationError: the address cannot be listened on.
    """

    def __init__(self, master: Master, address: MetricsAddress) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(JobCollector(master, asyncio.get_running_loop()))
        try:
            self._server, self._thread = start_http_server(
                address.port, address.host, registry=registry
            )
        except OSError as error:
            raise ConfigurationError(
                f"metrics_port {address.port} cannot be used on {address.host}: {error.strerror}; "
                "it takes a free port, or 0 for no metrics."
            ) from error

    def close(self) -> None:
        """Stop serving. Do not call this from the server's own threads."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
