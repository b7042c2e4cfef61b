"""Watch over the cluster's resources: what exists, and what is taken."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.rpc.brain import request_id
from dlrover.spec import brain

logger = logging.getLogger(__name__)

INTERVAL = 30.0
"""Seconds between two reports of the cluster."""
INVENTORIES = {"kubernetes": "dlrover.kubernetes.platform.inventory:KubernetesInventory"}
"""Inventories by kind of cluster, as ``module:class``; each is imported on demand."""


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
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigurationError(
            f"--monitor {kind} needs {error.name}: pip install 'dlrover[{kind}]'."
        ) from error
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
