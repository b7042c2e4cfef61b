"""The spec that a running job keeps: its status records it at the start, so that all its pods are alike.

A changed manifest does not affect the pods of a running job: replacements for lost pods and a lost master
are made from the record. The change applies when the job starts again after ``spec.suspend``. Only the
`LIVE` fields and the numbers of workers and servers follow the manifest at once. If the manifest is invalid
elsewhere, only the `LIVE` fields still follow, so that a job can always be suspended.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dlrover._util import decoding
from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine.decisions import status_of
from dlrover.kubernetes.resources import commands, names, validation
from dlrover.kubernetes.resources.rules import canonical
from dlrover.kubernetes.resources.types import ElasticJob, ElasticJobSpec, Manifest
from dlrover.spec.node import SERVER, WORKER

LIVE = (
    "suspend",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "cleanPodPolicy",
    "managedBy",
)
"""Spec fields that take effect on a running job."""
_LIVE_OF_ROLE = ("replicas", "minReplicas")
_MOST_SHOWN = 3


@dataclass(frozen=True)
class Running:
    """The specification of a running job."""

    job: ElasticJob
    record: str
    """Its spec as the status records it while the job runs."""
    fault: str = ""
    """What is wrong with its manifest; if set, only `LIVE` takes effect."""
    unapplied: str = ""
    """The changed fields that take effect only at the next start, in a sentence."""


def resolve(manifest: Manifest) -> Running:
    """Return what a job runs by: its manifest, or the record from its start.

    Raises:
        ConfigurationError: the manifest is invalid and there is no record.
    """
    recorded = _recorded(manifest)
    try:
        wanted = validation.parse(manifest)
    except ConfigurationError as error:
        if recorded is None:
            raise
        kept = _live(manifest, recorded)
        job = validation.parse({**manifest, "spec": kept})
        return Running(job, _text(kept), fault=str(error))
    if recorded is None:
        return Running(wanted, _text(manifest["spec"]))
    spec = _followed(recorded, manifest["spec"], wanted)
    job = validation.parse({**manifest, "spec": spec})
    ended = bool(status_of(manifest).completion_time)
    return Running(job, _text(spec), unapplied=_unapplied(job, wanted, ended=ended))


def stopped(manifest: Manifest, fault: str) -> Running:
    """Return a spec without pods, to remove those of a suspended job with an unreadable spec."""
    spec = ElasticJobSpec(replica_specs={}, suspend=True)
    return Running(ElasticJob(dict(manifest["metadata"]), spec), "", fault=fault)


def _live(manifest: Manifest, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded spec with the valid `LIVE` fields of an otherwise invalid manifest."""
    given = manifest.get("spec")
    if not isinstance(given, Mapping):
        return recorded
    spec = dict(recorded)
    for key in LIVE:
        changed = {name: value for name, value in spec.items() if name != key}
        changed |= {key: given[key]} if key in given else {}
        if not validation.faults({**manifest, "spec": changed}):
            spec = changed
    return spec


def _recorded(manifest: Manifest) -> dict[str, Any] | None:
    """Return the recorded spec; None if there is none that this release can read."""
    text = status_of(manifest).running_spec
    try:
        spec: dict[str, Any] = decoding.json(text, dict[str, Any])
        validation.parse({**manifest, "spec": copy.deepcopy(spec)})
    except (msgspec.DecodeError, ConfigurationError, RecursionError):
        return None
    return spec


def _text(spec: Manifest) -> str:
    return msgspec.json.encode(spec, order="deterministic").decode()


def _followed(recorded: dict[str, Any], given: Manifest, wanted: ElasticJob) -> dict[str, Any]:
    """Return the recorded spec with the parts of the ``given`` one that a running job follows."""
    spec = {key: value for key, value in copy.deepcopy(recorded).items() if key not in LIVE}
    spec |= {key: given[key] for key in LIVE if key in given}
    now = {canonical(role): replica for role, replica in given["replicaSpecs"].items()}
    others = _others(recorded)
    for role, replica in spec["replicaSpecs"].items():
        changed = now.get(canonical(role))
        if changed is None or canonical(role) not in (WORKER, SERVER):
            continue
        number = wanted.spec.replica_specs[canonical(role)].replicas
        if number == replica.get("replicas", 1) or _takes(canonical(role), replica, number, others):
            for field in _LIVE_OF_ROLE:
                replica.pop(field, None)
            replica |= {field: changed[field] for field in _LIVE_OF_ROLE if field in changed}
    return spec


def _takes(role: str, replica: Manifest, number: int, others: int) -> bool:
    """Return whether a running job can have that number of pods of a role."""
    if role != WORKER:
        return number > 0
    unit = commands.number(commands.options(replica.get("template") or {}).get("node-unit", ""), 1)
    return number > 0 and (number + others) % max(unit, 1) == 0


def _others(spec: Manifest) -> int:
    """Return the number of nodes in roles of fixed size."""
    return sum(
        int(replica.get("replicas", 1))
        for role, replica in spec["replicaSpecs"].items()
        if canonical(role) not in (WORKER, SERVER, names.MASTER_ROLE)
    )


def _unapplied(job: ElasticJob, wanted: ElasticJob, *, ended: bool) -> str:
    found = list(_differences("spec", _plain(job), _plain(wanted)))
    if not found:
        return ""
    more = f" and {len(found) - _MOST_SHOWN} more fields" if len(found) > _MOST_SHOWN else ""
    when = "a running job keeps the spec that it started with. To apply the change, set "
    when += "spec.suspend to true, then to false."
    if ended:
        when = "the job has ended. To run with the change, delete the job and create it again."
    return f"{', '.join(found[:_MOST_SHOWN])}{more} changed: {when}"


def _plain(job: ElasticJob) -> Any:
    """Return the spec with all defaults, so that a default added by a new release is no change."""
    return msgspec.to_builtins(job.spec)


def _differences(path: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(f"{path}.{key}", old.get(key), new.get(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{path}[{index}]", before, after)
    elif old != new:
        yield path
