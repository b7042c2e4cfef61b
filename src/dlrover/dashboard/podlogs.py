"""The logs of a job's pods: their names, and the end of one, as it grows, as ``kubectl logs`` shows it.

The API server passes them on to whoever has the right to ``pods/log``; they are there until the pod is deleted.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import re
from collections.abc import AsyncGenerator, Iterable
from typing import Any, NamedTuple

from dlrover._util import tasks
from dlrover.dashboard import logs
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.kubernetes.api.client import PODS, ApiError, Client
from dlrover.kubernetes.machine import nodes, pods
from dlrover.kubernetes.resources import commands, names
from dlrover.kubernetes.resources.types import Manifest

FOLDER = "pods/"
"""How the names of pods' logs begin; others are files of the master's pod."""
LINES = 2000
"""Lines of a log's end that the API server is asked for."""
AGAIN = 5.0
"""Seconds between two looks at a pod whose log has ended."""


class PodLog(NamedTuple):
    """A log of a pod: what a container writes, or the file of its agent."""

    pod: str
    container: str = ""
    """Empty: the one that runs ``dlrover-run`` or the master."""
    file: str = ""
    """Its agent's log file; empty: the container's output."""

    @classmethod
    def parse(cls, name: str) -> PodLog | None:
        """Return the log with a name of the list; None if the name has another form."""
        found = re.fullmatch(
            rf"{FOLDER}([a-z0-9][-a-z0-9.]*)(?:/([-a-z0-9]+)|/(agent-[0-9]+\.log))?", name
        )
        return None if found is None else cls(*(part or "" for part in found.groups()))


def listed(found: Iterable[Manifest]) -> list[dict[str, Any]]:
    """Return the logs of a job's pods: the nodes' in the order of their ranks, then the master's.

    Pods that run come first. A size is not known; a note says what the pod is and does.
    """
    rows = []
    for pod in sorted(found, key=_order)[: logs.FILES]:
        name, main = f"{FOLDER}{pods.name(pod)}", main_container(pod)
        node, phase = nodes.node_id(pod), pods.phase(pod).lower()
        note = f"{pods.role(pod)}, {phase}"
        rows.append((name, note))
        others = [one["name"] for one in pod["spec"]["containers"] if one["name"] != main]
        rows += [(f"{name}/{other}", f"{note}, container {other}") for other in others]
        if node >= 0 and phase == "running":
            rows.append((f"{name}/agent-{node}.log", "its agent"))
    return [{"name": name, "size": None, "note": note} for name, note in rows]


def _order(pod: Manifest) -> tuple[bool, int, str]:
    try:
        rank = nodes.node_rank(pod) if nodes.node_id(pod) >= 0 else 1 << 40
    except (LookupError, ValueError):  # somebody else's pod, with the job's label
        rank = 1 << 40
    return pods.ended(pod), rank, pods.name(pod)


def main_container(pod: Manifest) -> str:
    """Return the container of a pod that runs ``dlrover-run`` or the master: ``main``, else the first."""
    return str(commands.main(pod)["name"])


async def find(client: Client, namespace: str, job: str, name: str) -> Manifest:
    """Return a pod of a job.

    Raises:
        ConfigurationError: the pod belongs to another job, or may not be looked at.
        InfrastructureError: it is gone.
    """
    try:
        pod = await client.find(PODS, namespace, name)
    except ApiError as error:
        if error.status != 403:
            raise
        raise ConfigurationError(
            f"Pod {namespace}/{name} cannot be looked at: {error}; ask the cluster's administrator for the "
            f"right to get pods in namespace {namespace}."
        ) from error
    if pod is None:
        raise InfrastructureError(_gone(namespace, name))
    if (pod["metadata"].get("labels") or {}).get(names.JOB_LABEL) != job:
        raise ConfigurationError(
            f"Pod {namespace}/{name} is none of job {job}: choose another log."
        )
    return pod


async def tail(
    client: Client, namespace: str, job: str, name: str, container: str = ""
) -> AsyncGenerator[str, None]:
    """Yield the end of a container's log and what is added to it as server-sent events, until its pod is gone.

    Raises:
        ConfigurationError: the log may not be read, or there is no such pod of the job.
        InfrastructureError: the pod is gone, has not started, or the API server does not answer.
    """
    while True:
        pod = await find(client, namespace, job, name)
        pieces = _follow(client, namespace, name, container or main_container(pod))
        try:
            async with contextlib.aclosing(pieces):
                async for text in pieces:
                    yield text
        except ApiError as error:
            raise _refused(error, namespace, name) from error
        # The log has ended, or its connection: an ended container says nothing more.
        while end := _end(await find(client, namespace, job, name), container):
            yield logs.event({"note": f"{end}: this is the end of its log."})
            await asyncio.sleep(AGAIN)
        await asyncio.sleep(logs.PAUSE)


def _end(pod: Manifest, container: str) -> str:
    """Return how a container has ended; empty while it runs. Others of its pod may go on."""
    if pods.ended(pod):
        return f"The pod has {pods.phase(pod).lower()}"
    name = container or main_container(pod)
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        state = status.get("state") or {}
        if status.get("name") == name and state and "running" not in state:
            return f"Container {name} does not run"
    return ""


async def _follow(
    client: Client, namespace: str, pod: str, container: str
) -> AsyncGenerator[str, None]:
    """Yield a log as server-sent events until it ends; of what comes too fast, the end."""
    data, arrived, fresh, skipped = bytearray(), asyncio.Event(), True, False
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def read() -> None:
        nonlocal skipped
        async with contextlib.aclosing(client.log(namespace, pod, container, LINES)) as pieces:
            async for piece in pieces:
                data.extend(piece)
                if len(data) > logs.PIECE:
                    skipped = True
                    del data[: -logs.TAIL]
                arrived.set()

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda _: arrived.set())
    try:
        ended = False
        while not ended:
            if not await tasks.signalled(arrived, logs.BEAT):
                yield logs.ALIVE
                continue
            await asyncio.sleep(logs.PAUSE)  # for the rest of what comes at once
            ended = reading.done()
            arrived.clear()
            if ended and not data:
                break
            if skipped:
                decoder.reset()
            value = {"fresh": fresh or skipped, "cut": skipped}
            yield logs.event({"text": decoder.decode(bytes(data)), **value})
            data.clear()
            fresh = skipped = False
        reading.result()
    finally:
        await tasks.stop([reading])


def _refused(error: ApiError, namespace: str, pod: str) -> ConfigurationError | InfrastructureError:
    if error.status == 403:
        return ConfigurationError(
            f"The log of pod {namespace}/{pod} may not be read: {error}; ask the cluster's administrator for the "
            f"right to get pods/log in namespace {namespace}, as the role view has it."
        )
    if error.status == 404:
        return InfrastructureError(_gone(namespace, pod))
    return InfrastructureError(f"Pod {namespace}/{pod} has no log yet: {error}.")


def _gone(namespace: str, pod: str) -> str:
    return (
        f"Pod {namespace}/{pod} is gone, and its log with it: choose another log, or look where the cluster "
        "collects the logs of its pods."
    )
