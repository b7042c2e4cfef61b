"""The spec that a running job keeps: recorded in its status at its start, so that all of its pods are alike.

A changed manifest does not reach the pods of a running job: lost pods, and a lost master, are made again from
the record. The change applies when the job starts again after ``spec.suspend``. Only what is in `LIVE` and the
numbers of workers and servers follow the manifest at once. Of a manifest that is wrong elsewhere, `LIVE` alone does:
a job can always be suspended.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dlrover.errors import ConfigurationError
from dlrover.kubernetes import commands, names, validation
from dlrover.kubernetes.decisions import status_of
from dlrover.kubernetes.rules import canonical
from dlrover.kubernetes.types import ElasticJob, ElasticJobSpec
from dlrover.spec.roles import SERVER, WORKER

Manifest = Mapping[str, Any]
LIVE = (
    "suspend",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "cleanPodPolicy",
    "managedBy",
)
"""Fields of the spec that a running job follows."""
_LIVE_OF_ROLE = ("replicas", "minReplicas")
_MOST_SHOWN = 3


@dataclass(frozen=True)
class Running:
    """What a job runs by."""

    job: ElasticJob
    record: str
    """Its spec, as the status is to have it while the job runs."""
    fault: str = ""
    """What is wrong with its manifest, of which only `LIVE` has an effect then."""
    unapplied: str = ""
    """The changed fields that have no effect until the job starts again, in a sentence."""


def resolve(manifest: Manifest) -> Running:
    """What a job runs by: its manifest, or what was recorded when it started.

    Raises:
        ConfigurationError: the manifest is wrong, and nothing is recorded.
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
    return Running(job, _text(spec), unapplied=_unapplied(job, wanted))


def stopped(manifest: Manifest, fault: str) -> Running:
    """What removes the pods of a suspended job whose spec cannot be read: no pods are wanted."""
    spec = ElasticJobSpec(replica_specs={}, suspend=True)
    return Running(ElasticJob(dict(manifest["metadata"]), spec), "", fault=fault)


def _live(manifest: Manifest, recorded: dict[str, Any]) -> dict[str, Any]:
    """The recorded spec with those fields of `LIVE` that are right in a manifest that is not."""
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
    """The recorded spec; None if there is none that this release can read."""
    text = status_of(manifest).running_spec
    try:
        spec: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        validation.parse({**manifest, "spec": copy.deepcopy(spec)})
    except (msgspec.DecodeError, ConfigurationError, RecursionError):
        return None
    return spec


def _text(spec: Manifest) -> str:
    return msgspec.json.encode(spec, order="deterministic").decode()


def _followed(recorded: dict[str, Any], given: Manifest, wanted: ElasticJob) -> dict[str, Any]:
    """The recorded spec with what a running job follows of the ``given`` one."""
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
    """Whether a running job can have that many pods of a role."""
    if role != WORKER:
        return number > 0
    unit = commands.number(commands.options(replica.get("template") or {}).get("node-unit", ""), 1)
    return number > 0 and (number + others) % max(unit, 1) == 0


def _others(spec: Manifest) -> int:
    """The nodes whose number is fixed."""
    return sum(
        int(replica.get("replicas", 1))
        for role, replica in spec["replicaSpecs"].items()
        if canonical(role) not in (WORKER, SERVER, names.MASTER_ROLE)
    )


def _unapplied(job: ElasticJob, wanted: ElasticJob) -> str:
    found = list(_differences("spec", _plain(job), _plain(wanted)))
    if not found:
        return ""
    more = f" and {len(found) - _MOST_SHOWN} more fields" if len(found) > _MOST_SHOWN else ""
    return (
        f"{', '.join(found[:_MOST_SHOWN])}{more} changed: a running job keeps what it started with. The "
        "change applies when the job starts again: set spec.suspend to true, then to false."
    )


def _plain(job: ElasticJob) -> Any:
    """The spec with all defaults: one that a release adds is no change."""
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
