"""``dlrover roles --platform kubernetes``: the ElasticJob of a job of several roles, and the one of each role.

The master of the first one is the coordinator. It makes the others, which belong to the first and have its token.
"""

from __future__ import annotations

import asyncio
import copy
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dlrover import accelerators, config
from dlrover._util import procs
from dlrover.cli import jobs
from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine import objects, tls
from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.types import ElasticJob
from dlrover.roles.coordinator.jobs import arguments, limits_of, restarts
from dlrover.roles.loading import of_options, tls_of, to_options
from dlrover.roles.spec import RoleKind, RolesConfig, RolesJob, RoleSpec
from dlrover.spec.job import Limits
from dlrover.spec.jobdir import JobDir

Manifest = dict[str, Any]
GPU = accelerators.RESOURCES[0]
"""Name of what ``resources: {gpu: 1}`` asks for."""
TOKEN = config.ROLE_VARIABLES["token"]
LEAVE = 10 + int(Limits().release_grace)
"""Seconds that a pod gets beyond its role's shutdown time-out: to store what is in memory, and to end."""


def check(job: RolesJob) -> None:
    """Refuse what a job on Kubernetes cannot have.

    Raises:
        ConfigurationError: the first fault, in one sentence.
    """
    for role in job.roles:
        name = names.job_of_role(job.name, role.name)
        if not re.fullmatch(names.JOB_NAME, name) or len(name) > names.LONGEST_NAME:
            raise ConfigurationError(
                f"role {role.name}: the ElasticJob {name} cannot have that name: job and role are lower case letters, "
                f"digits and '-', with a letter first, and {names.LONGEST_NAME - 1} characters together at most."
            )
        if role.collocate:
            raise ConfigurationError(
                f"role {role.name}: collocate {role.collocate}: with --platform kubernetes, each role has resources of "
                "its own; take collocate away."
            )
        if not role.gpus.is_integer():
            raise ConfigurationError(
                f"role {role.name}: resources gpu {role.gpus:g}: Kubernetes gives a pod whole GPUs."
            )


def manifest(job: RolesJob, image: str, working_dir: str, settings: Manifest) -> Manifest:
    """Return the ElasticJob of a job of several roles; the image has its files in ``working_dir``.

    ``settings`` are those of ``spec.master``; empty ones are left out.

    Raises:
        ConfigurationError: the job cannot run on Kubernetes.
    """
    check(job)
    if not image:
        raise ConfigurationError(
            "--platform kubernetes needs --image, with the scripts and modules beside FILE and dlrover[kubernetes]."
        )
    container = {
        "name": "main",
        "image": image,
        **({"workingDir": working_dir} if working_dir else {}),
    }
    master = {"template": {"spec": {"containers": [container]}}}
    given = {name: value for name, value in settings.items() if value}
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ElasticJob",
        "metadata": {"name": job.name},
        "spec": {
            "roles": {role.name: to_options(role, job.directory) for role in job.roles},
            "replicaSpecs": {names.MASTER_ROLE: master},
            **({"master": given} if given else {}),
        },
    }


def job_of(
    job: ElasticJob, role: RoleSpec, content: RolesConfig, attempt: int, env: Mapping[str, str]
) -> Manifest:
    """Return the ElasticJob of a role, for one of its starts, whose pods have these variables."""
    template = copy.deepcopy(job.spec.replica_specs[names.MASTER_ROLE].template)
    spec = template["spec"]
    main = next(
        (one for one in spec["containers"] if one.get("name") == "main"), spec["containers"][0]
    )
    for of_coordinator in (
        "command",
        "args",
        "resources",
        "ports",
        "readinessProbe",
        "livenessProbe",
    ):
        main.pop(of_coordinator, None)
    spec.pop("serviceAccountName", None)  # the coordinator's rights are not the roles'
    main["name"] = "main"
    main["command"] = ["dlrover-run", *arguments(role, content)]
    secret = {"name": names.own_name(job.name, job.uid), "key": names.TOKEN_KEY}
    if job.spec.master.tls:
        env = {**env, config.ROLE_VARIABLES["tls_ca"]: f"{tls.FOLDER}/{tls.AUTHORITY}"}
    given = [one for one in main.get("env") or () if one["name"] not in env]
    plain = [{"name": name, "value": value} for name, value in env.items() if name != TOKEN]
    main["env"] = [*given, *plain, {"name": TOKEN, "valueFrom": {"secretKeyRef": secret}}]
    main["resources"] = _resources(role)
    spec["terminationGracePeriodSeconds"] = role.shutdown_timeout + LEAVE
    elastic = role.kind is RoleKind.ELASTIC
    settings = {
        f"{config.ENV_PREFIX}{key.upper()}": value for key, value in limits_of(role).items()
    }
    of_master = {"name": "main", "env": [{"name": n, "value": v} for n, v in settings.items()]}
    pod_of_master: Manifest = {"containers": [of_master]}
    # All masters have the coordinator's certificate: those who reach them expect its name.
    tls.give_master(pod_of_master, of_master, job)
    tls.give_node(spec, main, job)
    worker = {
        "replicas": role.most,
        **({"minReplicas": role.least} if elastic else {}),
        "restartCount": restarts(role),
        "template": template,
    }
    annotations = {names.ATTEMPT: str(attempt)}
    annotations |= {} if elastic else {names.INSTANCES: role.name}
    return {
        "metadata": {
            "name": names.job_of_role(job.name, role.name),
            "namespace": job.namespace,
            "annotations": annotations,
            "ownerReferences": [objects.owner(job)],
        },
        "spec": {
            "replicaSpecs": {
                "worker": worker,
                names.MASTER_ROLE: {"template": {"spec": pod_of_master}},
            },
            "envs": {key: _without_defaults(one) for key, one in job.spec.envs.items()},
            "spares": {"replicas": role.spares},
            "master": {"image": job.spec.master.image} if job.spec.master.image else {},
        },
    }


def _without_defaults(one: msgspec.Struct) -> Manifest:
    return {key: value for key, value in msgspec.to_builtins(one).items() if value}


def _resources(role: RoleSpec) -> Manifest:
    memory = {"memory": str(role.size.memory)} if role.size.memory else {}
    cpu = {"cpu": f"{role.size.cpu:.15g}"} if role.size.cpu else {}
    gpu = {GPU: str(int(role.gpus))} if role.gpus else {}
    return {"requests": {**cpu, **memory, **gpu}, "limits": {**memory, **gpu}}


# ---- the coordinator's pod


def coordinate(job: ElasticJob, env: Mapping[str, str], job_dir: str, port: int) -> int:
    """Run the coordinator of an ElasticJob with roles, in its master's pod; return the job's exit code.

    Raises:
        ConfigurationError: the roles cannot be one job in this image.
        InfrastructureError: the coordinator cannot be kept alive.
    """
    from dlrover.cli.cluster import elasticrole  # noqa: PLC0415 - loads grpc
    from dlrover.cli.run.run import show  # noqa: PLC0415
    from dlrover.cli.run.supervisor import Supervisor  # noqa: PLC0415
    from dlrover.roles import client  # noqa: PLC0415

    roles = of_options(job.name, job.spec.roles, Path(os.getcwd()))
    check(roles)
    secured = tls_of(env)
    if secured.ca and not job.spec.master.tls:
        raise ConfigurationError(
            "The template of dlrover-master sets DLROVER_TLS_CA: a job of several roles cannot bring a certificate of its"
            " own; set spec.master.tls instead."
        )
    directory = jobs.create(env, job.name, job_dir or env.get("DLROVER_JOB_DIR", ""))
    signal.signal(signal.SIGTERM, procs.leave)  # the next pod goes on with the job
    with jobs.locked(directory, resume=True):
        if not directory.journal.exists():
            asyncio.run(elasticrole.clear(job))
        service = f"{names.master_name(job.name)}.{job.namespace}.svc:{port}"
        host = env.get("POD_IP") or "0.0.0.0"  # noqa: S104 - the token is a secret
        content = RolesConfig(
            job=roles,
            platform="kubernetes",
            host=host,
            port=port,
            address=service,
            tls=secured,
        )
        jobs.write(directory, directory.roles, msgspec.json.encode(content))
        jobs.write_token(directory, jobs.given_token(env))
        print(f"dlrover: job {job.name} in {directory.path}", file=sys.stderr, flush=True)
        supervisor = Supervisor(JobDir(directory.path), env, connect=client.connect)
        supervisor.add_coordinator()
        outcome = asyncio.run(supervisor.run([], 0.0))
    show(outcome, "text")
    print(outcome.reason, file=sys.stderr)  # the end of the pod's log
    return outcome.exit_code
