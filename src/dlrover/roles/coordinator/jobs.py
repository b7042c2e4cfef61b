"""The jobs of the roles: each is a ``dlrover-run`` with a job directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from dlrover._util import decoding, procs, start, tasks
from dlrover.agent.workers.zygotes import ZYGOTE
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.master.files import read_outcome
from dlrover.roles.spec import EntryForm, EntryPoint, RoleKind, RolesConfig, RoleSpec
from dlrover.rpc.client import connect
from dlrover.spec.events import Event
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import Outcome

LAUNCHERS = {
    "local": "dlrover.cli.run.run",
    "ray": "dlrover.cli.run.run",
    "kubernetes": "dlrover.cli.cluster.elasticrole",
}
"""Modules that run the job of a role, by platform."""
CLUSTERS = ("ray", "kubernetes")
"""Platforms whose machines do not have the job's directory."""
CONNECT_PAUSE = 0.2
"""Seconds between attempts to reach the master of a role's job, which may be starting."""
SERVE = "dlrover.roles.runtime.serve"
"""Module that runs the objects and functions of roles."""
TEMPLATE, PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}${rank}]:"
MOST_NAME = 48
"""Characters of the names of job and role in the name of a role's job on a cluster."""

OnExit = Callable[[str, int, Outcome | None, int], None]
"""Callback for the end of a role's job: role, attempt, outcome (None if it left none), and the exit code of its
launcher (0 if unknown)."""


def directory_of(job_dir: Path, role: str) -> JobDir:
    """Return the job directory of a role."""
    return JobDir(job_dir / "roles" / role)


def restarts(role: RoleSpec) -> int:
    """Return how often a role's own job may restart."""
    return role.max_restarts if role.restarts_itself else 0


def limits_of(role: RoleSpec) -> dict[str, str]:
    """Return the settings of the master of a role's job."""
    return {
        "max_infrastructure_restarts": str(restarts(role)),
        "no_progress_restarts": str(restarts(role) + 1),  # the budget alone decides
        "restart_window": f"{role.window:g}",
    }


def arguments(role: RoleSpec, config: RolesConfig, where: Sequence[str] = ()) -> list[str]:
    """Return the options and the program of a role's ``dlrover-run``; ``where`` are options for its platform."""
    budget, limits = restarts(role), limits_of(role)
    local, ray = config.platform == "local", config.platform == "ray"
    words = ["--role", role.name, "--tee", "3"]
    words += ["--local-nodes", str(role.most)] if local else []
    words += ["--platform", "ray", *where] if ray else []
    words += ["--max-restarts", str(budget), "--shutdown-timeout", str(role.shutdown_timeout)]
    words += ["--rdzv-conf", ",".join(f"{key}={value}" for key, value in limits.items())]
    if role.kind is RoleKind.ELASTIC:
        words += ["--nnodes", f"{role.least}:{role.most}"]
        words += ["--nproc-per-node", str(role.processes)]
        words += ["--spares", str(role.spares)] if role.spares and (local or ray) else []
    else:
        words += ["--instances", "--nnodes", str(role.most)] if ray else ["--instances"]
    return [*words, *program(role.entry, config.ray_working_dir)]


def on_ray(role: RoleSpec, config: RolesConfig, name: str, env: Iterable[str]) -> list[str]:
    """Return the options by which a role's job runs on a Ray cluster under a ``name``, with these variables."""
    amounts = ",".join(f"{kind}={amount:.15g}" for kind, amount in ray_resources(role).items())
    words = ["--rdzv-id", name, "--ray-resources", amounts, "--ray-env", ",".join(env)]
    words += ["--ray-address", config.ray_address] if config.ray_address else []
    return words + (["--ray-working-dir", config.ray_working_dir] if config.ray_working_dir else [])


def ray_resources(role: RoleSpec) -> dict[str, float]:
    """Return what each instance of a role takes of a Ray cluster, by Ray's names: a CPU for each process by default."""
    cpu = role.size.cpu or float(role.processes)
    size = {"CPU": cpu, "memory": float(role.size.memory), "GPU": role.gpus}
    return {kind: amount for kind, amount in size.items() if amount}


def program(entry: EntryPoint, within: str = "") -> list[str]:
    """Return the words that run an entry point; a script's path is relative to ``within`` if that is not empty."""
    if entry.form is EntryForm.SCRIPT:
        target = os.path.relpath(entry.target, within) if within else entry.target
        return [target, *entry.args]
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
        if self._config.platform in CLUSTERS:
            _set_aside(directory, attempt)
        else:  # what is left of the last attempt's master, which may be ending, tells of other instances
            directory.master.unlink(missing_ok=True)
        fd = ["--lifeline-fd", str(self._lifeline_fd)] if self._lifeline_fd >= 0 else []
        env = {**self._variables(), **role.env, **own}
        command = [*self._command(directory), *fd]
        match self._config.platform:
            case "kubernetes":
                command += ["--attempt", str(attempt), "--env", ",".join(env)]
            case "ray":
                where = on_ray(role, self._config, self._name(name, attempt), env)
                command += arguments(role, self._config, where)
            case _:
                command += arguments(role, self._config)
        try:
            process = subprocess.Popen(
                command,
                env={**self._env, "DLROVER_STATE_DIR": str(directory.path / "state"), **env},
                cwd=self._config.ray_working_dir or None,
                pass_fds=[self._lifeline_fd] if fd else [],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # the latter: an argument with a NUL
            why = error.strerror if isinstance(error, OSError) else error
            if isinstance(error, OSError) and error.errno == errno.E2BIG:
                why = "its config, env and arguments are more than a process can be given; put large values in a file"
            raise InfrastructureError(f"Role {name} cannot be started: {why}.") from error
        self._children[process.pid] = process
        handle = f"{process.pid}:{procs.start_time(process.pid)}"
        self.watch(name, attempt, handle)
        return handle

    def _name(self, role: str, attempt: int) -> str:
        """Return a name for a role's job that no other job of a cluster has, nor another attempt, which may be ending."""
        token = JobDir(self._job_dir).token.read_text().strip()
        own = hashlib.sha256(f"{token} {role}".encode()).hexdigest()[:6]
        return f"{self._config.job.name}-{role}"[:MOST_NAME] + f"-{attempt}-{own}"

    def _command(self, directory: JobDir) -> list[str]:
        launcher = LAUNCHERS[self._config.platform]
        return [*start.command(launcher), "--job-dir", str(directory.path)]

    def _variables(self) -> dict[str, str]:
        """Return the variables of all roles beside those of the command: modules beside the job's file are found."""
        here, within = self._config.job.directory, self._config.ray_working_dir
        path = [os.path.relpath(here, within) if within else here, self._env.get("PYTHONPATH", "")]
        return {
            TEMPLATE: self._env.get(TEMPLATE, PREFIX),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
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
        words = {"--job-dir", str(directory_of(self._job_dir, name).path), start.AGENT}
        parents = {pid: procs.parent(pid) for pid in procs.pids()}
        commands = {pid: procs.command(pid) for pid in parents}
        agents = {
            pid
            for pid, command in commands.items()
            if words <= set(command)
            and (node < 0 or procs.option(command, "--node-id") == str(node))
        }
        zygotes = {
            pid
            for pid, parent in parents.items()
            if parent in agents and any(ZYGOTE in word for word in commands[pid])
        }
        return [pid for pid, parent in parents.items() if parent in zygotes]

    def watch(self, name: str, attempt: int, handle: str) -> None:
        """Report the end of a role's job."""
        tasks.start(self._wait(name, attempt, handle), self._waits)

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
        # Its launcher copies them, also of a master that has lost its journal.
        if self._config.platform in CLUSTERS:
            async for event in _lines(directory.events):
                yield event
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


def runs(handle: str) -> bool:
    """Return whether the launcher of a role's job runs; False without a handle."""
    pid, _, started = handle.partition(":")
    return bool(handle) and procs.runs(int(pid), int(started))


def _set_aside(directory: JobDir, attempt: int) -> None:
    """Keep the events of earlier attempts apart, unless this attempt has begun already."""
    begun = directory.path / f"attempt-{attempt}"
    if not begun.exists():
        with contextlib.suppress(FileNotFoundError):
            directory.events.rename(directory.path / f"events-{attempt - 1}.jsonl")
        begun.touch()


async def _lines(path: Path) -> AsyncIterator[Event]:
    """Yield the events in a file, and endlessly those that are appended."""
    position = 0
    while True:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                yield decoding.json(line, Event)
        await asyncio.sleep(CONNECT_PAUSE)


def _signal(handle: str, number: signal.Signals) -> None:
    """Send a signal to the launcher of a role's job if it runs."""
    if runs(handle):
        procs.kill([int(handle.partition(":")[0])], number)
