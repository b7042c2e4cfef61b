"""The jobs of the roles: each is a ``dlrover-run`` with a job directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from dlrover._util import procs
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.master.app import read_outcome
from dlrover.roles.spec import EntryForm, EntryPoint, Failover, RoleKind, RolesConfig, RoleSpec
from dlrover.rpc.client import connect
from dlrover.spec.events import Event
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import Outcome

LAUNCHER = "dlrover.cli.run.run"
CONNECT_PAUSE = 0.2
"""Seconds between attempts to reach the master of a role's job, which may be starting."""
SERVE = "dlrover.roles.runtime.serve"
"""Module that runs the objects and functions of roles."""
AGENT, ZYGOTE = "dlrover.agent", "zygote.main("
"""What the command lines of agents, and of the processes of which workers are forks, have in them."""
PREFIX = "[${role_name}${rank}]:"

OnExit = Callable[[str, int, Outcome | None, int], None]
"""Callback for the end of a role's job: role, attempt, outcome (None if it left none), and the exit code of its
launcher (0 if unknown)."""


def option(command: list[str], name: str) -> str:
    """Return the value of an option in a command; empty if it has none."""
    return command[command.index(name) + 1] if name in command[:-1] else ""


def directory_of(job_dir: Path, role: str) -> JobDir:
    """Return the job directory of a role."""
    return JobDir(job_dir / "roles" / role)


def arguments(role: RoleSpec, platform: str) -> list[str]:
    """Return the options and the program of a role's ``dlrover-run``."""
    own = role.failover is Failover.INSTANCE or (
        role.kind is RoleKind.ELASTIC and role.failover is Failover.ROLE
    )
    budget = role.max_restarts if own else 0
    limits = {
        "max_infrastructure_restarts": str(budget),
        "no_progress_restarts": str(budget + 1),  # the budget alone decides
        "restart_window": f"{role.window:g}",
    }
    words = ["--role", role.name, "--local-nodes", str(role.most), "--tee", "3"]
    words += ["--max-restarts", str(budget), "--shutdown-timeout", str(role.shutdown_timeout)]
    words += ["--rdzv-conf", ",".join(f"{key}={value}" for key, value in limits.items())]
    if role.kind is RoleKind.ELASTIC:
        words += ["--nnodes", f"{role.least}:{role.most}"]
        words += ["--nproc-per-node", str(role.processes)]
        words += ["--spares", str(role.spares)] if role.spares else []
    else:
        words.append("--instances")
    if platform != "local":
        words += ["--platform", platform]
    return [*words, *program(role.entry)]


def program(entry: EntryPoint) -> list[str]:
    """Return the words that run an entry point."""
    if entry.form is EntryForm.SCRIPT:
        return [entry.target, *entry.args]
    return ["--module", SERVE, entry.target]


class RoleJobs:
    """Starts, finds, follows and stops the roles' jobs. They outlive the coordinator, not its supervisor.

    Args:
        job_dir: Directory of the whole job.
        config: The whole job.
        env: Environment of all roles.
        lifeline_fd: Closes when the process dies that keeps the coordinator alive.
        on_exit: Called when a role's job has ended.
    """

    def __init__(
        self,
        job_dir: Path,
        config: RolesConfig,
        env: Mapping[str, str],
        lifeline_fd: int,
        on_exit: OnExit,
    ) -> None:
        self._job_dir, self._config = job_dir, config
        self._env, self._lifeline_fd, self._on_exit = env, lifeline_fd, on_exit
        self._waits: set[asyncio.Task[None]] = set()
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, name: str, attempt: int, own: Mapping[str, str]) -> str:
        """Start the job of a role, with variables of its ``own``; return its handle.

        Raises:
            InfrastructureError: no process can be started.
        """
        role = self._config.job.role(name)
        directory = directory_of(self._job_dir, name)
        directory.path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # it must not be taken for this attempt's
            directory.outcome.rename(directory.path / f"outcome-{attempt - 1}.json")
        fd = ["--lifeline-fd", str(self._lifeline_fd)] if self._lifeline_fd >= 0 else []
        command = [*self._command(directory), *fd, *arguments(role, self._config.platform)]
        try:
            process = subprocess.Popen(
                command,
                env={**self._environment(directory), **role.env, **own},
                pass_fds=[self._lifeline_fd] if fd else [],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(
                f"Role {name} cannot be started: {error.strerror}."
            ) from error
        self._children[process.pid] = process
        handle = f"{process.pid}:{procs.start_time(process.pid)}"
        self.watch(name, attempt, handle)
        return handle

    def _command(self, directory: JobDir) -> list[str]:
        return [sys.executable, "-m", LAUNCHER, "--job-dir", str(directory.path)]

    def _environment(self, directory: JobDir) -> dict[str, str]:
        """Return the environment of all roles: modules beside the job's file can be imported."""
        path = [self._config.job.directory, self._env.get("PYTHONPATH", "")]
        return {
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": PREFIX,
            **self._env,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "DLROVER_STATE_DIR": str(directory.path / "state"),
        }

    def find(self, name: str) -> str:
        """Return the handle of a role's job that an earlier coordinator started; empty if none runs."""
        command = self._command(directory_of(self._job_dir, name))
        ages = [
            (started, pid)
            for pid in procs.pids()
            if procs.command(pid)[: len(command)] == command and (started := procs.start_time(pid))
        ]
        return "{1}:{0}".format(*min(ages)) if ages else ""

    def workers(self, name: str, node: int) -> list[int]:
        """Return the worker processes of a node of the role's job; -1: of all its nodes."""
        words = {"--job-dir", str(directory_of(self._job_dir, name).path), AGENT}
        parents = {pid: procs.parent(pid) for pid in procs.pids()}
        commands = {pid: procs.command(pid) for pid in parents}
        agents = {
            pid
            for pid, command in commands.items()
            if words <= set(command) and (node < 0 or option(command, "--node-id") == str(node))
        }
        zygotes = {
            pid
            for pid, parent in parents.items()
            if parent in agents and any(ZYGOTE in word for word in commands[pid])
        }
        return [pid for pid, parent in parents.items() if parent in zygotes]

    def watch(self, name: str, attempt: int, handle: str) -> None:
        """Report the end of a role's job."""
        task = asyncio.create_task(self._wait(name, attempt, handle))
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)

    async def _wait(self, name: str, attempt: int, handle: str) -> None:
        pid, _, started = handle.partition(":")
        if procs.runs(int(pid), int(started)):
            with contextlib.suppress(ProcessLookupError):
                await procs.ended(int(pid))
        child = self._children.pop(int(pid), None)
        code = child.wait() if child is not None else 0
        self._on_exit(name, attempt, read_outcome(directory_of(self._job_dir, name).outcome), code)

    def stop(self, handle: str, within: float) -> None:
        """Ask the launcher of a role's job to stop it; kill a launcher that runs on after ``within`` seconds."""
        _signal(handle, signal.SIGTERM)
        _signal(handle, signal.SIGCONT)  # a stopped process gets SIGTERM only then
        asyncio.get_running_loop().call_later(within, _signal, handle, signal.SIGKILL)

    async def follow(self, name: str) -> AsyncIterator[Event]:
        """Yield all events of the role's running job; endlessly, through deaths of its master."""
        directory, seen = directory_of(self._job_dir, name), 0
        while True:
            with contextlib.suppress(InfrastructureError, ConfigurationError):
                async with connect(directory) as client:
                    async for notice in client.watch(seen, follow=True):
                        for event in notice.events:
                            seen = event.seq
                            yield event
            await asyncio.sleep(CONNECT_PAUSE)

    def close(self) -> None:
        """Stop watching; the jobs go on."""
        for task in self._waits:
            task.cancel()


def _signal(handle: str, number: signal.Signals) -> None:
    """Send a signal to the launcher of a role's job if it runs."""
    pid, _, started = handle.partition(":")
    if handle and procs.runs(int(pid), int(started)):
        procs.kill([int(pid)], number)
