"""Processes of one local job that a fault may strike, found from the job directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from dlrover._util import procs
from dlrover._util.start import AGENT, MASTER, SAVER
from dlrover.agent.workers.zygotes import ZYGOTE
from dlrover.errors import InfrastructureError

Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class TargetWorker:
    """A training process, with its node and ranks."""

    process: psutil.Process
    node: int
    local_rank: int
    rank: int


@dataclass(frozen=True)
class TargetNode:
    """An agent and its workers, in the order of their local ranks."""

    id: int
    agent: psutil.Process
    workers: tuple[TargetWorker, ...]

    def stop(self) -> list[psutil.Process]:
        """Stop every process of the node with SIGSTOP, the agent first; return those processes."""
        stopped: list[psutil.Process] = []
        while fresh := [p for p in self._family() if p not in stopped]:  # new forks too
            for process in fresh:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            stopped += fresh
        return stopped

    def savers(self) -> list[psutil.Process]:
        """Return the checkpoint savers that workers of this node have started."""
        return [process for process in _children(self.agent) if SAVER in _words(process)]

    def _family(self) -> list[psutil.Process]:
        try:
            return [self.agent, *self.agent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


class Targets:
    """Processes of the job in a directory. Every call searches again."""

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = str(job_dir)

    def master(self) -> psutil.Process | None:
        """Return the job's master; None if there is none."""
        return next(self._running(MASTER), None)

    def nodes(self) -> list[TargetNode]:
        """Return the nodes whose agents run, in the order of their ranks."""
        agents = sorted(self._running(AGENT), key=lambda agent: _number(agent, "--node-rank"))
        nodes: list[TargetNode] = []
        for agent in agents:
            first = sum(len(node.workers) for node in nodes)
            id_ = _number(agent, "--node-id")
            nodes.append(TargetNode(id_, agent, tuple(_workers(agent, id_, first))))
        return nodes

    def workers(self) -> list[TargetWorker]:
        """Return all workers, in the order of their ranks."""
        return [worker for node in self.nodes() for worker in node.workers]

    def _running(self, module: str) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            words = _words(process)
            if module in words and procs.option(words, "--job-dir") == self._job_dir:
                yield process


def savers_of(directory: Path) -> list[psutil.Process]:
    """Return the checkpoint savers of a directory; one may have outlived the node that started it."""
    name = str(directory.absolute())
    found = []
    for process in psutil.process_iter():
        words = _words(process)
        if SAVER in words and procs.option(words, "--directory") == name:
            found.append(process)
    return found


def _workers(agent: psutil.Process, node: int, first_rank: int) -> Iterator[TargetWorker]:
    zygotes = [p for p in _children(agent) if any(ZYGOTE in word for word in _words(p))]
    found = [worker for zygote in zygotes for worker in _children(zygote)]
    found.sort(key=lambda process: (_local_rank(process), process.pid))
    for index, process in enumerate(found):
        yield TargetWorker(process, node, index, first_rank + index)


def _local_rank(process: psutil.Process) -> int:
    """Return the local rank, from the name of the worker's log; -1 if it writes elsewhere."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{process.pid}/fd/1").readlink().parent.name)
    return -1


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except (psutil.Error, OSError):
        return []


def _number(process: psutil.Process, flag: str) -> int:
    value = procs.option(_words(process), flag)
    return int(value) if value else -1


def choose(draw: float, candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate that ``draw``, between 0 and 1, falls on.

    Raises:
        InfrastructureError: there are no candidates.
    """
    if not candidates:
        raise InfrastructureError("The job has no process that the fault could strike.")
    return candidates[min(len(candidates) - 1, int(draw * len(candidates)))]
