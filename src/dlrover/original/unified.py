"""The original's unified API: what describes a job of several roles."""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dlrover._util import decoding, procs, start
from dlrover.errors import ConfigurationError
from dlrover.original.runtime import VARIABLE, Hosted
from dlrover.roles.entries import entry_point

ENTRY = "dlrover.original.runtime.main"
"""Entry point of the roles whose own one is a function or a class of a module."""


PASSED_ON = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
"""Signals by which a job's program ends its job in an orderly way."""


class RLRoleType(str, enum.Enum):
    """Names of roles."""

    TRAINER = "TRAINER"
    ACTOR = "ACTOR"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    CRITIC = "CRITIC"


def _name(role: Any) -> str:
    return str(role.value if isinstance(role, enum.Enum) else role)


class DLJob:
    """A job of roles, as ``dlrover roles`` reads it.

    Args:
        roles: By name: the entry point and the options of `dlrover.roles.Job.role`.
        directory: Where scripts and modules are found.
    """

    def __init__(self, roles: dict[str, dict[str, Any]], directory: str) -> None:
        self.roles, self.directory = roles, directory

    def submit(self, job_name: str | None = None, blocking: bool = True, **kwargs: Any) -> int:
        """Run the job to its end on this machine; return its exit code."""
        if not blocking:
            raise ConfigurationError(
                "submit(blocking=False) does not exist here: run dlrover roles in the background."
            )
        if kwargs:
            print(f"dlrover: submit: without effect: {', '.join(kwargs)}", file=sys.stderr)
        for name, role in self.roles.items():  # the coordinator sees the host's entry point
            known = decoding.json(role["env"][VARIABLE], Hosted)
            entry_point(name, known.entry or role["entry"], Path(self.directory))
        content = {"name": job_name or "job", "directory": self.directory, "roles": self.roles}
        with tempfile.TemporaryDirectory(prefix="dlrover-job-") as directory:
            file = Path(directory, "job.yaml")
            file.write_text(json.dumps(content))
            return _run([*start.command("dlrover.cli.main"), "roles", str(file)])


@contextlib.contextmanager
def _takes_ends() -> Iterator[None]:
    """Take SIGCHLD if it is ignored: else every child seems to end with exit code 0.

    Raises:
        ConfigurationError: It is ignored, and this is no main thread.
    """
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if ignored and threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "submit: SIGCHLD is ignored, which hides how a job ends; take it in the main thread: "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL)."
        )
    if ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@_takes_ends()
def _run(command: list[str]) -> int:
    """Run a job's command to its end, and return its exit code; it gets the signals of this process, and dies with it."""
    lifeline = procs.Lifeline()
    fd = lifeline.read_fd
    try:
        process = subprocess.Popen(
            [*command, "--lifeline-fd", str(fd)], pass_fds=(fd,), start_new_session=True
        )
    except OSError:
        lifeline.close()
        raise

    def pass_on(number: int, _: object) -> None:
        process.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()  # others get no signals
    taken = [one for one in PASSED_ON if is_main and not procs.survives_hangup(one)]
    before = {number: signal.signal(number, pass_on) for number in taken}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        lifeline.close()


class _Role:
    """The builder of one role; a name that it does not have is one of the job's builder."""

    def __init__(self, job: DLJobBuilder, name: str, entry: str, kind: str) -> None:
        self._job, self._name, self._entry, self._kind = job, name, entry, kind
        self._total, self._per_group = 1, 1
        self._is_driver, self._has_group = True, kind == "elastic"
        self._env: dict[str, str] = {}
        self._resources: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._job, name)

    def total(self, num: int = 1) -> _Role:
        """Set the number of instances; in an elastic role, of workers."""
        self._total = num
        return self

    def per_group(self, num: int = 1) -> _Role:
        """Set the number of workers of each node of an elastic role."""
        self._per_group = num
        return self

    def nproc_per_node(self, num: int) -> _Role:
        """Set the number of workers of each node, for the same number of nodes."""
        self._total = self._total // self._per_group * num
        return self.per_group(num)

    def nnodes(self, num: int) -> _Role:
        """Set the number of nodes of an elastic role."""
        return self.total(num * self._per_group)

    def env(self, env: dict[str, str] | None = None) -> _Role:
        """Set environment variables."""
        self._env |= env or {}
        return self

    def resource(
        self,
        cpu: float = 0,
        memory: int = 0,
        disk: int = 0,
        accelerator: float = 0,
        **others: Any,
    ) -> _Role:
        """Set what an instance needs; only cores and memory, in MiB, have an effect."""
        memory = memory or others.pop("mem", 0)
        self._resources |= {"cpu": cpu} if cpu else {}
        self._resources |= {"memory": f"{memory}Mi"} if memory else {}
        for name, value in {"disk": disk, "accelerator": accelerator, **others}.items():
            if value:
                self._job.without_effect(f"resource({name})")
        return self

    def not_driver(self) -> _Role:
        """Say that the job does not wait for this role, which can be called until the job ends."""
        self._is_driver = False
        return self

    def no_setup_process_group(self) -> _Role:
        """Leave PyTorch's process group to the program."""
        self._has_group = False
        return self

    def enable_node_group_failover(self, *_: Any, **__: Any) -> _Role:
        """Say that it has no effect."""
        self._job.without_effect("enable_node_group_failover")
        return self

    def _same(self, *_: Any, **__: Any) -> _Role:
        """Do nothing: no role checks nodes, and no Ray hides devices."""
        return self

    skip_node_check = disable_ray_auto_visible_device = _same

    def sub_stage(self, *_: Any) -> _Role:
        """Refuse."""
        raise ConfigurationError(
            "sub_stage does not exist here: give the role the option depends_on of dlrover.roles.Job.role."
        )

    def end(self) -> DLJobBuilder:
        """Return the builder of the job."""
        return self._job

    def _made(self, *, is_driver: bool) -> dict[str, Any]:
        total, per_group = self._total, self._per_group
        if per_group < 1 or total < 1 or total % per_group:
            raise ConfigurationError(
                f"role {self._name}: total {total}: must be a positive multiple of per_group, {per_group}."
            )
        is_elastic = self._kind == "elastic"
        is_script = self._entry.split()[0:1] != [] and self._entry.split()[0].endswith(".py")
        known = Hosted(
            entry="" if is_script else self._entry,
            is_driver=self._is_driver,
            is_elastic=is_elastic,
            has_group=self._has_group and not is_script,
            per_group=per_group,
            accelerator_type=self._job.accelerator_type,
            roles=tuple(self._job.names),
        )
        found: dict[str, Any] = {
            "entry": self._entry if is_script else ENTRY,
            "kind": "driver" if is_driver else self._kind,
            "failover": "instance",
            "instances": total // per_group if is_elastic else total,
            "env": self._job.env | self._env | {VARIABLE: msgspec.json.encode(known).decode()},
        }
        if is_elastic:
            found["processes"] = per_group
            if not self._is_driver:  # who waits for calls makes no steps
                found["env"] = {"DLROVER_HANG_DETECTION": "false"} | found["env"]
        elif per_group > 1:
            self._job.without_effect(f"per_group of the role {self._name}")
        return found | ({"resources": self._resources} if self._resources else {})


class _Entry:
    """A role whose kind is not chosen yet."""

    def __init__(self, job: DLJobBuilder, name: str) -> None:
        self._job, self._name = job, name

    def run(self, entrypoint: str) -> _Role:
        """Make it independent instances."""
        return self._job.add(self._name, entrypoint, "simple")

    def train(self, entrypoint: str) -> _Role:
        """Make it one world."""
        return self._job.add(self._name, entrypoint, "elastic")


class DLJobBuilder:
    """Builds a job of several roles, with the original's methods."""

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.accelerator_type = "GPU"
        self._roles: dict[str, _Role] = {}
        self._config: dict[str, Any] = {}
        self._collocations: list[list[str]] = []
        self._without_effect: dict[str, None] = {}

    @property
    def names(self) -> list[str]:
        """Names of the roles."""
        return list(self._roles)

    def add(self, name: Any, entry: str, kind: str) -> _Role:
        """Add a role.

        Raises:
            ConfigurationError: There is one of this name.
        """
        name = _name(name)
        if name in self._roles:
            raise ConfigurationError(
                f"role {name} is defined twice; each role has a name of its own."
            )
        self._roles[name] = _Role(self, name, entry, kind)
        return self._roles[name]

    def role(self, name: str) -> _Entry:
        """Begin a role."""
        return _Entry(self, _name(name))

    def workload(self, name: str, entrypoint: str) -> _Role:
        """Add a role of independent instances."""
        return self.role(name).run(entrypoint)

    def config(self, config: Any = None) -> DLJobBuilder:
        """Set what programs find as ``current_worker().job_info.user_config``, as plain values."""
        if type(config).__module__.startswith("omegaconf"):
            from omegaconf import OmegaConf  # noqa: PLC0415 - the program's own

            config = OmegaConf.to_container(config, resolve=True)
        self._config = dict(config or {})
        return self

    def global_env(self, env: dict[str, str] | None = None) -> DLJobBuilder:
        """Set environment variables of all roles."""
        self.env |= env or {}
        return self

    def device_type(self, device_type: str = "GPU") -> DLJobBuilder:
        """Set what programs find as ``current_worker().job_info.accelerator_type``; it chooses no device."""
        self.accelerator_type = device_type
        return self

    def node_num(self, num: int = 1) -> DLJobBuilder:
        """Say that it has no effect, but for 1: a job of roles runs on this machine."""
        return self if num == 1 else self.without_effect("node_num")

    def device_per_node(self, num: int = 8) -> DLJobBuilder:
        """Say that it has no effect."""
        return self.without_effect("device_per_node")

    def as_task_stream(self) -> DLJobBuilder:
        """Do nothing: it is so."""
        return self

    def as_data_stream(self) -> DLJobBuilder:
        """Say that it has no effect."""
        return self.without_effect("as_data_stream")

    def without_effect(self, option: str) -> DLJobBuilder:
        """Keep the name of an option that does nothing here; `build` says so once."""
        self._without_effect[option] = None
        return self

    def with_collocation(self, *roles: Any) -> DLJobBuilder:
        """Let roles use the same resources in turn; names in lower case are those of the roles, too."""
        self._collocations.append([_name(role) for role in roles])
        return self

    def with_collocation_all(self, *exclude_roles: Any) -> DLJobBuilder:
        """Let all roles, but some, use the same resources in turn."""
        left_out = {self._known(_name(role)) for role in exclude_roles}
        return self.with_collocation(*(name for name in self._roles if name not in left_out))

    def by_dlrover_run_cmd(self, cmd: str) -> DLJobBuilder:
        """Refuse."""
        raise ConfigurationError(f"by_dlrover_run_cmd does not exist here: run {cmd} itself.")

    def _known(self, name: str) -> str:
        return name if name in self._roles or name.upper() not in self._roles else name.upper()

    def _together(self) -> dict[str, str]:
        """Return the collocation of each role that is in one."""
        found: dict[str, str] = {}
        for given in self._collocations:
            names = [self._known(name) for name in given]
            for name in names:
                if name not in self._roles:
                    raise ConfigurationError(
                        f"with_collocation: {name}: must be a role of the job: {', '.join(self._roles)}."
                    )
                if name in found:
                    raise ConfigurationError(
                        f"with_collocation: {name}: a role is in one collocation at most."
                    )
                found[name] = "-".join(names)
        return found

    def build(self) -> DLJob:
        """Return the job.

        Raises:
            ConfigurationError: Its roles cannot be one job.
        """
        drivers = [role for role in self._roles.values() if role._is_driver]  # noqa: SLF001
        is_led = len(drivers) < len(self._roles)
        if is_led and (len(drivers) != 1 or drivers[0]._kind != "simple"):  # noqa: SLF001
            raise ConfigurationError(
                f"The drivers are {', '.join(role._name for role in drivers) or 'none'}: beside roles with"  # noqa: SLF001
                " not_driver(), a job has one, which is not elastic."
            )
        together, made = self._together(), {}
        for name, role in self._roles.items():
            made[name] = role._made(is_driver=is_led and role in drivers)  # noqa: SLF001
            if self._config:
                made[name]["config"] = self._config
            if name in together:
                made[name]["collocate"] = together[name]
        if self._without_effect:
            print(f"dlrover: without effect: {', '.join(self._without_effect)}", file=sys.stderr)
            self._without_effect.clear()
        return DLJob(made, os.getcwd())


class RLJobBuilder(DLJobBuilder):
    """The same, for the roles of reinforcement learning; the trainer is the driver.

    The original's default of 4 cores and 8 GB for the trainer is left out: a job that needs more than the machine has
    is refused, and a small machine would run none.
    """

    def trainer(self, entrypoint: str) -> _Role:
        """Add the driver."""
        return self.add(RLRoleType.TRAINER, entrypoint, "simple")

    def actor(self, entrypoint: str) -> _Role:
        """Add the model that learns."""
        return self.add(RLRoleType.ACTOR, entrypoint, "elastic").not_driver()

    def critic(self, entrypoint: str) -> _Role:
        """Add the critic."""
        return self.add(RLRoleType.CRITIC, entrypoint, "elastic").not_driver()

    def rollout(self, entrypoint: str) -> _Role:
        """Add what generates samples."""
        return self.add(RLRoleType.ROLLOUT, entrypoint, "simple").not_driver()

    def reference(self, entrypoint: str) -> _Role:
        """Add the reference model."""
        return self.add(RLRoleType.REFERENCE, entrypoint, "simple").not_driver()

    def reward(self, entrypoint: str) -> _Role:
        """Add the reward model."""
        return self.add(RLRoleType.REWARD, entrypoint, "simple").not_driver()

    def with_collocation_all(self, *exclude_roles: Any) -> DLJobBuilder:
        """Let all roles but the trainer, and some, use the same resources in turn."""
        return super().with_collocation_all(RLRoleType.TRAINER, *exclude_roles)

    def build(self) -> DLJob:
        """Return the job, which has an actor."""
        if "ACTOR" not in self._roles:
            raise ConfigurationError("The job has no actor: add one with actor(entrypoint).")
        return super().build()


def args_2_omega_conf(args: argparse.Namespace) -> Any:
    """Return parsed arguments as a configuration of OmegaConf."""
    from omegaconf import OmegaConf  # noqa: PLC0415 - the program's own

    return OmegaConf.create(vars(args))


def omega_conf_2_args(conf: Any) -> argparse.Namespace:
    """Return a configuration of OmegaConf as parsed arguments."""
    return argparse.Namespace(**conf)
