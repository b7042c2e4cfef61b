"""A job as its master reads it: the ElasticJob in the cluster, and the `JobSpec` that follows from it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dlrover.errors import ConfigurationError
from dlrover.kubernetes import names, nodes, validation
from dlrover.kubernetes.client import ApiError, Client, Resource
from dlrover.kubernetes.inventory import requests_of
from dlrover.kubernetes.types import ElasticJob, ReplicaSpec
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.jobdir import BrainSide
from dlrover.spec.plan import Group
from dlrover.spec.rules import Rule

VARIABLE = "DLROVER_KUBERNETES_JOB"
ELASTIC_JOBS = Resource(names.GROUP, names.VERSION, "elasticjobs", "ElasticJob")


async def read(client: Client, env: Mapping[str, str]) -> ElasticJob:
    """The job that the environment names.

    Raises:
        ConfigurationError: there is none, or it is wrong.
    """
    namespace, _, name = env.get(VARIABLE, "").partition("/")
    if not namespace or not name:
        raise ConfigurationError(
            f"{VARIABLE}={env.get(VARIABLE, '')!r}: must be the ElasticJob of this master, as NAMESPACE/NAME."
        )
    try:
        return validation.parse(await client.get(ELASTIC_JOBS, namespace, name))
    except ApiError as error:
        if error.status != 404:
            raise
        raise ConfigurationError(
            f"{VARIABLE}={namespace}/{name}: there is no such ElasticJob."
        ) from error


async def fetch(env: Mapping[str, str]) -> ElasticJob:
    """`read` with a client of its own."""
    client = Client.from_config()
    try:
        return await read(client, env)
    finally:
        await client.close()


def job_spec(job: ElasticJob, limits: Limits, rules: tuple[Rule, ...] = ()) -> JobSpec:
    """What the master is to know of a job.

    The options of ``dlrover-run`` that are the master's to follow are found in the workers' command:
    ``--nnodes`` (its minimum, where no role has ``minReplicas``), ``--max-restarts`` (before
    ``restartCount``), ``--node-unit``, ``--auto-scale``, ``--network-check`` and ``--exclude-straggler``.
    """
    specs = job.spec.replica_specs
    roles = [role for role in nodes.ROLES if role in specs]
    if not roles:
        raise ConfigurationError(
            f"ElasticJob {job.name}: spec.replicaSpecs has no {', '.join(nodes.ROLES)}; it needs one."
        )
    total = len(nodes.slots(job))
    worker = specs.get("worker", specs[roles[0]])
    flags = _flags(worker.template)
    stragglers = "exclude-straggler" in flags
    return JobSpec(
        name=job.name,
        min_nodes=_fewest([specs[role] for role in roles], flags.get("nnodes", ""), total),
        max_nodes=total,
        managed_nodes=total,
        auto_scale=_auto_scale(job, flags),
        other_nodes=total - (specs["worker"].replicas if "worker" in specs else 0),
        node_unit=_number(flags.get("node-unit", ""), 1),
        max_restarts=_number(flags.get("max-restarts", ""), worker.restart_count),
        node_check=stragglers or "network-check" in flags,
        exclude_stragglers=stragglers,
        limits=limits,
        diagnosis_rules=rules,
        grows_memory=True,
    )


def brain_side(job: ElasticJob, given: BrainSide) -> BrainSide:
    """Where the master finds the Brain: the manifest's ``brainService`` and ``optimizeMode`` before its settings."""
    worker = job.spec.replica_specs.get("worker")
    asked = requests_of(worker.template) if worker is not None else {}
    return msgspec.structs.replace(
        given,
        node=Group(
            count=1,
            cpu=asked.get("cpu", 0.0),
            memory=int(asked.get("memory", 0)),
            accelerators=int(asked.get("accelerator", 0)),
        ),
        address=job.spec.brain_service or given.address,
        cluster=given.cluster or job.spec.optimize_mode == "cluster",
    )


def _auto_scale(job: ElasticJob, flags: Mapping[str, str]) -> bool:
    """Whether the number of workers is to be found; other roles would have to follow it."""
    specs = job.spec.replica_specs
    alone = not any(
        specs[role].replicas for role in specs if role in nodes.ROLES and role != "worker"
    )
    asked = "auto-scale" in flags or ("worker" in specs and specs["worker"].auto_scale)
    return asked and alone and job.spec.optimize_mode in ("single-job", "cluster")


def _flags(template: Mapping[str, Any]) -> dict[str, str]:
    """The options in a template's command, as ``network-check`` and its value, which may be empty."""
    found: dict[str, str] = {}
    words = list(_words(template))
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            found[name.replace("_", "-")] = value if has_value else following
    return found


def _number(text: str, default: int) -> int:
    """An option's value; one that is wrong or a shell's variable is for ``dlrover-run`` to judge."""
    return int(text) if text.isdecimal() else default


def _fewest(specs: Sequence[ReplicaSpec], nnodes: str, total: int) -> int:
    """The fewest nodes that the job may run with."""
    if all(spec.min_replicas is None for spec in specs):
        fewest, is_range, _ = nnodes.partition(":")
        return max(1, min(total, _number(fewest if is_range else "", total)))
    return max(1, sum(min(spec.min_replicas or spec.replicas, spec.replicas) for spec in specs))


def _words(template: Mapping[str, Any]) -> Iterator[str]:
    for container in ((template.get("spec") or {}).get("containers") or ())[:1]:
        for argument in [*(container.get("command") or ()), *(container.get("args") or ())]:
            yield from _split(str(argument))


def _split(text: str) -> list[str]:
    """The words of an argument, which may be a shell's whole script."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()
