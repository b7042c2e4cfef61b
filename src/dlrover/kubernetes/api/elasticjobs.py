"""The only writer of ElasticJobs: the operator and the masters change a job and report on it through this module."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from dlrover.kubernetes.api.client import ELASTIC_JOBS, EVENTS, ApiError, Client
from dlrover.kubernetes.machine.decisions import JobNotice
from dlrover.kubernetes.resources import names, times
from dlrover.kubernetes.resources.types import ElasticJob, ElasticJobStatus, Manifest
from dlrover.spec.node import WORKER

logger = logging.getLogger(__name__)


async def write_status(client: Client, job: Manifest, status: ElasticJobStatus) -> Manifest | None:
    """Write the operator's part of a job's status; return the stored job, None if unchanged or gone."""
    metadata = job["metadata"]
    uid = metadata.get("uid", "")
    patch = status_patch(job.get("status"), msgspec.structs.replace(status, job_uid=uid))
    if patch is None:
        return None
    if (job.get("status") or {}).get("jobUid") not in (None, uid):
        patch["training"] = None  # belongs to an earlier job
    patch["jobUid"] = uid  # always, because another job may have the name by now
    try:
        return await client.patch(
            ELASTIC_JOBS, metadata["namespace"], metadata["name"], {"status": patch}, "status"
        )
    except ApiError as error:
        if error.status == 404:
            return None
        raise


def status_patch(old: Mapping[str, Any] | None, status: ElasticJobStatus) -> dict[str, Any] | None:
    """Return the merge patch from ``old`` to ``status``, without ``training``; None if they are equal."""
    wanted = _set(msgspec.to_builtins(status))
    wanted.pop("training", None)
    known = {key: value for key, value in (old or {}).items() if key != "training"}
    return _difference(known, wanted) or None


def _set(value: Any) -> Any:
    """Return a value without its empty fields; unset fields are not written."""
    if isinstance(value, dict):
        inner = {key: _set(child) for key, child in value.items()}
        return {key: child for key, child in inner.items() if child not in ("", [], {})}
    return [_set(child) for child in value] if isinstance(value, list) else value


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = _difference(before, value)
            patch.update({key: inner} if inner else {})
        elif value != before:
            patch[key] = value
    return patch


async def write_training(client: Client, job: ElasticJob, training: Mapping[str, Any]) -> None:
    """Write the training's progress, the master's part of a job's status."""
    patch = {"status": {"training": training}}
    await client.amend(ELASTIC_JOBS, job.namespace, job.name, job.uid, patch, "status")


async def write_replicas(
    client: Client, job: ElasticJob, role: str, number: int, seen: Manifest
) -> None:
    """Write the number of a role's pods into a job's spec, unless it has changed since ``seen``."""
    spelled = seen["spec"].get("replicaSpecs") or {}
    written = next((name for name in spelled if name.lower() == role), role)  # it may be PS

    def number_of(manifest: Manifest) -> object:
        roles = manifest["spec"].get("replicaSpecs") or {}
        return (roles.get(written) or {}).get("replicas")

    patch: Manifest = {"spec": {"replicaSpecs": {written: {"replicas": number}}}}
    subresource = ""
    if role == WORKER:
        patch, subresource = {"spec": {"replicas": number}}, "scale"

    def unchanged(now: Manifest) -> bool:
        return number_of(now) == number_of(seen)

    await client.amend(
        ELASTIC_JOBS, job.namespace, job.name, job.uid, patch, subresource, unchanged
    )


async def record_event(
    client: Client,
    metadata: Mapping[str, Any],
    event: JobNotice,
    component: str = "dlrover-operator",
) -> None:
    """Write an Event about the job with this metadata, or count a repeated one; only log a failure."""
    namespace = metadata["namespace"]
    logger.info("Job %s/%s: %s", namespace, metadata["name"], event.message)
    about = f"{metadata.get('uid')} {event.reason} {event.message}"
    name = f"{metadata['name']}.{hashlib.sha256(about.encode()).hexdigest()[:16]}"
    now = times.written(client.server_time())
    made = {
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": "ElasticJob",
            "namespace": namespace,
            "name": metadata["name"],
            "uid": metadata.get("uid", ""),
            "resourceVersion": metadata.get("resourceVersion", ""),
        },
        "reason": event.reason,
        "message": event.message,
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": component},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    try:
        if not await client.ensure(EVENTS, made):
            before = await client.get(EVENTS, namespace, name)
            patch = {"count": int(before.get("count") or 1) + 1, "lastTimestamp": now}
            await client.patch(EVENTS, namespace, name, patch)
    except ApiError as error:
        logger.warning("An event of job %s is not written: %s", metadata["name"], error)
