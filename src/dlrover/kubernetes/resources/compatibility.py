"""ElasticJob fields that are accepted for compatibility with the original but have no effect here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.rules import canonical

_OF_JOB = {
    "distributionStrategy": "The roles of replicaSpecs say which pods run.",
    "resourceLimits": "A ResourceQuota limits a namespace.",
    "enableElasticScheduling": "A job is always elastic, between minReplicas and replicas.",
    "enableDynamicSharding": "The program decides whether its data are sharded.",
    "relaunchStrategy": "Lost nodes are always replaced within the job's restart limits.",
    "criticalNodes": "A job continues while it has its minimum of nodes.",
}
_OF_ROLE = {
    "restartPolicy": "The master replaces pods that ended.",
    "autoScale": "Only the number of workers is scaled automatically.",
    "restartTimeout": "The setting join_timeout bounds the wait for nodes.",
    "BatchScheduler": "spec.schedulerName of the template names a scheduler.",
}
_OF_MASTER = {
    "replicas": (1, "A job has one master."),
    "minReplicas": (1, "A job has one master."),
    "restartCount": (3, "The operator always restarts the master."),
}
"""Fields of the master's role: their defaults, and what happens regardless of their values."""


def notes(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field of a spec that is set but has no effect."""
    for field, instead in _OF_JOB.items():
        if spec.get(field) not in (
            None,
            "",
            False,
            {},
            "AllreduceStrategy",
        ):  # the last is the default
            yield _sentence(field, instead)
    for role, replica in spec.get("replicaSpecs", {}).items():
        for field, instead in _OF_ROLE.items():
            if replica.get(field) and (canonical(role), field) != ("worker", "autoScale"):
                yield _sentence(f"replicaSpecs.{role}.{field}", instead)
    yield from _idle(spec)


def _idle(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field that has an effect elsewhere but not where it is set."""
    roles = spec.get("replicaSpecs", {})
    has_worker = "worker" in map(canonical, roles)
    for role, replica in roles.items():
        path = f"replicaSpecs.{role}"
        if canonical(role) == names.MASTER_ROLE:
            for field, (default, instead) in _OF_MASTER.items():
                if replica.get(field, default) not in (default, None):
                    yield _sentence(f"{path}.{field}", instead)
        elif has_worker and canonical(role) != "worker" and replica.get("restartCount", 3) != 3:
            yield _sentence(
                f"{path}.restartCount", "The restartCount of role worker applies to the job."
            )
    gang = spec.get("gang") or {}
    if gang.get("queue") and gang.get("by") not in ("volcano", "kueue"):
        yield _sentence("gang.queue", "Only gang.by volcano and kueue use it.")


def _sentence(path: str, instead: str) -> str:
    return f"spec.{path} is accepted for compatibility and has no effect. {instead}"
