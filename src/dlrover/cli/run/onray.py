"""``dlrover-run --platform ray``: its options, and the job's record for the Ray cluster."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from dlrover.cli.run.nproc import ACCELERATORS
from dlrover.errors import ConfigurationError
from dlrover.ray.machine import job as jobs
from dlrover.spec.jobdir import AgentConfig, MasterConfig

if TYPE_CHECKING:
    from dlrover.cli.run.launchspec import RunOptions

PLATFORMS = ("ray",)
"""Platforms that ``--platform`` names."""
_OWN = ("ray_address", "ray_resources", "ray_env", "ray_working_dir")


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how the nodes of a job run on Ray."""

    address: str
    resources: dict[str, float]
    """What each node takes of the cluster."""
    env: dict[str, str]
    working_dir: str


def adjusted(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options such that the nodes that Ray runs count as started by DLRover.

    Raises:
        ConfigurationError: options exclude each other.
    """
    if not args.platform:
        for name in _OWN:
            if getattr(args, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigurationError(f"{flag} {getattr(args, name)}: needs --platform ray.")
        return args
    for name in ("local_nodes", "rdzv_endpoint", "standalone", "node_memory", "node_cpu"):
        if getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigurationError(
                f"{flag}: excludes --platform ray, whose cluster runs the nodes; --nnodes is their number."
            )
    if args.instances and "nnodes" not in args.given:
        raise ConfigurationError(
            "--instances: give --nnodes N, the number of instances in the cluster."
        )
    most = args.nnodes.rpartition(":")[2]
    count = int(most) if most.isdecimal() else 0  # 0: its own check says what is wrong
    return argparse.Namespace(**(vars(args) | {"local_nodes": count}))


def devices(args: argparse.Namespace, word: str) -> int:
    """Return the number of devices of a node that a word as ``--nproc-per-node`` stands for."""
    amounts = jobs.parse_resources(args.ray_resources)
    count = 0 if word == "cpu" else int(amounts.get("GPU", 0))
    return count or (0 if word == ACCELERATORS else int(amounts.get("CPU", 1)))


def ray_options(
    args: argparse.Namespace, environ: Mapping[str, str], nproc: int
) -> RayOptions | None:
    """Return the options for Ray; None if the job runs elsewhere.

    Raises:
        ConfigurationError: one of them is malformed.
    """
    if not args.platform:
        return None
    directory = args.ray_working_dir
    if directory and not os.path.isdir(directory):
        raise ConfigurationError(f"--ray-working-dir {directory}: there is no such directory.")
    return RayOptions(
        address=args.ray_address or environ.get("RAY_ADDRESS", ""),
        resources=jobs.parse_resources(args.ray_resources) or {"CPU": float(nproc)},
        env=_env(args.ray_env, environ),
        working_dir=directory,
    )


def ray_job(
    options: RunOptions, name: str, master: MasterConfig, agent: AgentConfig, token: str
) -> jobs.RayJob:
    """Return the record of the job that a command line asks for.

    Raises:
        ConfigurationError: an argument is not UTF-8.
    """
    ray = options.ray
    assert ray is not None
    threads = {"OMP_NUM_THREADS": options.omp_num_threads} if options.omp_num_threads else {}
    return jobs.RayJob(
        name=name,
        master=master,
        roles={"": jobs.RayRole(agent=agent, resources=ray.resources, env=threads | ray.env)},
        token=token,
        directory=os.getcwd(),
        address=ray.address,
        working_dir=ray.working_dir,
        foreground=True,
    )


def check(job: jobs.RayJob) -> None:
    """Refuse at once a job that its cluster cannot run.

    Raises:
        ConfigurationError: Ray is not installed, there is no such cluster, it is of another version or too small.
    """
    from dlrover.ray import cluster  # noqa: PLC0415 - only here

    try:
        cluster.connect(job.address)
        cluster.check_room(job)
    finally:
        cluster.disconnect()


def _env(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for pair in text.split(",") if text else ():
        name, given, value = pair.strip().partition("=")
        if not name or (not given and name not in environ):
            raise ConfigurationError(
                f"--ray-env {text}: {pair.strip()!r} is neither NAME=VALUE nor a variable of this command."
            )
        found[name] = value if given else environ[name]
    return found
