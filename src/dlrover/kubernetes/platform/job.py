"""A job as seen by its master: the ElasticJob in the cluster and the `JobSpec` derived from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.kubernetes.machine import nodes, record
from dlrover.kubernetes.machine.decisions import status_of
from dlrover.kubernetes.platform.inventory import requests_of
from dlrover.kubernetes.resources import commands, names
from dlrover.kubernetes.resources.types import ElasticJob
from dlrover.master.compose import Request
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import BrainSide
from dlrover.spec.node import SERVER
from dlrover.spec.plan import NodeGroup

if TYPE_CHECKING:
    from dlrover.kubernetes.api.client import Client

logger = logging.getLogger(__name__)

RETRY = 0.5
"""Seconds between attempts to reach the API server."""
REPORT_TIMEOUT = 5.0
"""Seconds allowed for a report before the master begins."""
SHUTDOWN = 30
"""Seconds between SIGTERM and SIGKILL for workers if their command names no other time, as for ``dlrover-run``."""
VARIABLE, UID_VARIABLE = "DLROVER_KUBERNETES_JOB", "DLROVER_KUBERNETES_JOB_UID"


async def read(client: Client, env: Mapping[str, str]) -> ElasticJob:
    """Return the job that the environment names, with its running spec (see `record`).

    Raises:
        ConfigurationError: there is none, it is invalid, or another job now has its name.
    """
    from dlrover.kubernetes.api.client import ELASTIC_JOBS  # noqa: PLC0415 - needs the extra; `request` does not

    namespace, _, name = env.get(VARIABLE, "").partition("/")
    uid = env.get(UID_VARIABLE, "")
    if not namespace or not name:
        raise ConfigurationError(
            f"{VARIABLE}={env.get(VARIABLE, '')!r}: must be the ElasticJob of this master, as NAMESPACE/NAME."
        )
    manifest = await client.find(ELASTIC_JOBS, namespace, name)
    if manifest is None:
        raise ConfigurationError(f"{VARIABLE}={namespace}/{name}: there is no such ElasticJob.")
    if uid not in ("", manifest["metadata"]["uid"]):
        raise ConfigurationError(
            f"{UID_VARIABLE}={uid}: the master's ElasticJob was deleted; another one now has its name, "
            f"{namespace}/{name}."
        )
    return msgspec.structs.replace(record.resolve(manifest).job, status=status_of(manifest))


async def awaited(
    client: Client, env: Mapping[str, str], stopping: asyncio.Event
) -> ElasticJob | None:
    """Call `read` until the API server answers; return None if ``stopping`` is set before."""
    from dlrover.kubernetes.api.client import Patience  # noqa: PLC0415 - needs the extra

    patience = Patience()
    while not stopping.is_set():
        try:
            return await read(client, env)
        except InfrastructureError as error:
            if not patience.outwaits(error):
                raise
            logger.warning("The job cannot be read yet: %s", error)
        await asyncio.sleep(RETRY)
    return None


async def fetch(env: Mapping[str, str]) -> ElasticJob:
    """Call `awaited` with a client of its own: a pod that starts without an API server waits for it."""
    from dlrover.kubernetes.api.client import Client  # noqa: PLC0415 - needs the extra

    async with Client.from_config() as client:
        found = await awaited(client, env, asyncio.Event())
    assert found is not None
    return found


def report_wait(job: ElasticJob, reason: str) -> None:
    """Write into a job's status what its master waits for before it begins; its first report removes it."""
    logger.warning("%s", reason)
    try:
        asyncio.run(asyncio.wait_for(_report_wait(job, reason), REPORT_TIMEOUT))
    except (InfrastructureError, asyncio.TimeoutError) as error:
        logger.info("It is not reported: %s", str(error) or "the API server does not answer")


async def _report_wait(job: ElasticJob, reason: str) -> None:
    from dlrover.kubernetes.api import elasticjobs  # noqa: PLC0415 - needs the extra
    from dlrover.kubernetes.api.client import Client  # noqa: PLC0415 - needs the extra

    async with Client.from_config() as client:
        await elasticjobs.write_training(client, job, {"waits": reason})


def request(job: ElasticJob) -> Request:
    """Return the job as its ElasticJob requests it."""
    return Request(job=_job_spec(job), platform="kubernetes", brain=_brain_side(job))


def _job_spec(job: ElasticJob) -> JobSpec:
    """Return the job's numbers.

    The master takes these ``dlrover-run`` options from the workers' command: ``--nnodes`` (its minimum, if
    no role has ``minReplicas``; it excludes servers), ``--max-restarts`` (overrides ``restartCount``),
    ``--shutdown-timeout``, ``--node-unit``, ``--auto-scale``, ``--network-check`` and what is like it,
    ``--exclude-straggler``, ``--server-failover``, ``--survive`` and ``--chief``.
    """
    specs = job.spec.replica_specs
    roles = [role for role in nodes.ROLES if role in specs]
    if not roles:
        raise ConfigurationError(
            f"ElasticJob {job.name}: spec.replicaSpecs has no {', '.join(nodes.ROLES)}; it needs one."
        )
    servers = specs[SERVER].replicas if SERVER in specs else 0
    total = nodes.count(job) - servers
    worker = specs.get("worker", specs[roles[0]])
    flags = commands.options(worker.template)
    chief = "chief" in flags
    if chief and ("chief" not in specs or specs["chief"].replicas != 1):
        raise ConfigurationError(
            f"ElasticJob {job.name}: --chief in the workers' command needs spec.replicaSpecs.chief with 1 replica."
        )
    least = commands.fewest_nodes(job) - commands.fewest_servers(job)
    unit = commands.number(flags.get("node-unit", ""), 1)
    if unit and total - total % unit < least:
        raise ConfigurationError(
            f"ElasticJob {job.name}: --node-unit {unit} in the workers' command needs a multiple of {unit} nodes, and the job "
            f"has at least {least} and at most {total}: change replicas or minReplicas."
        )
    return JobSpec(
        name=job.name,
        min_nodes=least,
        max_nodes=total,
        managed_nodes=total,
        auto_scale=_auto_scale(job, flags),
        other_nodes=total - (specs["worker"].replicas if "worker" in specs else 0),
        servers=servers,
        min_servers=commands.fewest_servers(job),
        max_servers=servers,
        server_failover="instance"
        if chief or flags.get("server-failover") == "instance"
        else "job",
        chief=chief,
        instances=(job.metadata.get("annotations") or {}).get(names.INSTANCES, ""),
        spares=0 if chief else job.spec.spares.replicas,
        auto_spares=job.spec.spares.auto and not chief,
        earlier_restarts=job.status.training.restarts,
        node_unit=max(1, unit),
        max_restarts=commands.number(flags.get("max-restarts", ""), worker.restart_count),
        node_check=not flags.keys().isdisjoint(("network-check", "comm-perf-test"))
        or flags.get("precheck") in ("1", "2"),
        exclude_stragglers="exclude-straggler" in flags,
        shutdown_timeout=float(commands.number(flags.get("shutdown-timeout", ""), SHUTDOWN)),
        survive="survive" in flags and not chief and not servers,
    )


def _brain_side(job: ElasticJob) -> BrainSide:
    """Return what the ElasticJob says: ``brainService`` is the address, ``optimizeMode`` sets ``cluster``."""
    worker = job.spec.replica_specs.get("worker")
    try:
        asked = requests_of(worker.template) if worker is not None else {}
    except ValueError as error:
        raise ConfigurationError(
            f"spec.replicaSpecs.worker.template: {error} of a container's resources, as 2, 500m or 3Gi."
        ) from error
    return BrainSide(
        node=NodeGroup(
            count=1,
            cpu=asked.get("cpu", 0.0),
            memory=int(asked.get("memory", 0)),
            accelerators=int(asked.get("accelerator", 0)),
        ),
        address=job.spec.brain_service,
        cluster=job.spec.optimize_mode == "cluster",
        origin=job.uid,
    )


def _auto_scale(job: ElasticJob, flags: Mapping[str, str]) -> bool:
    """Return whether to auto-scale the workers; not with a chief or evaluator, which would have to follow."""
    specs = job.spec.replica_specs
    alone = not any(
        specs[role].replicas for role in specs if role in nodes.ROLES and role not in nodes.SCALED
    )
    asked = "auto-scale" in flags or ("worker" in specs and specs["worker"].auto_scale)
    return asked and alone and job.spec.optimize_mode in ("single-job", "cluster")
