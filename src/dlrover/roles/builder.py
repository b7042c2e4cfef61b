"""`Job`: a job of several roles, built in Python."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dlrover._util import decoding
from dlrover.roles.entries import entry_point
from dlrover.roles.spec import Failover, RoleKind, RolesJob, RoleSpec, refusal
from dlrover.spec.node import NodeLimits

E = TypeVar("E", RoleKind, Failover)
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{unit}i": 1024**power for power, unit in enumerate("KMGT", 1)
}
"""Units of resources, as on Kubernetes."""


class Job:
    """A job of several roles: add roles, then give the file to ``dlrover roles``.

    Args:
        name: Name of the job.
        directory: Where scripts and modules are found; by default the directory of the file that calls this.
    """

    def __init__(self, name: str, *, directory: str | Path = "") -> None:
        self.name = name
        self._directory = Path(directory or _caller()).absolute()
        self._roles: list[RoleSpec] = []

    def role(  # noqa: PLR0913 - each is an option of a role
        self,
        name: str,
        entry: str,
        *,
        kind: str = "simple",
        instances: int | tuple[int, int] = 1,
        processes: int = 1,
        spares: int = 0,
        resources: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        failover: str = "instance",
        max_restarts: int = 10,
        window: float = 3600.0,
        health: Mapping[str, float] | None = None,
        depends_on: str | Sequence[str] | Mapping[str, str] = (),
        collocate: str = "",
        shutdown_timeout: int = 30,
    ) -> Job:
        """Add a role, and return the job.

        Args:
            name: Name of the role.
            entry: ``"script.py arguments"``, ``"module:Class"``, whose public methods other roles call, or
                ``"module.function"``.
            kind: ``"elastic"``: one world, as under torchrun; ``"simple"``: independent instances; ``"driver"``:
                one instance whose success ends the job.
            instances: Number of instances, or least and most.
            processes: Worker processes of each instance of an elastic role.
            spares: Warm nodes of an elastic role that take the places of lost ones.
            resources: What each instance needs: ``cpu`` in cores, ``memory`` as ``"2Gi"``, and on a cluster ``gpu``.
            env: Environment variables of the role.
            config: Values of your own for the role's program, as JSON has them.
            failover: What restarts when an instance fails: ``"instance"``, ``"role"`` or ``"job"``.
            max_restarts: Restarts within ``window`` seconds before the failure ends the job.
            window: See ``max_restarts``.
            health: Seconds without progress after which an instance is restarted, by phase: ``start``, ``work``,
                or one that the program names.
            depends_on: Roles that must run first; as a mapping, each with what happens when one of its
                instances fails: ``"wait"`` (nothing) or ``"restart"`` (this role restarts).
            collocate: Name of a group of roles that use the same resources in turn.
            shutdown_timeout: Seconds between SIGTERM and SIGKILL.

        Raises:
            ConfigurationError: A value is wrong, or the entry point does not exist.
        """
        least, most = _bounds(name, instances)
        needs = _amounts(name, resources or {})
        self._roles.append(
            RoleSpec(
                name=str(name),
                entry=entry_point(name, entry, self._directory),
                kind=_choice(name, "kind", kind, RoleKind),
                least=least,
                most=most,
                processes=_whole(name, "processes", processes),
                spares=_whole(name, "spares", spares),
                size=NodeLimits(cpu=needs["cpu"], memory=int(needs["memory"])),
                gpus=needs["gpu"],
                env=_texts(name, env or {}),
                config=_json(name, config or {}),
                failover=_choice(name, "failover", failover, Failover),
                max_restarts=_whole(name, "max_restarts", max_restarts),
                window=float(window),
                health=_limits(name, health or {}),
                depends_on=_dependencies(name, depends_on),
                collocate=collocate,
                shutdown_timeout=_whole(name, "shutdown_timeout", shutdown_timeout),
            )
        )
        return self

    def spec(self) -> RolesJob:
        """Return the job as a record."""
        return RolesJob(name=self.name, roles=tuple(self._roles), directory=str(self._directory))


def _caller() -> Path:
    """Return the directory of the file that makes a `Job`."""
    file = sys._getframe(2).f_globals.get("__file__")  # noqa: SLF001 - documented
    return Path(file).parent if file else Path.cwd()


def _bounds(role: str, instances: object) -> tuple[int, int]:
    pair = instances if isinstance(instances, tuple | list) else (instances, instances)
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) for n in pair):
        raise refusal(role, "instances", instances, "must be N or (MIN, MAX)")
    return pair[0], pair[1]


def _whole(role: str, field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise refusal(role, field, value, "must be a whole number")
    return value


def _choice(role: str, field: str, value: object, of: type[E]) -> E:
    try:
        return of(value)
    except ValueError:
        known = ", ".join(each.value for each in of)
        raise refusal(role, field, value, f"must be one of {known}") from None


def _texts(role: str, env: Mapping[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if isinstance(value, Mapping | list | None):
            raise refusal(role, "env", name, "takes names of variables with texts")
        if not re.fullmatch(r"[^=,\0\s]+", str(name)) or "\0" in str(value):
            accepted = "a name has no '=', ',' or space, and no text has a NUL, which no process could be given"
            raise refusal(role, "env", repr(name), accepted)
    return {str(name): str(value) for name, value in env.items()}


def _limits(role: str, health: Mapping[str, Any]) -> dict[str, float]:
    for phase, seconds in health.items():
        if not isinstance(seconds, int | float) or isinstance(seconds, bool):
            raise refusal(role, f"health {phase}", seconds, "must be a number of seconds")
    return {str(phase): float(seconds) for phase, seconds in health.items()}


def _json(role: str, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        _check_kept(given)
        return decoding.json(msgspec.json.encode(given), dict[str, Any])
    except (TypeError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise refusal(role, "config", given, f"takes values that JSON has ({error})") from None


def _check_kept(value: object) -> None:
    """Refuse what JSON would make something else of, in silence.

    Raises:
        TypeError: there is such a value; the message says which.
    """
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a text")
            _check_kept(one)
    elif isinstance(value, list | tuple):
        for one in value:
            _check_kept(one)
    elif isinstance(value, set | frozenset | bytes | bytearray | memoryview):
        raise TypeError(f"{value!r:.100} is of type {type(value).__name__}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{value} is not finite")


def _amounts(role: str, resources: Mapping[str, Any]) -> dict[str, float]:
    found = {"cpu": 0.0, "memory": 0.0, "gpu": 0.0}
    for name, value in resources.items():
        if name not in found:
            raise refusal(role, "resources", name, "must be cpu, memory or gpu")
        try:
            number, unit = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", str(value)).groups()  # type: ignore[union-attr]
            found[name] = float(number) * UNITS[unit]
        except (AttributeError, KeyError, ValueError):
            example = {"cpu": "cores, as 0.5", "memory": "bytes, as 2Gi"}.get(name, "GPUs, as 1")
            raise refusal(
                role, f"resources {name}", value, f"must be a number of {example}"
            ) from None
    return found


def _dependencies(role: str, given: str | Sequence[str] | Mapping[str, str]) -> dict[str, Any]:
    if isinstance(given, str):
        given = [given]
    on = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given, "wait")
    for value in on.values():
        if value not in ("wait", "restart"):
            raise refusal(role, "depends_on", value, "must be wait or restart")
    return on
