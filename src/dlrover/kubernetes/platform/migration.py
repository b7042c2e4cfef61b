"""Pods that a ScalePlan replaces: each trains until its successor, possibly resized, replaces it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine import nodes
from dlrover.kubernetes.resources import quantities as resources
from dlrover.kubernetes.resources.types import QUANTITY, ElasticJob, ScalePlanSpec
from dlrover.platform.base import AskMigrate, PlacedNode

Placed = Mapping[str, PlacedNode]
"""A job's nodes by pod name."""

MOST_NAMED = 5
"""Maximum number of pods named in one sentence."""
_EXAMPLES = {"cpu": "2 or 500m", "memory": "3Gi"}
"""The pod resources that a plan can change, with example quantities."""
_ROLES = " or ".join(nodes.SCALED)


class Factors(NamedTuple):
    """CPU and memory multipliers relative to a pod's template; None keeps the current value."""

    cpu: float | None = None
    memory: float | None = None


# ---- what a plan requests


def moves(
    spec: ScalePlanSpec, job: ElasticJob, placed: Placed, numbers: Mapping[str, int]
) -> dict[str, Factors]:
    """Return the pods that a plan replaces, with the sizes of their replacements.

    These are the pods that the plan names, and those of its roles that differ from the plan's size and
    remain when there are ``numbers`` of pods by role. ``job`` supplies the pod templates.

    Raises:
        ConfigurationError: a resource is invalid.
    """
    found: dict[str, Factors] = {}
    for role in nodes.SCALED:
        factors = _size(spec, job, role)
        for pod, node in placed.items():
            its_role, index = nodes.place(job, node.node_rank)
            stays = node.standing != "gone" and index < numbers.get(role, 0)
            if its_role == role and stays and not _has(node, factors):
                found[pod] = factors
    for index, planned in enumerate(spec.migrate_pods):
        if planned.name in placed:
            role, _ = nodes.place(job, placed[planned.name].node_rank)
            field = f"spec.migratePods[{index}].resource"
            own = _factors(field, planned.resource, role, job)
            found[planned.name] = own if planned.resource else _size(spec, job, role)
    return found


def size_of_new(spec: ScalePlanSpec, job: ElasticJob, role: str) -> tuple[float, float]:
    """Return the CPU and memory multipliers, relative to the template, of pods that a plan adds to a role.

    Raises:
        ConfigurationError: a resource is invalid.
    """
    cpu, memory = _size(spec, job, role)
    return (1.0 if cpu is None else cpu, 1.0 if memory is None else memory)


def check(spec: ScalePlanSpec, job: ElasticJob, placed: Placed, numbers: Mapping[str, int]) -> None:
    """Check that a plan's pods can be replaced when there are ``numbers`` of pods by role.

    Raises:
        ConfigurationError: a pod cannot be replaced.
    """
    for name, replica in spec.replica_resource_specs.items():
        if replica.resource and name.lower() not in nodes.SCALED:
            raise ConfigurationError(
                f"spec.replicaResourceSpecs.{name}.resource is {_amounts(replica.resource)}: accepted are "
                f"resources of {_ROLES}, whose pods can be replaced."
            )
    faults = {pod: _fault(node, job, numbers) for pod, node in placed.items()}
    seen: set[str] = set()
    for index, planned in enumerate(spec.migrate_pods):
        pod = planned.name
        fault = "named twice" if pod in seen else faults.get(pod, "no pod of the job")
        seen.add(pod)
        if fault:
            able = listed([pod for pod in faults if not faults[pod]])
            raise ConfigurationError(
                f"spec.migratePods[{index}].name is {f'{pod}, {fault}' if pod else 'empty'}: accepted is a "
                f"pod of {_ROLES} that trains, now {able or 'none'}."
            )


def _fault(node: PlacedNode, job: ElasticJob, numbers: Mapping[str, int]) -> str:
    """Return why a node's pod cannot be replaced, as a clause; empty if it can."""
    role, index = nodes.place(job, node.node_rank)
    if role not in nodes.SCALED:
        return f"a pod of {role}"
    if node.standing == "leaves":
        return "which leaves already"
    if node.standing != "trains":
        return "which does not train"
    return "" if index < numbers.get(role, 0) else "which leaves by this plan"


def _size(spec: ScalePlanSpec, job: ElasticJob, role: str) -> Factors:
    """Return the size that a plan gives all pods of a role."""
    for name, replica in spec.replica_resource_specs.items():
        if name.lower() == role:
            field = f"spec.replicaResourceSpecs.{name}.resource"
            return _factors(field, replica.resource, role, job)
    return Factors()


def _factors(field: str, resource: Mapping[str, int | str], role: str, job: ElasticJob) -> Factors:
    """Return the size that a resource means for pods of a role."""
    asked = nodes.requests(job, role) if resource else {}
    found: dict[str, float] = {}
    for kind, amount in resource.items():
        what = f"{field}.{kind} is {amount}"
        if kind not in _EXAMPLES:
            raise ConfigurationError(f"{what}: accepted are {' and '.join(_EXAMPLES)}.")
        wanted, template = _quantity(amount), _quantity(asked.get(kind, 0))
        if not wanted:
            raise ConfigurationError(
                f"{what}: accepted is a quantity above 0, as {_EXAMPLES[kind]}."
            )
        if not template:
            raise ConfigurationError(
                f"{what}: accepted is what the template of {role} requests for its main container, and that is "
                f"no {kind}."
            )
        found[kind] = wanted / template
    return Factors(**found)


def _quantity(amount: Any) -> float:
    """Return a quantity as a number; 0 if it is invalid."""
    try:
        known = re.fullmatch(QUANTITY, str(amount)) is not None
        return float(resources.quantity(amount)) if known else 0.0
    except ValueError:
        return 0.0


def _has(node: PlacedNode, factors: Factors) -> bool:
    """Return whether a node has a size."""
    pairs = ((node.cpu_factor, factors.cpu), (node.memory_factor, factors.memory))
    return all(wanted is None or math.isclose(has, wanted) for has, wanted in pairs)


# ---- carrying it out


class PodMigration:
    """The pod replacements of one plan; their state follows from the job's nodes alone."""

    def __init__(
        self,
        wanted: Mapping[str, Factors],
        placed: Callable[[], Placed],
        ask: AskMigrate,
        why: str,
    ) -> None:
        """Prepare the replacements; the first `advance` requests them.

        Args:
            wanted: The result of `moves`.
            placed: Returns the job's nodes.
            ask: Requests one replacement.
            why: The reason, as a clause.
        """
        self.missing: list[str] = []
        """Pods not yet replaced at the last `advance`."""
        self.failed = ""
        """Why a replacement failed, as a sentence; empty while none has."""
        self.refused = ""
        """Why the job refuses replacements now, as a sentence; empty if it does not."""
        self._wanted, self._placed, self._ask, self._why = wanted, placed, ask, why
        self._asked: set[str] = set()

    @property
    def pods(self) -> list[str]:
        """The pods that the plan replaces."""
        return [*self._wanted]

    def advance(self) -> None:
        """Request replacements for training pods not requested yet, and update the state of the others."""
        placed = self._placed()
        trains = {
            node.node_rank: node for node in sorted(placed.values()) if node.standing == "trains"
        }
        self.missing = [
            pod
            for pod in self._wanted
            if not self._is_replaced(pod, placed[pod], trains.get(placed[pod].node_rank))
        ]
        self.refused = ""
        for pod in self.missing:
            if placed[pod].standing == "trains":
                self._request(pod, placed)

    def _is_replaced(self, pod: str, node: PlacedNode, other: PlacedNode | None) -> bool:
        """Return whether a pod is gone and ``other`` trains in its place."""
        if node.standing != "gone" or other is None:
            return False
        if pod not in self._asked and not _has(other, self._wanted[pod]):
            self.failed = f"{pod} was lost before another pod could replace it: {node.why}."
        return True

    def _request(self, pod: str, placed: Placed) -> None:
        if pod in self._asked:
            self.failed = _stays(pod, placed)
            return
        node, factors = placed[pod], self._wanted[pod]
        cpu = node.cpu_factor if factors.cpu is None else factors.cpu
        memory = node.memory_factor if factors.memory is None else factors.memory
        refused = self._ask(pod, cpu, memory, self._why)
        if not refused:
            self._asked.add(pod)
        self.refused = refused or self.refused


def _stays(pod: str, placed: Placed) -> str:
    """Return why a pod's replacement failed, as a sentence."""
    stays = placed[pod]
    last, other = max(
        (node, name) for name, node in placed.items() if node.node_rank == stays.node_rank
    )
    if other == pod:
        return f"{pod} stays: no other pod replaces it."
    return f"{pod} stays: {other} does not replace it: {last.why or 'the reason is unknown'}."


# ---- in words


def asked(spec: ScalePlanSpec, pods: Sequence[str]) -> list[str]:
    """Return the effects of a plan that replaces ``pods``, in sentences."""
    if pods:
        one = len(pods) == 1
        rest = "another pod replaces it" if one else "other pods replace them"
        return [f"{listed(pods)} train{'s' * one} on until {rest}."]
    roles = [role for role, replica in spec.replica_resource_specs.items() if replica.resource]
    return [f"The pods of {role} already have that size." for role in roles]


def done(spec: ScalePlanSpec) -> list[str]:
    """Return what a plan has done, in sentences."""
    sentences = [
        f"The pods of {role} have {_amounts(replica.resource)}."
        for role, replica in spec.replica_resource_specs.items()
        if replica.resource
    ]
    named = [planned.name for planned in spec.migrate_pods]
    if not named:
        return sentences
    rest = "Another pod has replaced" if len(named) == 1 else "Other pods have replaced"
    return [*sentences, f"{rest} {listed(named)}."]


def late(has: str, missing: Sequence[str], waits: str, seconds: float) -> str:
    """Return what a timed-out plan lacks: replacements of ``missing`` pods, else the number it ``has``."""
    because = f"{waits.rstrip('.') or 'the reason is unknown'}."
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return f"{listed(missing)} {verb} not replaced after {seconds:.0f} s: {because}"
    lacks, stay = (f"does not have {has}", "they") if has else ("is incomplete", "its nodes")
    return f"The job {lacks} after {seconds:.0f} s; {stay} stay requested: {because}"


def _amounts(resource: Mapping[str, int | str]) -> str:
    """Return resources in words: ``cpu 4 and memory 16Gi``."""
    return " and ".join(f"{kind} {amount}" for kind, amount in resource.items())


def listed(pods: Sequence[str]) -> str:
    """Return a list of names in words, limited to the first few."""
    if len(pods) > MOST_NAMED:
        return f"{', '.join(pods[:MOST_NAMED])} and {len(pods) - MOST_NAMED} more"
    return " and ".join(filter(None, (", ".join(pods[:-1]), *pods[-1:])))
