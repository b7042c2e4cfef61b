"""What a manifest says and nothing here does is told; what it says of the master's priority is done."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover.kubernetes.machine import objects, scaleplans
from dlrover.kubernetes.resources import compatibility, validation
from tests.kubernetes.manifests import job

SILENT: list[dict[str, Any]] = [
    {"dlrover-master": {"replicas": 1, "restartCount": 3, "priority": "high"}},
    {"ps": {"restartCount": 3, "minReplicas": 1}},
    {"worker": {"restartCount": 7, "minReplicas": 1}},
    {"Worker": {"autoScale": True}},
]
TOLD: list[tuple[dict[str, Any], str]] = [
    ({"dlrover-master": {"replicas": 2}}, "dlrover-master.replicas"),
    ({"dlrover-master": {"restartCount": 5}}, "dlrover-master.restartCount"),
    ({"worker": {}, "ps": {"restartCount": 5}}, "ps.restartCount"),
    ({"Worker": {}, "PS": {"restartCount": 5}}, "PS.restartCount"),
]


@pytest.mark.parametrize("roles", SILENT)
def test_what_has_an_effect_is_not_told(roles: dict[str, Any]) -> None:
    assert list(compatibility.notes({"replicaSpecs": roles})) == []


@pytest.mark.parametrize(("roles", "path"), TOLD)
def test_what_counts_for_another_role_only_is_told(roles: dict[str, Any], path: str) -> None:
    (note,) = compatibility.notes({"replicaSpecs": roles})
    assert note.startswith(f"spec.replicaSpecs.{path} is accepted for compatibility and has no ")


@pytest.mark.parametrize(
    ("by", "told"), [("kueue", 0), ("volcano", 0), ("koordinator", 1), ("", 1)]
)
def test_a_queue_is_for_those_that_have_queues(by: str, told: int) -> None:
    assert len(list(compatibility.notes({"gang": {"by": by, "queue": "research"}}))) == told


@pytest.mark.parametrize(
    ("priority", "given"), [("high", "high"), ("low", "low"), ("0.5", "high"), ("0.0", "low")]
)
def test_the_master_has_the_priority_of_its_role(priority: str, given: str) -> None:
    manifest = job()
    manifest["spec"]["replicaSpecs"]["dlrover-master"] = {"priority": priority}
    pod = objects.master_pod(validation.parse(manifest), "dlrover:1")
    assert pod["spec"]["priorityClassName"] == given


def test_the_masters_template_says_its_priority_before_its_role_does() -> None:
    manifest = job()
    template = {"spec": {"priorityClassName": "own"}}
    role = {"priority": "high", "template": template}
    manifest["spec"]["replicaSpecs"]["dlrover-master"] = role
    pod = objects.master_pod(validation.parse(manifest), "dlrover:1")
    assert pod["spec"]["priorityClassName"] == "own"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"manualScaling": True}, "spec.manualScaling"),
        ({"createPods": [{"rankIndex": 3}]}, "spec.createPods"),
        ({"removePods": [{"id": 3}]}, "spec.removePods"),
        ({"createPods": [{"service": "here"}]}, "spec.createPods"),
    ],
)
def test_what_a_plan_names_beside_numbers_is_told(spec: dict[str, Any], field: str) -> None:
    (note,) = scaleplans.notes(spec)
    assert note.startswith(field)


def test_a_plan_of_numbers_has_an_effect() -> None:
    assert (
        list(scaleplans.notes({"createPods": [{"type": "worker"}], "manualScaling": False})) == []
    )
