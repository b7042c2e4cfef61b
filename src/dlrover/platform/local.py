"""Nodes as child processes of the master: one machine plays a cluster."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from dlrover import config
from dlrover._util import procs
from dlrover.errors import InfrastructureError
from dlrover.platform.base import Found, OnExit, Setup


class LocalPlatform:
    """Starts agents as processes on this machine.

    An agent outlives its master, so that another master process can adopt it; it dies with the process
    at the other end of its lifeline.
    """

    def __init__(
        self,
        agent_command: Sequence[str],
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        on_exit: OnExit,
    ) -> None:
        self._before = config.node_command(env)
        self._agent_command = list(agent_command)
        self._env = dict(env)
        self._pass_fds = tuple(pass_fds)
        self._on_exit = on_exit
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @classmethod
    async def create(cls, setup: Setup) -> LocalPlatform:
        """The platform whose nodes are started from the master's job directory."""
        command = [sys.executable, "-m", "dlrover.agent", "--job-dir", str(setup.job_dir)]
        pass_fds = []
        if setup.lifeline_fd >= 0:
            command += ["--lifeline-fd", str(setup.lifeline_fd)]
            pass_fds.append(setup.lifeline_fd)
        return cls(command, setup.env, pass_fds, setup.on_exit)

    async def close(self) -> None:
        """Nothing is under way."""

    def launch(
        self, node_id: int, node_rank: int, avoid: tuple[str, ...] = (), memory_factor: float = 1.0
    ) -> str:
        """Start an agent; the handle is its pid and start time.

        ``avoid`` and ``memory_factor`` have no effect: there is one host, with the memory that it has.
        """
        del avoid, memory_factor
        command = [*self._agent_command, "--node-id", str(node_id), "--node-rank", str(node_rank)]
        try:
            process = subprocess.Popen(
                [*self._before, *command],
                env=self._env,
                pass_fds=self._pass_fds,
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(
                f"Node {node_id} cannot be started: {error.strerror}."
            ) from error
        self._processes[process.pid] = process
        self._watch(node_id, process.pid)
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

    def find(self) -> list[Found]:
        """The agents on this machine that were started by this command."""
        found: dict[int, Found] = {}
        for pid in sorted(procs.pids()):
            words, count = procs.command(pid), len(self._agent_command)
            if words[:count] != self._agent_command or len(words) != count + 4:
                continue
            node_id, node_rank = int(words[count + 1]), int(words[count + 3])
            # A process that an agent is about to start looks like it for a moment; the agent is older.
            handle = f"{pid}:{procs.start_time(pid)}"
            older = found.get(node_id)
            if older is None or _age(handle) < _age(older.handle):
                found[node_id] = Found(node_id, node_rank, handle)
        return [found[node_id] for node_id in sorted(found)]

    def kill(self, handle: str) -> None:
        """End an agent with SIGKILL; its zygote ends its workers."""
        pid, _, started = handle.partition(":")
        if str(procs.start_time(int(pid))) == started:
            procs.kill([int(pid)])

    def _watch(self, node_id: int, pid: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            loop.call_soon(self._on_exit, node_id, "its agent ended")
            return

        def ended() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._on_exit(node_id, f"its agent ended: {self._reason(pid)}")

        loop.add_reader(pidfd, ended)

    def _reason(self, pid: int) -> str:
        process = self._processes.pop(pid, None)
        if process is None:
            return "another process has its exit code"  # adopted: not a child of this process
        code = process.wait()
        return procs.exit_reason(-code if code < 0 else code << 8)


def _age(handle: str) -> tuple[int, int]:
    """Sorts handles by the start of their process."""
    pid, _, started = handle.partition(":")
    return int(started), int(pid)
