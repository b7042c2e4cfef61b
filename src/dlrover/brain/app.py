"""The Brain's process: the service over one database, until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from dlrover import extras
from dlrover._util import tasks
from dlrover.brain.database import open_database
from dlrover.brain.service import Brain
from dlrover.brain.tenants import read_tenants
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.rpc import wire
from dlrover.rpc.brain import request_id
from dlrover.rpc.server import Server
from dlrover.spec import brain
from dlrover.spec.jobdir import TlsFiles

logger = logging.getLogger(__name__)

STOP_GRACE = 5.0
"""Seconds that open calls get to finish when the Brain exits."""
INTERVAL = 30.0
"""Seconds between two reports of the cluster."""
INVENTORIES = {"kubernetes": "dlrover.kubernetes.platform.inventory:KubernetesInventory"}
"""Inventories by kind of cluster, as ``module:class``; each is imported on demand."""


class BrainOptions(NamedTuple):
    """Options of a Brain server."""

    database: str
    """Database URL, in the form that `open_database` accepts."""
    token: str
    host: str = "127.0.0.1"
    port: int = 0
    """Port to listen on; 0: any free one."""
    tenants: str = ""
    """Directory with one file per tenant, as `read_tenants` reads it; empty: no tenants."""
    tls: TlsFiles = TlsFiles()
    retention_days: float = 90.0
    """Days after which ended jobs, samples and usages are deleted."""
    monitor: str = ""
    """Kind of cluster that the Brain watches itself; empty: none, its state is only reported to the Brain."""
    monitor_source: str = ""


async def serve(options: BrainOptions, ready: Callable[[int], None]) -> None:
    """Serve until SIGTERM or SIGINT; call ``ready`` with the port.

    Raises:
        ConfigurationError: an option is wrong.
        InfrastructureError: the database or the port cannot be used.
    """
    tenants = read_tenants(options.tenants, options.token)
    tokens = {name: tenant.token for name, tenant in tenants.items()}
    server = Server(options.token, options.tls, wire.BRAIN_SERVICE, "Brain", tokens)
    inventory = None
    if options.monitor:
        inventory = open_inventory(options.monitor, options.monitor_source)
    engine = await asyncio.to_thread(open_database, options.database)
    service = Brain(engine, tenants=tenants)
    running = [asyncio.create_task(service.keep_pruned(options.retention_days))]
    if inventory is not None:
        running.append(asyncio.create_task(watch(inventory, service.report)))
    try:
        service.register(server)
        ready(await server.start(options.host, options.port))
        await _stop_signal()
        await server.stop(STOP_GRACE)
    finally:
        await tasks.stop(running)
        if inventory is not None:
            await inventory.close()
        await asyncio.to_thread(service.close)


async def _stop_signal() -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()


# ---- the cluster's resources


class Inventory(Protocol):
    """Reader of a cluster's resources."""

    async def nodes(self) -> tuple[brain.ClusterNode, ...]:
        """Return its machines, and what is taken of each.

        Raises:
            InfrastructureError: the cluster cannot be asked.
        """
        ...

    async def close(self) -> None:
        """Disconnect from the cluster."""


def open_inventory(kind: str, source: str) -> Inventory:
    """Return the inventory of a cluster at ``source``; empty: its usual place.

    Raises:
        ConfigurationError: there is no such kind, or no access to the cluster.
    """
    if kind not in INVENTORIES:
        raise ConfigurationError(
            f"--monitor {kind}: is unknown; accepted is {', '.join(sorted(INVENTORIES))}."
        )
    module, _, attribute = INVENTORIES[kind].partition(":")
    found: Any = getattr(extras.load(module, f"--monitor {kind}", kind), attribute)
    opened: Inventory = found(source)
    return opened


async def watch(
    inventory: Inventory,
    report: Callable[[brain.ReportCluster], Awaitable[Any]],
    interval: float = INTERVAL,
) -> None:
    """Report the cluster at each interval; run until cancelled."""
    failing = False
    while True:
        try:
            nodes = await inventory.nodes()
            await report(brain.ReportCluster(request=request_id(), nodes=nodes))
            failing = False
        except InfrastructureError as error:
            if not failing:
                logger.warning("The view of the cluster is not renewed: %s", error)
            failing = True
        await asyncio.sleep(interval)
