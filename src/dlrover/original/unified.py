"""The original's unified API: what describes a job of several roles."""

from __future__ import annotations

import argparse
import enum
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dlrover.errors import ConfigurationError


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
        content = {"name": job_name or "job", "directory": self.directory, "roles": self.roles}
        with tempfile.TemporaryDirectory(prefix="dlrover-job-") as directory:
            file = Path(directory, "job.yaml")
            file.write_text(json.dumps(content))
            command = [sys.executable, "-m", "dlrover.cli.main", "roles", str(file)]
            return subprocess.run(command, check=False).returncode


class _Role:
    """The builder of one role; a name that it does not have is one of the job's builder."""

    def __init__(self, job: DLJobBuilder, entry: str, kind: str) -> None:
        self._job = job
        self._options: dict[str, Any] = {"entry": entry, "kind": kind, "failover": "instance"}
        self._total, self._is_driver = 1, True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._job, name)

    def _set(self, **options: Any) -> _Role:
        self._options |= options
        return self

    def total(self, num: int) -> _Role:
        """Set the number of instances; in an elastic role, of workers."""
        self._total = num
        return self

    def per_group(self, num: int) -> _Role:
        """Set the number of workers of each node of an elastic role."""
        return self._set(processes=num) if self._options["kind"] == "elastic" else self

    nproc_per_node = per_group

    def nnodes(self, num: int) -> _Role:
        """Set the number of nodes of an elastic role."""
        return self._set(instances=num)

    def env(self, env: dict[str, str]) -> _Role:
        """Set environment variables."""
        return self._set(env=dict(env))

    def resource(self, **resource: Any) -> _Role:
        """Set what an instance needs; only cores and memory, in MiB, have an effect."""
        found: dict[str, Any] = {}
        if cpu := resource.get("cpu"):
            found["cpu"] = cpu
        if memory := resource.get("memory", resource.get("mem")):
            found["memory"] = f"{memory}Mi"
        return self._set(resources=found)

    def not_driver(self) -> _Role:
        """Say that the job does not wait for this role."""
        self._is_driver = False
        return self

    def sub_stage(self, *_: Any) -> _Role:
        """Refuse."""
        raise ConfigurationError(
            "sub_stage does not exist here: give the role the option depends_on of dlrover.roles.Job.role."
        )

    def _same(self, *_: Any, **__: Any) -> _Role:
        """Do nothing: it is so here, or has no effect."""
        return self

    enable_node_group_failover = disable_ray_auto_visible_device = _same
    skip_node_check = no_setup_process_group = _same

    def end(self) -> DLJobBuilder:
        """Return the builder of the job."""
        return self._job

    def _made(self, shared: dict[str, Any], env: dict[str, str], collocate: str) -> dict[str, Any]:
        found = self._options | shared
        found["env"] = env | found.get("env", {})
        if found["kind"] == "elastic":
            found.setdefault("instances", max(1, self._total // found.get("processes", 1)))
        else:
            found["instances"] = self._total
        return found | ({"collocate": collocate} if collocate else {})


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
        self._roles: dict[str, _Role] = {}
        self._config: dict[str, Any] = {}
        self._env: dict[str, str] = {}
        self._together: dict[str, str] = {}

    def add(self, name: Any, entry: str, kind: str) -> _Role:
        """Add a role."""
        return self._roles.setdefault(_name(name), _Role(self, entry, kind))

    def role(self, name: str) -> _Entry:
        """Begin a role."""
        return _Entry(self, _name(name))

    def workload(self, name: str, entrypoint: str) -> _Role:
        """Add a role of independent instances."""
        return self.role(name).run(entrypoint)

    def config(self, config: Any) -> DLJobBuilder:
        """Set what programs find as ``current_worker().job_info.user_config``."""
        self._config = dict(config)
        return self

    def global_env(self, env: dict[str, str]) -> DLJobBuilder:
        """Set environment variables of all roles."""
        self._env |= env
        return self

    def _same(self, *_: Any) -> DLJobBuilder:
        """Do nothing: this machine is what it is."""
        return self

    node_num = device_per_node = device_type = as_task_stream = as_data_stream = _same

    def with_collocation(self, *roles: Any) -> DLJobBuilder:
        """Let roles use the same resources in turn."""
        names = [_name(role) for role in roles]
        self._together |= dict.fromkeys(names, "-".join(names))
        return self

    def with_collocation_all(self, *without: Any) -> DLJobBuilder:
        """Let all roles, but some, use the same resources in turn."""
        left_out = {_name(role) for role in without}
        return self.with_collocation(*(name for name in self._roles if name not in left_out))

    def by_dlrover_run_cmd(self, cmd: str) -> DLJobBuilder:
        """Refuse."""
        raise ConfigurationError(f"by_dlrover_run_cmd does not exist here: run {cmd} itself.")

    def build(self) -> DLJob:
        """Return the job."""
        drivers = [name for name, role in self._roles.items() if role._is_driver]  # noqa: SLF001
        if len(drivers) < len(self._roles) and (
            len(drivers) != 1 or self._roles[drivers[0]]._options["kind"] != "simple"  # noqa: SLF001
        ):
            raise ConfigurationError(
                f"The drivers are {', '.join(drivers) or 'none'}: beside roles with not_driver(), a job has one, which"
                " is not elastic."
            )
        made = {}
        for name, role in self._roles.items():
            shared = {"config": self._config} if self._config else {}
            made[name] = role._made(shared, self._env, self._together.get(name, ""))  # noqa: SLF001
            if len(drivers) < len(self._roles) and name in drivers:
                made[name]["kind"] = "driver"
        return DLJob(made, os.getcwd())


class RLJobBuilder(DLJobBuilder):
    """The same, for the roles of reinforcement learning; the trainer is the driver."""

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

    def with_collocation_all(self, *without: Any) -> DLJobBuilder:
        """Let all roles but the trainer, and some, use the same resources in turn."""
        return super().with_collocation_all(RLRoleType.TRAINER, *without)

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
