"""What an ElasticJob may say for compatibility with the original, and means nothing here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OF_JOB = {
    "distributionStrategy": "The roles of replicaSpecs say which pods run.",
    "resourceLimits": "A ResourceQuota limits a namespace.",
    "enableElasticScheduling": "A job is always elastic, between minReplicas and replicas.",
    "enableDynamicSharding": "The program decides whether its data are sharded.",
    "relaunchStrategy": "A lost node is always replaced within the job's budgets of restarts.",
    "criticalNodes": "A job goes on while it has its minimum of nodes.",
}
_OF_ROLE = {
    "restartPolicy": "The master replaces pods that ended.",
    "autoScale": "Only the number of workers is found by itself.",
    "restartTimeout": "The setting join_timeout bounds the wait for nodes.",
    "BatchScheduler": "spec.schedulerName of the template names a scheduler.",
}
_MEANT = {
    "distributionStrategy": ("AllreduceStrategy",),
}
"""Values that say what is done anyway, or that have an effect."""


def notes(spec: Mapping[str, Any]) -> list[str]:
    """A sentence for each field of a spec that is set and has no effect."""
    return list(_notes(spec))


def _notes(spec: Mapping[str, Any]) -> Iterator[str]:
    for field, instead in _OF_JOB.items():
        if spec.get(field) and spec[field] not in _MEANT.get(field, ()):
            yield f"spec.{field} is accepted for compatibility and has no effect. {instead}"
    for role, replica in spec.get("replicaSpecs", {}).items():
        for field, instead in _OF_ROLE.items():
            if replica.get(field) and (role, field) != ("worker", "autoScale"):
                path = f"spec.replicaSpecs.{role}.{field}"
                yield f"{path} is accepted for compatibility and has no effect. {instead}"
