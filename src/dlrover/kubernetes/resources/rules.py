"""Rules for an ElasticJob that a schema cannot express, each defined once for the API server and Python.

The API server receives a rule as CEL where it can check it; servers before 1.25 drop CEL. Python checks all
rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.types import Role

Spec = Mapping[str, Any]
ROLES = tuple(get_args(Role))
_RECOGNIZED = "[" + ", ".join(f"'{role}'" for role in ROLES) + "]"


@dataclass(frozen=True)
class FieldRule:
    """A rule for an object at ``path`` below the spec; ``*`` stands for every key."""

    path: tuple[str, ...]
    cel: str
    """The rule in CEL, about ``self``; in `TEMPLATE_RULES`, about ``replica``."""
    says: str
    """What is accepted."""
    holds: Callable[[Any], bool]
    at: str = ""
    """The field below ``path`` that a message names; empty for the object itself."""
    shown: Callable[[Any], str] | None = None
    """Formats the value for a message; None shows the field's value."""


def canonical(role: str) -> str:
    """Return a role in lower case; the original's first manifests have ``PS`` and ``Worker``."""
    return role.lower()


def _unique_roles(specs: Spec) -> bool:
    return len({canonical(role) for role in specs}) == len(specs)


def _trains(spec: Spec) -> bool:
    roles = spec.get("replicaSpecs", {})
    return bool(spec.get("roles")) or any(canonical(role) != names.MASTER_ROLE for role in roles)


def _coordinated(spec: Spec) -> bool:
    """Return whether a job of several roles has nothing but its coordinator, whose image all roles have."""
    replicas = spec.get("replicaSpecs", {})
    only = all(canonical(role) == names.MASTER_ROLE for role in replicas)
    images = all(_containers(replica) and _images(replica) for replica in replicas.values())
    return not spec.get("roles") or (only and images)


def _has_pods(specs: Spec) -> bool:
    roles = {role: spec for role, spec in specs.items() if canonical(role) != names.MASTER_ROLE}
    return not roles or any(spec.get("replicas", 1) for spec in roles.values())


def _numbers(specs: Spec) -> str:
    """Return the replicas by role in words: ``worker with 0 replicas``."""
    return ", ".join(
        f"{role} with {spec.get('replicas', 1)} replicas"
        for role, spec in specs.items()
        if canonical(role) != names.MASTER_ROLE
    )


def _roles(specs: Spec) -> str:
    return ", ".join(specs)


def _containers(replica: Spec) -> list[Any]:
    spec = (replica.get("template") or {}).get("spec") or {}
    return list(spec.get("containers") or ())


def _images(replica: Spec) -> bool:
    return all(container.get("image") for container in _containers(replica))


def _named(replica: Spec) -> bool:
    found = [container.get("name") for container in _containers(replica)]
    return len(set(found)) == len(found)


def _bounds(spec: Spec) -> bool:
    least = spec.get("minReplicas")
    return least is None or int(least) <= int(spec.get("replicas", 1))


def _needs_ps(spec: Spec) -> bool:
    roles = {canonical(role) for role in spec.get("replicaSpecs", {})}
    return spec.get("distributionStrategy") != "ParameterServerStrategy" or "ps" in roles


def _one_number(spares: Spec) -> bool:
    return not (spares.get("auto") and spares.get("replicas"))


def _has_workers(spec: Spec) -> bool:
    spares = spec.get("spares") or {}
    roles = {canonical(role) for role in spec.get("replicaSpecs", {})}
    return not (spares.get("auto") or spares.get("replicas")) or "worker" in roles


def _one_source(env: Spec) -> bool:
    return not (env.get("value") and env.get("valueFrom"))


_MASTER = "self.replicaSpecs[role]"
_OF_MASTER = f"{_MASTER}.template.spec.containers"
_OF_MASTER_HAS_CONTAINERS = (
    f"has({_MASTER}.template) && has({_MASTER}.template.spec) && has({_OF_MASTER})"
)

RULES = (
    FieldRule(
        ("replicaSpecs",),
        f"self.all(role, role.lowerAscii() in {_RECOGNIZED})",
        f"a map with the roles {', '.join(ROLES)}",
        lambda specs: all(canonical(role) in ROLES for role in specs),
        shown=_roles,
    ),
    FieldRule(
        ("replicaSpecs",),
        f"{_RECOGNIZED}.all(one, size(self.filter(role, role.lowerAscii() == one)) <= 1)",
        "each role once, in whatever case",
        _unique_roles,
        shown=_roles,
    ),
    FieldRule(
        (),
        "(has(self.roles) && size(self.roles) > 0) || "
        "self.replicaSpecs.exists(role, role.lowerAscii() != 'dlrover-master')",
        "at least one role that trains, as worker",
        _trains,
        at="replicaSpecs",
        shown=lambda spec: _roles(spec.get("replicaSpecs", {})),
    ),
    FieldRule(
        (),
        "!has(self.roles) || size(self.roles) == 0 || self.replicaSpecs.all(role, "
        f"role.lowerAscii() == 'dlrover-master' && {_OF_MASTER_HAS_CONTAINERS} && "
        f"size({_OF_MASTER}) > 0 && {_OF_MASTER}.all(c, has(c.image) && size(c.image) > 0))",
        "dlrover-master alone beside spec.roles, with an image in its template, which all roles have",
        _coordinated,
        at="replicaSpecs",
        shown=lambda spec: _roles(spec.get("replicaSpecs", {})),
    ),
    FieldRule(
        ("replicaSpecs",),
        "!self.exists(role, role.lowerAscii() != 'dlrover-master') || "
        "self.exists(role, role.lowerAscii() != 'dlrover-master' && self[role].replicas > 0)",
        "at least one pod that trains (spec.suspend stops a job)",
        _has_pods,
        shown=_numbers,
    ),
    FieldRule(
        ("replicaSpecs", "*"),
        "!has(self.minReplicas) || self.minReplicas <= self.replicas",
        "a number of at most replicas",
        _bounds,
        at="minReplicas",
    ),
    FieldRule(
        (),
        "self.distributionStrategy != 'ParameterServerStrategy' || "
        "self.replicaSpecs.exists(role, role.lowerAscii() == 'ps')",
        "a role ps with distributionStrategy ParameterServerStrategy",
        _needs_ps,
        at="replicaSpecs",
        shown=lambda spec: _roles(spec.get("replicaSpecs", {})),
    ),
    FieldRule(
        ("spares",),
        "!self.auto || self.replicas == 0",
        "replicas or auto, not both",
        _one_number,
        shown=lambda spares: f"{{auto: true, replicas: {spares.get('replicas')}}}",
    ),
    FieldRule(
        (),
        "!has(self.spares) || (!self.spares.auto && self.spares.replicas == 0) || "
        "self.replicaSpecs.exists(role, role.lowerAscii() == 'worker')",
        "a role worker beside spec.spares",
        _has_workers,
        at="replicaSpecs",
        shown=lambda spec: _roles(spec.get("replicaSpecs", {})),
    ),
    FieldRule(
        ("envs", "*"),
        "!has(self.valueFrom) || !has(self.value) || size(self.value) == 0",
        "value or valueFrom, not both",
        _one_source,
    ),
)
"""Rules for the fields of the spec."""

_CONTAINERS = "replica.template.spec.containers"
_HAS_CONTAINERS = f"has(replica.template) && has(replica.template.spec) && has({_CONTAINERS})"
_SAME_NAME = "has(a.name) == has(b.name) && (!has(a.name) || a.name == b.name)"

TEMPLATE_RULES = (
    FieldRule(
        ("replicaSpecs", "*"),
        f"{_HAS_CONTAINERS} && size({_CONTAINERS}) > 0",
        "a pod template with at least one container in spec.containers",
        lambda replica: bool(_containers(replica)),
        at="template.spec.containers",
    ),
    FieldRule(
        ("replicaSpecs", "*"),
        f"!({_HAS_CONTAINERS}) || {_CONTAINERS}.all(c, has(c.image) && size(c.image) > 0)",
        "containers with an image each",
        _images,
        at="template.spec.containers",
    ),
    FieldRule(
        ("replicaSpecs", "*"),
        f"!({_HAS_CONTAINERS}) || {_CONTAINERS}.all(a, {_CONTAINERS}.exists_one(b, {_SAME_NAME}))",
        "containers with names of their own",
        _named,
        at="template.spec.containers",
    ),
)
"""Rules for each role's pod template, except the master's, which may omit anything."""


def objects(spec: Any, path: tuple[str, ...], walked: str = "spec") -> Iterator[tuple[str, Any]]:
    """Yield the objects at a path, each with its full path as the user knows it."""
    if not isinstance(spec, Mapping):
        return
    if not path:
        yield walked, spec
        return
    keys = list(spec) if path[0] == "*" else [path[0]]
    for key in keys:
        if key in spec:
            yield from objects(spec[key], path[1:], f"{walked}.{key}")
