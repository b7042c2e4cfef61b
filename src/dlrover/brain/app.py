"""The Brain's process: the service over one database, until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import NamedTuple

from dlrover.brain import monitor
from dlrover.brain.database import open_database
from dlrover.brain.service import Brain
from dlrover.brain.tenants import read_tenants
from dlrover.rpc import wire
from dlrover.rpc.server import Server

logger = logging.getLogger(__name__)

STOP_GRACE = 5.0
"""Seconds that open calls get to finish when the Brain exits."""


class Options(NamedTuple):
    """Options of a Brain server."""

    database: str
    """Database URL, in the form that `open_database` accepts."""
    token: str
    host: str = "127.0.0.1"
    port: int = 0
    """Port to listen on; 0: any free one."""
    tenants: str = ""
    """Directory with one file per tenant, as `read_tenants` reads it; empty: no tenants."""
    tls: wire.Tls = wire.Tls()
    retention_days: float = 90.0
    """Days after which ended jobs, samples and usages are deleted."""
    monitor: str = ""
    """Kind of cluster that the Brain watches itself; empty: none, its state is only reported to the Brain."""
    monitor_source: str = ""


async def serve(options: Options, ready: Callable[[int], None]) -> None:
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
        inventory = monitor.open_inventory(options.monitor, options.monitor_source)
    engine = await asyncio.to_thread(open_database, options.database)
    brain = Brain(engine, tenants=tenants)
    tasks = [asyncio.create_task(brain.keep_pruned(options.retention_days))]
    if inventory is not None:
        tasks.append(asyncio.create_task(monitor.watch(inventory, brain.report)))
    try:
        brain.register(server)
        ready(await server.start(options.host, options.port))
        await _stop_signal()
        await server.stop(STOP_GRACE)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if inventory is not None:
            await inventory.close()
        await asyncio.to_thread(brain.close)


async def _stop_signal() -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
