"""``dlrover roles --platform ray``: what the coordinator of such a job needs to know of its cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dlrover import config
from dlrover.errors import ConfigurationError
from dlrover.ray.machine.job import master_name
from dlrover.roles.coordinator.jobs import ray_resources
from dlrover.roles.spec import EntryForm, RolesConfig, RolesJob
from dlrover.spec.jobdir import JobDir

CLIENT = "ray://"


def refuse(address: str, working_dir: str) -> None:
    """Refuse options of Ray for another platform.

    Raises:
        ConfigurationError: one is given.
    """
    for flag, value in (("--ray-address", address), ("--ray-working-dir", working_dir)):
        if value:
            raise ConfigurationError(f"{flag} {value}: needs --platform ray.")


def content(job: RolesJob, address: str, working_dir: str, env: Mapping[str, str]) -> RolesConfig:
    """Return the configuration of a job on a Ray cluster, which has room for it.

    Raises:
        ConfigurationError: Ray is not installed, there is no such cluster, or it can never run the roles.
    """
    from dlrover.ray import cluster  # noqa: PLC0415 - only here

    address = address or env.get("RAY_ADDRESS", "")
    if address.startswith(CLIENT):
        raise ConfigurationError(
            f"--ray-address {address}: the roles must reach this command, so that it runs on a machine of the cluster: "
            "give HOST:PORT there, or start it by ray job submit."
        )
    for role in job.roles:
        if role.collocate:
            raise ConfigurationError(
                f"role {role.name}: collocate {role.collocate}: with --platform ray, each role has resources of its "
                "own; take collocate away."
            )
    within = _checked(job, working_dir)
    try:
        cluster.connect(address)
        cluster.check_roles([(role.name, role.least, ray_resources(role)) for role in job.roles])
        host = cluster.own_address()
    finally:
        cluster.disconnect()
    return RolesConfig(
        job=job, platform="ray", host=host, ray_address=address, ray_working_dir=within
    )


def _checked(job: RolesJob, working_dir: str) -> str:
    """Return the absolute path of the directory that Ray copies; empty if there is none."""
    if not working_dir:
        return ""
    within = Path(working_dir).absolute()
    if not within.is_dir():
        raise ConfigurationError(f"--ray-working-dir {working_dir}: there is no such directory.")
    scripts = [role.entry.target for role in job.roles if role.entry.form is EntryForm.SCRIPT]
    for path in (job.directory, *scripts):
        if not Path(path).absolute().is_relative_to(within):
            raise ConfigurationError(
                f"--ray-working-dir {working_dir}: {path} is not below it, so that Ray would not copy it."
            )
    return str(within)


def copied(role: JobDir, address: str) -> JobDir:
    """Return a directory with copies of what the master of a role, an actor of the cluster, has; ``role`` if there is none yet.

    Raises:
        ConfigurationError: the cluster cannot be reached.
    """
    from dlrover.master.files import load_config  # noqa: PLC0415 - loads grpc
    from dlrover.ray import cluster, remote  # noqa: PLC0415 - only here

    name = load_config(role).job.name
    cluster.connect(address)
    if cluster.record(name) is None and master_name(name) not in cluster.names():
        return role
    return remote.copy(config.environ(), name, address)
