"""``dlrover submit --platform ray``: the job of an ElasticJob's manifest on a Ray cluster."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from dlrover import config
from dlrover.cli.run import arguments
from dlrover.cli.run.nproc import ACCELERATORS
from dlrover.errors import ConfigurationError
from dlrover.kubernetes.platform import job as elastic_job
from dlrover.kubernetes.platform.inventory import requests_of
from dlrover.kubernetes.resources import commands, validation
from dlrover.kubernetes.resources.names import MASTER_ROLE
from dlrover.kubernetes.resources.types import ElasticJob
from dlrover.master.compose import master_config
from dlrover.ray.machine import job as jobs
from dlrover.spec.jobdir import AgentConfig
from dlrover.spec.node import NodeLimits

_NAMES = {"cpu": "CPU", "memory": "memory", "accelerator": "GPU"}


def submit(manifest: Mapping[str, Any], address: str, env: Mapping[str, str]) -> str:
    """Start a manifest's job on a Ray cluster, where it goes on without this command; return its name.

    Raises:
        ConfigurationError: the manifest or the cluster is unsuitable.
    """
    from dlrover.ray import cluster, remote  # noqa: PLC0415 - an extra

    job = ray_job(validation.parse(manifest), env)
    cluster.connect(address or env.get("RAY_ADDRESS", ""))
    remote.start(job)
    return job.name


def ray_job(job: ElasticJob, env: Mapping[str, str]) -> jobs.RayJob:
    """Return the job of a manifest, with what its pods would request and run.

    Raises:
        ConfigurationError: a command is no ``dlrover-run``, or a variable's value is only in Kubernetes.
    """
    settings = config.settings(env)
    request = elastic_job.request(job)
    roles = {
        role: _role(role, job, spec.template, settings)
        for role, spec in job.spec.replica_specs.items()
        if role != MASTER_ROLE
    }
    worker = roles.get("worker") or next(iter(roles.values()))
    size = NodeLimits(
        memory=int(worker.resources.get("memory", 0)), cpu=worker.resources.get("CPU", 0.0)
    )
    request = msgspec.structs.replace(request, platform="ray", node_size=size)
    main = _container(job, next(iter(roles)))
    return jobs.RayJob(
        name=job.name,
        master=master_config(request, settings, "0.0.0.0", 0),  # noqa: S104 - the token is a secret
        roles={"": worker, **roles},
        token=secrets.token_hex(16),
        directory=main.get("workingDir") or "",
    )


def _role(
    role: str, job: ElasticJob, template: Mapping[str, Any], settings: config.Settings
) -> jobs.RayRole:
    words = commands.launched(template)
    if not words:
        raise ConfigurationError(
            f"spec.replicaSpecs.{role}.template: its command must be dlrover-run with its options and program."
        )
    asked = requests_of(dict(template))
    resources = {_NAMES[name]: amount for name, amount in asked.items()}
    count = int(resources.get("GPU", 0))

    def devices(word: str) -> int:
        return (0 if word == "cpu" else count) or (
            0 if word == ACCELERATORS else max(1, int(resources.get("CPU", 1)))
        )

    # As in a pod, whose nodes the master launches.
    options = arguments.parse_elsewhere(words, {"DLROVER_MASTER_ADDR": "ray:0"}, devices)
    threads = {"OMP_NUM_THREADS": options.omp_num_threads} if options.omp_num_threads else {}
    return jobs.RayRole(
        agent=AgentConfig(
            launch=options.launch,
            limits=settings.limits,
            address="",
            store_port=options.master_port,
            accelerator=options.accelerator,
            tls=settings.tls,
        ),
        resources=resources or {"CPU": float(options.launch.nproc_per_node)},
        env=threads | _variables(role, job),
    )


def _container(job: ElasticJob, role: str) -> Mapping[str, Any]:
    return commands.main(job.spec.replica_specs[role].template)


def _variables(role: str, job: ElasticJob) -> dict[str, str]:
    own = {str(one["name"]): one for one in _container(job, role).get("env") or ()}
    shared = {one.name: msgspec.to_builtins(one) for one in job.spec.envs.values()}
    found = {}
    for name, variable in {**shared, **own}.items():
        if variable.get("valueFrom"):
            raise ConfigurationError(
                f"spec.replicaSpecs.{role}: the variable {name} has valueFrom, which only Kubernetes knows; Ray "
                "takes a value."
            )
        found[name] = str(variable.get("value") or "")
    return found
