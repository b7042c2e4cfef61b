"""Nodes as detached actors, each in a placement group of its own: the platform of a master in a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dlrover._util import tasks
from dlrover.platform.base import PlatformJob, Setup
from dlrover.ray import cluster
from dlrover.ray.machine import job as jobs, words
from dlrover.ray.machine.job import RayJob
from dlrover.ray.node import NodeActor
from dlrover.spec.node import FoundNode, LaunchNode

FIRST_WAIT = 1.0
"""Seconds that a node may take to start before the platform looks for what it waits for."""
WAIT_INTERVAL = 5.0
"""Seconds between two such looks."""
RETRY_DELAY = 0.5
"""Seconds between two calls to an actor that cannot be reached at present."""
CLOSE_TIMEOUT = 10.0
"""Seconds allowed for pending calls when the master exits."""


_requests = threading.Lock()
_ending = threading.Event()


def request_no_more() -> None:
    """Let this process request no node any more, not even one that is being requested: what it has made is removed next."""
    with _requests:
        _ending.set()


class RayPlatform:
    """Makes an actor for each node and reports what happens to it. Use it on one event loop."""

    def __init__(self, job: RayJob, master: PlatformJob, found: list[FoundNode]) -> None:
        self._job = job
        self._data = jobs.encode(job)
        self._master = master
        self._found = found
        self._unwanted: set[str] = set()
        self._watches: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[None]] = set()

    @classmethod
    async def create(cls, setup: Setup) -> RayPlatform:
        """Create the platform of the job whose master actor this process is."""
        job = jobs.decode((setup.job_dir / jobs.FILE).read_bytes())
        names = await asyncio.to_thread(cluster.names)
        return cls(job, setup.job, jobs.found_nodes(job.name, names))

    async def close(self) -> None:
        """Finish the operations in progress; nodes keep running."""
        for task in self._watches:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=CLOSE_TIMEOUT)

    def launch(self, node: LaunchNode) -> str:
        """Request a node, made in the background; the handle is the name of its actor and placement group."""
        name = jobs.node_name(self._job.name, node)
        tasks.start(self._make(name, node), self._watches)
        return name

    def adopt(self, node_id: int, handle: str) -> None:
        """Watch an actor that an earlier master requested; report its end if it is gone."""
        bundle = jobs.bundle_of(self._job, handle)
        tasks.start(self._watch(node_id, handle, bundle), self._watches)

    def find(self) -> list[FoundNode]:
        """Return the job's nodes that ran or waited when this master began."""
        return self._found

    def kill(self, handle: str) -> None:
        """End a node and give its resources back."""
        self._unwanted.add(handle)
        tasks.start(asyncio.to_thread(_remove, handle), self._calls)

    # ---- a node's life

    async def _make(self, name: str, node: LaunchNode) -> None:
        bundle = jobs.bundle_of(self._job, name)
        while name not in self._unwanted:
            try:
                await asyncio.to_thread(_create, name, bundle, node, self._data)
            except ray.exceptions.RayError as error:
                self._master.on_node_wait(node.node_id, f"Ray: {words.why_died(str(error))}")
                with contextlib.suppress(ray.exceptions.RayError):
                    await asyncio.to_thread(_remove, name)  # half of it, which has the name
                await asyncio.sleep(RETRY_DELAY)
            else:
                break
        if name in self._unwanted:
            await asyncio.to_thread(_remove, name)
        await self._watch(node.node_id, name, bundle)

    async def _watch(self, node_id: int, name: str, bundle: jobs.Resources) -> None:
        """Report what a node waits for, and its end."""
        actor = await asyncio.to_thread(cluster.actor, name)
        removed = True  # a node that ends by itself leaves its actor
        if actor is None:
            reason = "it was no longer wanted" if name in self._unwanted else "its actor is gone"
        else:
            starting = asyncio.create_task(self._explain(node_id, name, actor, bundle))
            reason, removed = await _end(actor)
            starting.cancel()
        await asyncio.to_thread(_remove, name)
        self._master.on_node_exit(node_id, reason, removed=removed)

    async def _explain(self, node_id: int, name: str, actor: Any, bundle: jobs.Resources) -> None:
        """Say what a node waits for, as long as it does not run."""
        started = asyncio.wrap_future(actor.host.remote().future())
        said, pause = "", FIRST_WAIT
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(started), pause)
                break
            pause = WAIT_INTERVAL
            reason = await asyncio.to_thread(_obstacle, name, bundle)
            if reason != said:
                self._master.on_node_wait(node_id, reason)
                said = reason
        if said:
            self._master.on_node_wait(node_id, "")


async def _end(actor: Any) -> tuple[str, bool]:
    """Return how a node ended, once it has, and whether something else ended it, such as the end of its machine."""
    while True:
        try:
            return str(await asyncio.wrap_future(actor.wait.remote().future())), False
        except ray.exceptions.ActorUnavailableError:
            await asyncio.sleep(RETRY_DELAY)
        except ray.exceptions.RayActorError as error:
            what = "its machine was preempted" if error.preempted else "its actor died"
            why = words.why_died(str(error))
            return f"{what}: {why}", error.preempted or words.is_removal(why)


def _create(name: str, bundle: jobs.Resources, node: LaunchNode, data: bytes) -> None:
    """Request a node's placement group and actor; the actor starts once the group has its resources."""
    selector = jobs.elsewhere(node.avoid, cluster.machines())
    with _requests:
        if not _ending.is_set():
            _request(name, bundle, node, data, selector)


def _request(
    name: str, bundle: jobs.Resources, node: LaunchNode, data: bytes, selector: dict[str, str]
) -> None:
    group = placement_group(
        [dict(bundle) or {"CPU": 0.001}],
        name=name,
        lifetime="detached",
        bundle_label_selector=[selector] if selector else None,
    )
    NodeActor.options(  # type: ignore[attr-defined]
        name=name,
        namespace=jobs.NAMESPACE,
        lifetime="detached",
        max_restarts=0,
        max_concurrency=8,
        **jobs.actor_options(bundle),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
    ).remote(data, node.node_id, node.node_rank)


def _obstacle(name: str, bundle: jobs.Resources) -> str:
    """Return why a node does not run; empty if it has its resources and is only starting."""
    if cluster.has_room(name):
        return ""
    return jobs.waits(bundle, ray.available_resources(), ray.cluster_resources())


def _remove(name: str) -> None:
    """End a node's actor and remove its placement group."""
    cluster.end_actor(name)
    cluster.remove_groups(name)
