"""The page of a job on Kubernetes: dlrover makes it in the pod of the job's master, and this side passes it on.

This is ``kubectl exec POD -- dlrover``: no port is opened, and the job's token stays in the pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from dlrover._util import decoding
from dlrover.dashboard import cluster, podlogs, stdio
from dlrover.dashboard.actions import Action, ScaleAction
from dlrover.dashboard.ended import of_elastic_job
from dlrover.dashboard.feed import RETRY, SHARE, PageFeed
from dlrover.dashboard.history import BrainJobs
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError
from dlrover.kubernetes.api.client import ELASTIC_JOBS, PODS, ApiError, Client
from dlrover.kubernetes.api.execution import CommandError, Execution, execute
from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.types import Manifest
from dlrover.spec.node import WORKER
from dlrover.spec.words import counted

PATIENCE = 10.0
"""Seconds that the API server has to name the master's pod."""
SILENT = f"The Kubernetes API server does not answer within {PATIENCE:g} s."
EVENT = b"\n\n"
"""End of a server-sent event."""
LARGEST = 16 << 20
"""Most bytes of an event."""
PARTS = frozenset(
    ("fixed", "master", "status", "ranks", "report", "roles", "logs", "checkpoints", "problem")
)
"""Parts of a page that a pod may make."""


class PodJob:
    """The live page of an ElasticJob, its logs, and its buttons."""

    def __init__(
        self, kubeconfig: str, namespace: str, name: str, history: BrainJobs | None = None
    ) -> None:
        self._kubeconfig, self._namespace, self._name = kubeconfig, namespace, name
        self._history = history
        self._sent: set[str] = set()
        """Parts that a master has sent; ``outcome``: that of its end is among them."""
        self._over = False
        self._feed = PageFeed(f"{namespace}/{name}", lambda: (self._follow(), self._list_logs()))
        self._pod_logs: list[dict[str, Any]] = []
        self._files: list[dict[str, Any]] = []

    def view(self) -> AsyncIterator[str]:
        """Yield the page's parts as server-sent events; ``unreachable`` says why there are no others."""
        return self._feed.view()

    async def log(self, name: str) -> AsyncGenerator[str, None]:
        """Yield the end of a log and what is added to it as server-sent events: of a pod, or a file of the master's.

        Raises:
            ConfigurationError: there is no such log, or it may not be read.
            InfrastructureError: the pod is gone or cannot be reached.
        """
        wanted = podlogs.PodLog.parse(name)
        if wanted is not None and not wanted.file:
            async with Client.from_config(self._kubeconfig) as client:
                pieces = podlogs.tail(client, self._namespace, self._name, *wanted[:2])
                async with contextlib.aclosing(pieces):
                    async for text in pieces:
                        yield text
            return
        pod, file = ("", name) if wanted is None else (wanted.pod, wanted.file)
        async with contextlib.aclosing(self._ask(stdio.PageRequest(log=file), pod)) as events:
            async for piece in events:
                yield f"{piece.decode(errors='replace')}\n\n"

    async def act(self, action: Action) -> dict[str, object]:
        """Carry out what a button asks for; the number of workers is the manifest's.

        Raises:
            ConfigurationError: the job has ended, or it cannot be done.
            InfrastructureError: the pod or the API server cannot be reached.
        """
        if isinstance(action, ScaleAction):
            if action.role != WORKER:
                raise ConfigurationError("Only the number of workers can be changed here.")
            return await self._scale(action.nodes)
        answer = b"".join([text async for text in self._ask(stdio.PageRequest(action=action))])
        try:
            return decoding.json(answer, dict[str, object])
        except msgspec.DecodeError as error:
            raise InfrastructureError(
                f"{self._master()} does not say what became of it: {error}."
            ) from error

    async def _scale(self, workers: int) -> dict[str, object]:
        async with Client.from_config(self._kubeconfig) as client:
            patch = {"spec": {"replicas": workers}}
            await client.patch(ELASTIC_JOBS, self._namespace, self._name, patch, "scale")
        return {
            "text": f"The manifest asks for {counted(workers, 'worker')} now.",
            "refused": False,
        }

    async def _follow(self) -> None:
        self._sent, self._over = set(), False
        while True:
            try:
                if await self._tell_end():
                    await asyncio.sleep(podlogs.AGAIN)
                    continue
                async with contextlib.aclosing(self._ask(stdio.PageRequest())) as events:
                    async for text in events:
                        self._pass_on(text.decode())
            except DLRoverError as error:
                self._feed.publish("unreachable", {"text": str(error)})
            except (
                msgspec.DecodeError,
                UnicodeDecodeError,
                RecursionError,
                LookupError,
                TypeError,
            ):
                problem = f"{self._master()} sends what is no part of this page."
                self._feed.publish("unreachable", {"text": problem})
            await asyncio.sleep(RETRY)

    async def _tell_end(self) -> bool:
        """Show what is known of the job once it has ended, unless its master has sent its end; return whether it has."""
        async with Client.from_config(self._kubeconfig) as client:
            job = await self._job(client)
        ended = cluster.ended_job(job)
        if ended is None:
            if self._over:  # it runs again, or another job has its name
                self._over = False
                self._sent.clear()
                self._feed.publish("known", None)
            return False
        self._over = True
        if "outcome" not in self._sent:
            story, why = None, ""
            if self._history is not None:
                story, why = await self._history.of_origin(job["metadata"]["uid"])
            parts = of_elastic_job(ended, story, why)
            for name in ("status",) if "report" in self._sent else tuple(parts):
                self._feed.publish(name, parts[name])
            if story is not None or self._history is None:
                self._sent.add("outcome")
        self._files = []  # which were the master's
        self._publish_logs()
        return True

    def _pass_on(self, text: str) -> None:
        self._feed.publish("unreachable", {"text": ""})
        name, newline, data = text.partition("\n")
        if not newline:
            return  # a sign of life
        value = msgspec.json.decode(data.removeprefix("data: "))
        name = name.removeprefix("event: ")
        if name not in PARTS:
            return
        self._sent.add(name)
        if name in ("status", "roles") and value["outcome"]:
            self._sent.add("outcome")
        if name == "logs":
            self._files = [*value]
            self._publish_logs()
            return
        if name == "roles":  # in the pod, a role's page is that of a directory
            for role in value["roles"]:
                own = names.job_of_role(self._name, role["name"])
                role["page"] = role["page"] and f"{self._namespace}/{own}"
        self._feed.publish(name, value)

    async def _list_logs(self) -> None:
        """Show which logs there are: those of the pods, as far as the viewer may list them, and the master's files."""
        labels = f"{names.JOB_LABEL}={self._name}"
        while True:
            began = time.monotonic()
            try:
                async with Client.from_config(self._kubeconfig) as client:
                    listing = client.list(PODS, self._namespace, labels=labels)
                    found, _ = await asyncio.wait_for(listing, PATIENCE)
                self._pod_logs = podlogs.listed(found)
                self._feed.publish("unlisted", {"text": ""})
            except ApiError as error:
                needs = "; this needs the right to list pods" if error.status == 403 else ""
                problem = f"The logs of the pods are not listed: {error}{needs}."
                self._feed.publish("unlisted", {"text": problem})
            except (
                DLRoverError,
                asyncio.TimeoutError,
            ):  # such as a kubeconfig that is just replaced
                pass  # the page says it already
            self._publish_logs()
            await asyncio.sleep(max(podlogs.AGAIN, (time.monotonic() - began) / SHARE))

    def _publish_logs(self) -> None:
        self._feed.publish("logs", [*self._pod_logs, *self._files])

    async def _ask(self, request: stdio.PageRequest, pod: str = "") -> AsyncGenerator[bytes, None]:
        """Yield what ``dlrover dashboard --stdio`` answers in a pod, by events or as a whole; by default the master's."""
        whose = f"Pod {self._namespace}/{pod}" if pod else self._master()
        rest = bytearray()
        async with Client.from_config(self._kubeconfig) as client:
            if pod:
                found = await podlogs.find(client, self._namespace, self._name, pod)
                container = podlogs.main_container(found)
            else:
                pod, container = names.master_name(self._name), await self._container(client)
            try:
                async with (
                    execute(client, self._namespace, pod, container, stdio.COMMAND) as running,
                    _talking(running, msgspec.json.encode(request)),
                ):
                    async for piece in running.output():
                        begin = max(0, len(rest) - 1)
                        rest += piece
                        while (end := rest.find(EVENT, begin)) >= 0:
                            yield bytes(rest[:end])
                            del rest[: end + len(EVENT)]
                            begin = 0
                        if len(rest) > LARGEST:
                            raise InfrastructureError(
                                f"{whose} sends more than {LARGEST} bytes at once."
                            )
                    if rest:
                        yield bytes(rest)
            except CommandError as error:
                raise _failed(whose, error) from error
            except ApiError as error:
                raise ConfigurationError(
                    f"{whose} cannot be asked through the API server: {error}."
                ) from error

    async def _container(self, client: Client) -> str:
        """Return the container of the master in its pod.

        Raises:
            InfrastructureError: there is none that runs.
        """
        job = await self._job(client)
        try:
            pod = await asyncio.wait_for(
                client.find(PODS, self._namespace, names.master_name(self._name)), PATIENCE
            )
        except asyncio.TimeoutError:
            raise InfrastructureError(SILENT) from None
        if pod is None or pod["status"].get("phase") != "Running":
            status = job.get("status") or {}
            phase, message = status.get("phase", "Created"), status.get("message", "")
            raise InfrastructureError(
                f"{self._master()} does not run, and it is what makes this page; the job's phase is {phase}"
                + (f": {message}" if message else ".")
            )
        return podlogs.main_container(pod)

    async def _job(self, client: Client) -> Manifest:
        """Return the ElasticJob.

        Raises:
            ApiError: the viewer may not look at it.
            InfrastructureError: there is none, or the API server does not answer.
        """
        try:
            found = client.find(ELASTIC_JOBS, self._namespace, self._name)
            job = await asyncio.wait_for(found, PATIENCE)
        except asyncio.TimeoutError:
            raise InfrastructureError(SILENT) from None
        if job is None:
            raise InfrastructureError(f"There is no ElasticJob {self._namespace}/{self._name}.")
        return job

    def _master(self) -> str:
        return f"The master of {self._namespace}/{self._name}"


class PodJobs:
    """The pages of the jobs of a namespace; an empty one stands for all namespaces."""

    def __init__(self, kubeconfig: str, namespace: str, history: BrainJobs | None = None) -> None:
        self._kubeconfig, self._namespace, self._history = kubeconfig, namespace, history

    def find(self, job: str) -> PodJob | None:
        """Return the page of ``NAMESPACE/NAME``; None if it is not one of these."""
        namespace, _, name = job.partition("/")
        valid = re.fullmatch(names.JOB_NAME, name) and re.fullmatch(r"[-a-z0-9]+", namespace)
        if not valid or self._namespace not in ("", namespace):
            return None
        return PodJob(self._kubeconfig, namespace, name, self._history)


def _failed(whose: str, error: CommandError) -> DLRoverError:
    if not error.stderr:  # it could not start, or ended together with the pod
        return InfrastructureError(f"{whose} gives no answer: {error}.")
    if "No such option" in error.stderr:
        return ConfigurationError(
            f"{whose} has an earlier version of DLRover, which does not make this page."
        )
    said = error.stderr.strip().rpartition("\n")[2]
    return ConfigurationError(said.removeprefix("dlrover: "))


@contextlib.asynccontextmanager
async def _talking(running: Execution, request: bytes) -> AsyncIterator[None]:
    """Ask, and then say now and then that somebody still listens."""

    async def beat() -> None:
        with contextlib.suppress(InfrastructureError):  # who reads meets it, too
            while True:
                await asyncio.sleep(stdio.BEAT)
                await running.send(b"\n")

    await running.send(request + b"\n")
    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
