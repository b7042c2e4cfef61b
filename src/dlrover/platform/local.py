"""Nodes as child processes of the master: one machine acts as a cluster.

Nodes with a size run in their own control groups; others share the machine's resources.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from dlrover import config
from dlrover._util import procs, start, tasks
from dlrover.errors import InfrastructureError
from dlrover.platform import groups
from dlrover.platform.base import OnExit, Setup
from dlrover.spec.node import FoundNode, LaunchNode, NodeLimits

REMOVE_INTERVAL = 0.1
"""Seconds between attempts to remove an ended node's group, whose processes may still be ending."""
REMOVE_TIME = 10.0
"""Seconds allowed for those processes to end."""


class LocalPlatform:
    """Starts agents as processes on this machine.

    An agent outlives its master, so that another master process can adopt it. It dies with the process at
    the other end of its lifeline.
    """

    def __init__(
        self,
        agent_command: Sequence[str],
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        on_exit: OnExit,
        size: NodeLimits | None = None,
    ) -> None:
        self._size = size or NodeLimits()
        self._groups = groups.NodeGroups() if size else None
        self._grouped: set[int] = set()  # nodes with existing groups
        self._before = config.node_command(env)
        self._agent_command = list(agent_command)
        self._env = dict(env)
        self._pass_fds = tuple(pass_fds)
        self._on_exit = on_exit
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._watches: set[asyncio.Task[None]] = set()

    @classmethod
    async def create(cls, setup: Setup) -> LocalPlatform:
        """Create the platform that starts its nodes from the master's job directory."""
        command = [*start.command(start.AGENT), "--job-dir", str(setup.job_dir)]
        pass_fds = []
        if setup.lifeline_fd >= 0:
            command += ["--lifeline-fd", str(setup.lifeline_fd)]
            pass_fds.append(setup.lifeline_fd)
        platform = cls(command, setup.env, pass_fds, setup.job.on_node_exit, setup.node_size)
        if platform._groups is not None:
            platform._groups.sweep()
        return platform

    async def close(self) -> None:
        """Remove node groups, including those whose nodes are still ending."""
        until = time.monotonic() + REMOVE_TIME
        while self._grouped and time.monotonic() < until:
            for node_id in list(self._grouped):
                self._remove_group(node_id)
            await asyncio.sleep(REMOVE_INTERVAL if self._grouped else 0)
        if self._groups is not None:
            self._groups.sweep()  # groups of nodes that earlier masters started

    def launch(self, node: LaunchNode) -> str:
        """Start an agent and return its pid and start time as the handle.

        With only one host, the hosts to avoid have no effect. The factors have none unless nodes have a size.
        """
        own = ["--node-id", str(node.node_id), "--node-rank", str(node.node_rank)]
        size = self._size.times(node.memory_factor, node.cpu_factor)
        entered = self._enter_group(node.node_id, size)
        try:
            process = subprocess.Popen(
                [*self._before, *entered, *self._agent_command, *own],
                env=self._env,
                pass_fds=self._pass_fds,
                start_new_session=True,
            )
        except OSError as error:
            self._remove_group(node.node_id)
            raise InfrastructureError(
                f"Node {node.node_id} cannot be started: {error.strerror}."
            ) from error
        self._processes[process.pid] = process
        self._watch(node.node_id, process.pid)
        return f"{process.pid}:{procs.start_time(process.pid)}"

    def adopt(self, node_id: int, handle: str) -> None:
        """Watch an agent that an earlier master process started."""
        pid, _, started = handle.partition(":")
        if str(procs.start_time(int(pid))) == started:
            self._watch(node_id, int(pid))
        else:
            asyncio.get_running_loop().call_soon(
                self._on_exit, node_id, "its agent ended while the master was away"
            )

    def find(self) -> list[FoundNode]:
        """Return the agents on this machine that this command started."""
        found: dict[int, FoundNode] = {}
        for pid in sorted(procs.pids()):
            words, count = procs.command(pid), len(self._agent_command)
            if words[:count] != self._agent_command or len(words) != count + 4:
                continue
            node_id, node_rank = int(words[count + 1]), int(words[count + 3])
            # A process that an agent forks briefly looks like the agent itself; the agent is older.
            handle = f"{pid}:{procs.start_time(pid)}"
            older = found.get(node_id)
            if older is None or _age(handle) < _age(older.handle):
                found[node_id] = FoundNode(node_id, node_rank, handle)
        return [found[node_id] for node_id in sorted(found)]

    def kill(self, handle: str) -> None:
        """End an agent with SIGKILL; its zygote ends its workers."""
        pid, _, started = handle.partition(":")
        if str(procs.start_time(int(pid))) == started:
            procs.kill([int(pid)])

    def _enter_group(self, node_id: int, size: NodeLimits) -> list[str]:
        """Make the node's control group and return the command prefix that joins it; empty without a size."""
        if self._groups is None:
            return []
        files = self._groups.make(node_id, size)
        self._grouped.add(node_id)
        return groups.entering(files)

    def _remove_group(self, node_id: int, until: float = 0.0) -> None:
        """Remove a node's group once its processes have ended; retry until ``until``."""
        if self._groups is None or self._groups.remove(node_id):
            self._grouped.discard(node_id)
        elif time.monotonic() < until:
            loop = asyncio.get_running_loop()
            loop.call_later(REMOVE_INTERVAL, self._remove_group, node_id, until)

    def _watch(self, node_id: int, pid: int) -> None:
        tasks.start(self._await_end(node_id, pid), self._watches)

    async def _await_end(self, node_id: int, pid: int) -> None:
        await procs.ended(pid)
        reason = self._reason(node_id, pid)
        self._remove_group(node_id, time.monotonic() + REMOVE_TIME)
        self._on_exit(node_id, f"its agent ended: {reason}")

    def _reason(self, node_id: int, pid: int) -> str:
        process = self._processes.pop(pid, None)
        if process is None:
            return "another process has its exit code"  # adopted, so not a child of this process
        code = process.wait()
        reason = procs.exit_reason(-code if code < 0 else code << 8)
        if code == -signal.SIGABRT:  # gRPC says nothing more
            return f"{reason}, as where no thread can be started (see processes in dlrover doctor)"
        if code == -signal.SIGKILL and self._groups is not None and self._groups.oom_kills(node_id):
            return f"{reason} for want of memory (OOMKilled)"
        return reason


def _age(handle: str) -> tuple[int, int]:
    """Return a sort key that orders handles by the start of their processes."""
    pid, _, started = handle.partition(":")
    return int(started), int(pid)
