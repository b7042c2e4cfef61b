"""Nodes as pods: the platform of a master that runs in a Kubernetes cluster.

The operator starts the master with ``dlrover master --platform kubernetes`` and passes the job in
DLROVER_KUBERNETES_JOB (``namespace/name``). The master reads the ElasticJob itself and makes one pod for
each node. A node's pod finds the master through the Service and the Secret named in `names`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from dlrover._util import backoff, tasks
from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api.client import (
    FORBIDDEN_GRACE,
    PODS,
    ApiError,
    Client,
    Patience,
)
from dlrover.kubernetes.api.informer import Informer
from dlrover.kubernetes.api.notices import Notices
from dlrover.kubernetes.machine import nodes, pods
from dlrover.kubernetes.platform import job as jobs
from dlrover.kubernetes.platform.reporting import Reporter
from dlrover.kubernetes.platform.scaling import Scaler
from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.types import ElasticJob
from dlrover.platform.base import OnExit, OnWait, Setup
from dlrover.spec.node import FoundNode, LaunchNode

logger = logging.getLogger(__name__)

START_TIMEOUT = 60.0
"""Seconds allowed for the API server to list the job's pods."""
PARALLEL = 16
"""Maximum concurrent pod creations and deletions."""
RETRY = 0.5, 15.0
"""First and maximum seconds before a failed creation or deletion of a pod is tried again."""
KILL_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL when a node is ended."""
SWEEP_INTERVAL = 5.0
"""Seconds between checks for pods that vanished unseen or whose deletion does not end."""
CLOSE_TIMEOUT = 10.0
"""Seconds allowed for pending server calls when the master exits."""
_FORCED = "Pod %s did not end in time and is deleted by force; its machine may be lost."


@dataclass
class _Watched:
    """A node's pod, from the request for it to its end."""

    node_id: int
    #: rank that its node prefers; None of a pod that an earlier master requested
    node_rank: int | None = None
    #: uid of the pod made; other pods may have its name before or after
    uid: str = ""
    #: when the server accepted it; None until then
    created: float | None = None
    #: True once it was in the informer's cache
    seen: bool = False
    #: True once its end was reported
    reported: bool = False
    #: True if it must no longer run
    unwanted: bool = False
    #: set once nothing is waited for before it is made: it is unwanted, or the master exits
    hurried: asyncio.Event = field(default_factory=asyncio.Event)
    #: last reported reason for waiting
    waits: str = ""
    #: deadline of its deletion; None while it is not being deleted
    leaving_until: float | None = None


class KubernetesPlatform:
    """Makes a pod for each node and reports what happens to it. Use it on one event loop."""

    def __init__(
        self, client: Client, job: ElasticJob, master: str, on_exit: OnExit, on_wait: OnWait
    ) -> None:
        self._client = client
        self._job = job
        self._master = master
        self._on_exit = on_exit
        self._on_wait = on_wait
        self._namespace = job.namespace
        self._uid = job.uid
        self._watched: dict[str, _Watched] = {}
        self._removed: dict[int, tuple[int, str]] = {}
        """By rank: number of consecutive pods that the cluster removed within `pods.QUICK`, and why the last one."""
        self._slots = asyncio.Semaphore(PARALLEL)
        self._closing = asyncio.Event()
        self._creations: set[asyncio.Task[None]] = set()
        self._deletions: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._reporter: Reporter | None = None
        self._waking = False
        self._notices = Notices(client, self._namespace, self._background)
        labels = f"{names.JOB_LABEL}={job.name},{nodes.NODE_LABEL}"
        self._informer = Informer(client, PODS, self._namespace, labels, self._changed)

    @classmethod
    async def create(cls, setup: Setup) -> KubernetesPlatform:
        """Create the platform of the job that the environment names.

        Raises:
            ConfigurationError: the job does not exist or is invalid.
            InfrastructureError: the API server does not answer.
        """
        client = Client.from_config()
        try:
            job = await jobs.read(client, setup.env)
        except BaseException:
            await client.close()
            raise
        service = f"{names.master_name(job.name)}.{job.namespace}.svc:{setup.port}"
        platform = cls(client, job, service, setup.job.on_node_exit, setup.job.on_node_wait)
        try:
            await platform.start()
        except BaseException:
            await platform.close()
            raise
        platform.report(Reporter(client, job, setup.job.progress))
        platform.follow(Scaler(client, job, setup.job, platform.resize))
        return platform

    async def start(self) -> None:
        """Load the job's pods.

        Raises:
            InfrastructureError: the API server does not list them in time.
        """
        tasks.start(self._informer.run(), self._background)
        if not await tasks.signalled(self._informer.synced, START_TIMEOUT):
            raise InfrastructureError(
                f"The Kubernetes API server did not list the job's pods within {START_TIMEOUT:g} s."
            )
        tasks.start(self._sweep_often(), self._background)

    def report(self, reporter: Reporter) -> None:
        """Start writing the training's progress into the job's status."""
        self._reporter = reporter
        reporter.waits(self._unmade())
        tasks.start(reporter.run(), self._background)

    def follow(self, scaler: Scaler) -> None:
        """Start scaling the job according to its manifest and its plans."""
        tasks.start(scaler.run(), self._background)

    def resize(self, role: str, replicas: int) -> None:
        """Set the number of nodes of a role for pods made from now on."""
        self._job = nodes.resized(self._job, role, replicas)

    @property
    def scaled_by(self) -> str:
        """The command that scales the job through its manifest."""
        return f"kubectl scale elasticjob/{self._job.name} --replicas=N"

    async def close(self) -> None:
        """Finish pending creations and deletions, and stop watching the pods.

        Creations not yet started are dropped; the next master requests those pods.
        """
        self._closing.set()
        for watched in self._watched.values():
            watched.hurried.set()
        under_way = {*self._creations, *self._deletions}
        if under_way:
            await asyncio.wait(under_way, timeout=CLOSE_TIMEOUT)
        await tasks.stop([*self._creations, *self._deletions, *self._background])
        if self._reporter is not None:
            await self._reporter.close()
        await self._client.close()

    def launch(self, node: LaunchNode) -> str:
        """Request a node's pod, made in the background; the handle is the pod's name."""
        name = nodes.pod_name(self._job, node)
        watched = self._watched[name] = _Watched(node.node_id, node.node_rank)
        tasks.start(self._create(name, node, watched), self._creations)
        return name

    def adopt(self, node_id: int, handle: str) -> None:
        """Watch a pod that an earlier master requested; report its end if it is gone."""
        watched = self._watched[handle] = _Watched(node_id, created=time.monotonic())
        loop = asyncio.get_running_loop()
        pod = self._informer.cache.get(self._key(handle))
        if pod is not None and self._ours(pod):
            watched.uid = pod["metadata"]["uid"]
            loop.call_soon(self._changed, self._key(handle))
        else:
            reason = "its pod was deleted while the master was down"
            loop.call_soon(self._report, watched, reason)

    def find(self) -> list[FoundNode]:
        """Return the job's live pods."""
        found = [
            FoundNode(
                nodes.node_id(pod),
                nodes.node_rank(pod),
                pods.name(pod),
                pods.memory_factor(pod),
                pods.cpu_factor(pod),
            )
            for pod in self._informer.cache.values()
            if self._ours(pod) and not nodes.ending(pod)
        ]
        return sorted(found, key=lambda node: node.node_id)

    def kill(self, handle: str) -> None:
        """End a pod; one that has ended is kept for its log."""
        watched = self._watched.get(handle)
        if watched is not None:
            watched.unwanted = True
            watched.hurried.set()
        if watched is None or watched.created is not None:  # else `_create` handles it
            tasks.start(self._delete(handle), self._deletions)

    # ---- making and deleting

    async def _create(self, name: str, launch: LaunchNode, watched: _Watched) -> None:
        await self._wait_after_removals(launch.node_rank, watched)
        manifest = nodes.pod(self._job, launch, self._master)
        delays, began = backoff.delays(*RETRY), time.monotonic()
        while not watched.unwanted:
            try:
                async with self._slots:
                    if self._closing.is_set():
                        return
                    made = await self._client.create(PODS, manifest)
                watched.uid = made["metadata"]["uid"]
                break
            except ApiError as error:
                if error.reason == "AlreadyExists":
                    watched.uid = await self._made(name)
                    if watched.uid:
                        break
                elif not _may_pass(error, time.monotonic() - began):
                    reason = f"its pod was refused: {error.message.rstrip('.')}"
                    self._report(watched, reason, refused=True)
                    return
                self._report_wait(
                    watched, f"its pod cannot be created: {error.message.rstrip('.')}"
                )
            except InfrastructureError as error:
                self._report_wait(watched, f"its pod cannot be created: {str(error).rstrip('.')}")
            await tasks.signalled(watched.hurried, next(delays))
        watched.created = time.monotonic()
        self._wake_reporter()
        self._changed(self._key(name))  # the informer may have seen it first
        if watched.unwanted:
            await self._delete(name)
            self._report(watched, "it was no longer wanted")

    async def _wait_after_removals(self, node_rank: int, watched: _Watched) -> None:
        """Wait ever longer where the cluster removes each pod at once, as a machine does whose device is broken."""
        count, why = self._removed.get(node_rank, (0, ""))
        seconds = pods.delay(count)
        if seconds:
            last = f"{count} pods in its place were removed at once, the last one because {why.rstrip('.')}"
            self._report_wait(watched, f"it is made after {seconds:g} s: {last}")
            await tasks.signalled(watched.hurried, seconds)

    async def _made(self, name: str) -> str:
        """Return the uid of the node's live pod, made by an attempt with a lost response; empty if none.

        A pod of that name left by an earlier run of the job is deleted: one that has ended, and one of an
        ElasticJob of this name that is no longer there. The garbage collector may need minutes for the latter.
        One that is being deleted on a machine that no longer answers is deleted by force: an earlier master that
        knew it may be lost with the same machine.
        """
        try:
            pod = await self._client.get(PODS, self._namespace, name)
            uid = str(pod["metadata"]["uid"])
            if self._ours(pod) and not nodes.ending(pod):
                return uid
            if not (self._ours(pod) or pods.of_earlier(pod, self._job)):
                return ""
            if not pods.leaving(pod):
                await self._client.delete(PODS, self._namespace, name, uid)  # it may save first
            elif pods.force_after(pod, self._client.server_time()) <= 0:
                logger.warning(_FORCED, name)
                await self._client.delete(PODS, self._namespace, name, uid, grace=0)
        except InfrastructureError as error:
            logger.info("Pod %s: %s", name, error)
        return ""

    async def _delete(self, name: str, grace: float = KILL_GRACE, only: str = "") -> None:
        """Delete a running pod, ``only`` the one with that uid; a pending deletion keeps its grace period."""
        delays, patience = backoff.delays(*RETRY), Patience()
        while True:
            try:
                pod = await self._pod(name)
                if pod is None or pods.ended(pod) or (pods.leaving(pod) and grace):
                    return
                if pods.held(pod):
                    return
                uid = pod["metadata"]["uid"]
                if only not in ("", uid):
                    return
                if not grace:
                    logger.warning(_FORCED, name)
                async with self._slots:
                    await self._client.delete(PODS, self._namespace, name, uid, grace)
            except InfrastructureError as error:
                if not patience.outwaits(error):
                    logger.error("Pod %s cannot be deleted: %s", name, error)  # noqa: TRY400
                    return
                logger.info("Pod %s is to be deleted: %s", name, error)
            else:
                return
            await asyncio.sleep(next(delays))

    async def _pod(self, name: str) -> dict[str, Any] | None:
        """Return the job's pod of that name, or None; the informer may still show an earlier one."""
        pod, watched = self._informer.cache.get(self._key(name)), self._watched.get(name)
        if pod is None or (watched is not None and pod["metadata"]["uid"] != watched.uid):
            pod = await self._client.find(PODS, self._namespace, name)
        return pod if pod is not None and self._ours(pod) else None

    # ---- watching

    def _changed(self, key: str) -> None:
        """Handle the informer's report of an added, changed or deleted pod."""
        name = key.partition("/")[2]
        watched = self._watched.get(name)
        if watched is None:
            return
        pod = self._informer.cache.get(key)
        if pod is None:
            if watched.seen:
                self._report(watched, "its pod was deleted")
                # It may only have lost its label and still run.
                tasks.start(self._delete(name, only=watched.uid), self._deletions)
            return
        if watched.created is None:
            return  # an earlier pod of that name; else `_create` checks again
        if pod["metadata"]["uid"] != watched.uid:
            if watched.seen:
                self._report(watched, "its pod was deleted")
            return  # an earlier pod in the informer's cache
        watched.seen = True
        if pods.leaving(pod):
            grace = pod["metadata"].get("deletionGracePeriodSeconds") or 0
            until = time.monotonic() + grace + pods.FORCE_AFTER
            watched.leaving_until = min(until, watched.leaving_until or until)
        reason, impossible = nodes.ending(pod), nodes.impossible(pod)
        if reason:
            self._report(watched, reason, pod)
        elif impossible:
            self._report(watched, impossible, refused=True)
        else:
            self._report_wait(watched, nodes.waiting(pod, self._notices.known))

    def _report(
        self,
        watched: _Watched,
        reason: str,
        pod: dict[str, Any] | None = None,
        *,
        refused: bool = False,
    ) -> None:
        """Report a node's end with its last ``pod``; without one, the pod was deleted."""
        if watched.reported:
            return
        watched.reported = True
        removed = not refused and (pod is None or nodes.removed(pod))
        self._count_removals(watched, reason if removed else "")
        self._on_exit(
            watched.node_id,
            reason,
            exit_code=0 if pod is None else nodes.exit_code(pod),
            refused=refused,
            removed=removed,
        )
        self._wake_reporter()

    def _count_removals(self, watched: _Watched, reason: str) -> None:
        if watched.node_rank is None or watched.unwanted:
            return
        count, _ = self._removed.pop(watched.node_rank, (0, ""))
        if (
            reason
            and watched.created is not None
            and time.monotonic() - watched.created < pods.QUICK
        ):
            self._removed[watched.node_rank] = (count + 1, reason)

    def _report_wait(self, watched: _Watched, reason: str) -> None:
        if reason != watched.waits and not watched.reported:
            watched.waits = reason
            self._on_wait(watched.node_id, reason)
            if watched.created is None:
                self._wake_reporter()

    def _wake_reporter(self) -> None:
        """Report soon why pods cannot be made: once for all that changes together, as thousands of pods may."""
        if self._reporter is not None and not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._report_unmade)

    def _report_unmade(self) -> None:
        self._waking = False
        if self._reporter is not None:
            self._reporter.waits(self._unmade())

    def _unmade(self) -> str:
        """Return why the first of the pods not made yet cannot be made; empty if none is blocked."""
        unmade = (
            (watched.node_id, f"Pod {name}: {watched.waits}.")
            for name, watched in self._watched.items()
            if watched.created is None and watched.waits and not watched.reported
        )
        return min(unmade, default=(0, ""))[1]

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL)
            await self._sweep()
            self._take_notice()

    async def _sweep(self) -> None:
        """Handle pods that the informer never showed and those whose deletion does not end."""
        now = time.monotonic()
        for name, watched in list(self._watched.items()):
            there = self._key(name) in self._informer.cache
            if watched.reported and not there:
                del self._watched[name]
            elif watched.created is None or now - watched.created < SWEEP_INTERVAL:
                continue
            elif not watched.seen:
                await self._look_for(name, watched)
            elif there and watched.leaving_until is not None and now > watched.leaving_until:
                tasks.start(self._delete(name, grace=0), self._deletions)

    def _take_notice(self) -> None:
        """Report why machines cannot prepare pods, which their status does not say."""
        cache = self._informer.cache
        preparing = [
            (key, cache[key], watched)
            for name, watched in self._watched.items()
            if (key := self._key(name)) in cache and pods.is_preparing(cache[key])
        ]
        if preparing:
            self._notices.look()
        for key, pod, watched in preparing:
            if watched.waits or pod["metadata"]["uid"] in self._notices.known:
                self._changed(key)

    async def _look_for(self, name: str, watched: _Watched) -> None:
        with contextlib.suppress(InfrastructureError):
            pod = await self._client.find(PODS, self._namespace, name)
            if pod is None or pod["metadata"]["uid"] != watched.uid:
                self._report(watched, "its pod was deleted")

    def _ours(self, pod: dict[str, Any]) -> bool:
        return pods.owned(pod, self._uid) and nodes.node_id(pod) >= 0

    def _key(self, name: str) -> str:
        return f"{self._namespace}/{name}"


def _may_pass(error: ApiError, waited: float) -> bool:
    """Return whether a pod refused for ``waited`` seconds may still be created later."""
    return (
        error.retriable
        or (error.status == 403 and "exceeded quota" in error.message)
        or (error.status in (403, 404) and waited < FORBIDDEN_GRACE)
    )
