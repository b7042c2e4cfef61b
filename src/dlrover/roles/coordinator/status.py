"""Status of a job of several roles, for people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from dlrover.errors import InfrastructureError
from dlrover.roles.coordinator.journal import RolesJournal
from dlrover.roles.machine.job import Role, RolesMachine
from dlrover.roles.machine.use import Use, of_life
from dlrover.roles.messages import ENDED, LIVE, MemberPlace, QueueStatus, ServiceStatus
from dlrover.roles.serving import RolesService

PhaseTimes = Mapping[tuple[str, int], tuple[str, float]]
"""Phase of each instance, by its role and index, and for how many seconds it has lasted."""
Spent = Callable[[MemberPlace], tuple[float, float] | None]
"""Returns the seconds in which a living instance has worked and was idle; None if it has not reported."""


class InstanceState(msgspec.Struct, frozen=True):
    """One instance of a role."""

    index: int
    state: str
    """``running``, ``serving``, ``stale`` (it lacks the current weights) or ``ended``."""
    pid: int = 0
    weights: dict[str, str] = {}
    """Versions of weights that it works with, by their name."""
    reason: str = ""
    """Why it, or its life before, has ended."""
    phase: str = ""
    """``start``, ``work``, ``idle`` or one that the program names; empty if unknown."""
    phase_seconds: float = 0.0
    """Seconds since it began."""


class RoleState(msgspec.Struct, frozen=True):
    """One role."""

    name: str
    kind: str
    status: str
    attempt: int
    """Starts of its job so far."""
    restarts: int
    """Restarts of its job, and within it of its instances, each alone, or of the world of an elastic role."""
    waits_for: tuple[str, ...]
    instances: tuple[InstanceState, ...]
    use: Use = Use()
    """Seconds of its instances; of an elastic role, whose own job knows more, only those of its workers' lives."""


class WeightsState(msgspec.Struct, frozen=True):
    """Named weights that a role publishes."""

    name: str
    role: str
    version: str
    """The current version; empty if there is none."""
    lost: str = ""
    """The version that was current and was lost with the process that kept it; empty once another one is published."""


class RolesStatus(msgspec.Struct, frozen=True):
    """A job of several roles."""

    name: str
    phase: str
    seconds: float
    roles: tuple[RoleState, ...]
    weights: tuple[WeightsState, ...] = ()
    queues: dict[str, QueueStatus] = {}


def status_of(
    machine: RolesMachine,
    service: ServiceStatus,
    now: float,
    phases: PhaseTimes | None = None,
    spent: Spent | None = None,
) -> RolesStatus:
    """Return the status at time ``now``; without ``spent``, the use of time leaves living instances out."""
    weights = tuple(
        WeightsState(
            name,
            view.role,
            str(view.versions[-1].version) if view.versions else "",
            str(view.lost) if view.lost is not None else "",
        )
        for name, view in sorted(service.weights.items())
    )
    return RolesStatus(
        name=machine.job.name,
        phase=_phase(machine),
        seconds=(machine.ended_at or now) - machine.submitted_at,
        roles=tuple(
            RoleState(
                name=name,
                kind=role.spec.kind.value,
                status=role.status.value,
                attempt=role.attempt,
                restarts=role.restarted + role.instance_restarts,
                waits_for=tuple(machine.waits_for(role)) if role.status.value == "waiting" else (),
                instances=tuple(
                    _with_phase(one, *(phases or {}).get((name, one.index), ("", 0.0)))
                    for one in _instances(machine, service, name)
                ),
                use=_use(role, now, spent),
            )
            for name, role in machine.roles.items()
        ),
        weights=weights,
        queues=service.queues,
    )


def _use(role: Role, now: float, spent: Spent | None) -> Use:
    use = role.use
    for one in role.instances.values():
        if spent is None:
            continue
        if one.up:
            use = use.plus(of_life(now - one.since, *(spent(one.place) or one.spent)))
        elif role.comes_again(one):
            use = use.plus(Use(away=now - one.since))
    return use


def _with_phase(one: InstanceState, phase: str, seconds: float) -> InstanceState:
    if one.state == ENDED:
        return one
    return msgspec.structs.replace(one, phase=phase, phase_seconds=seconds)


def replayed(journal: Path, now: float) -> RolesStatus:
    """Return the status at the end of a coordinator's journal.

    Raises:
        InfrastructureError: the journal cannot be read.
    """
    machine = RolesMachine()
    served: list[bytes] = []
    with contextlib.closing(RolesJournal(journal, read_only=True)) as entries:
        for at, entry in entries.entries():
            now = max(now, at)  # the machine's clock may have gone back since
            if isinstance(entry, bytes):
                served.append(entry)
            else:
                machine.handle(entry, at)
    service = RolesService(_Read(), served, machine.job.worlds)
    return status_of(machine, service.shared.status(), now)


class _Read:
    """A journal that takes nothing."""

    def append(self, entry: bytes, now: float) -> None:
        raise InfrastructureError("This journal is only read.")

    replace = append


def _phase(machine: RolesMachine) -> str:
    if machine.end is None:
        return "running"
    if machine.ended_at is None:
        return "ending"
    return "succeeded" if not machine.end.exit_code else "failed"


def _instances(machine: RolesMachine, service: ServiceStatus, name: str) -> list[InstanceState]:
    """Return what the coordinator sees of a role's instances, with what they said themselves."""
    view = service.roles.get(name)
    joined = {member.place.index: member for member in view.members} if view is not None else {}
    found = []
    for index, member in sorted(machine.roles[name].instances.items()):
        own = joined.get(index)
        known = own is not None and own.place == member.place
        if own is None or not known or own.state != LIVE:
            state = "running" if member.up else ENDED
            found.append(InstanceState(index, state, reason=member.reason))
            continue
        state = ("serving" if own.serving else "stale") if member.up else ENDED
        using = {key: str(version) for key, version in own.using.items()}
        found.append(InstanceState(index, state, own.pid, using, member.reason or own.reason))
    return found
