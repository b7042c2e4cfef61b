"""The machine of a job of several roles: which role starts, restarts and stops when, and when the job ends.

Each role is a job by itself, which restarts its instances alone. This machine starts roles in the order in which
they depend on each other, restarts what a failure takes with it, and ends the job.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from dlrover.errors import ExitCode
from dlrover.roles.machine.health import Stuck
from dlrover.roles.machine.inputs import (
    Command,
    CoordinatorStarted,
    Emit,
    EndInstance,
    EndJob,
    Input,
    InstanceDown,
    InstanceUp,
    KeeperDown,
    RoleExited,
    RoleLaunched,
    Spent,
    StartRole,
    StopRequested,
    StopRole,
    Submitted,
)
from dlrover.roles.machine.use import Use, of_life
from dlrover.roles.messages import MemberEnded, MemberPlace, MemberStarted
from dlrover.roles.spec import Failover, RolesJob, RoleSpec
from dlrover.spec import events


class RoleStatus(str, enum.Enum):
    """Status of a role. Users see the value."""

    WAITING = "waiting"
    """For the roles that it depends on, or for its last attempt to end."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """Its job is being stopped, to start again."""
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


_OVER = (RoleStatus.SUCCEEDED, RoleStatus.FAILED, RoleStatus.STOPPED)
_ALIVE = (RoleStatus.RUNNING, RoleStatus.RESTARTING, RoleStatus.STOPPING)
FORGOTTEN = "its master was lost together with instances, and no longer knows them"


@dataclass
class Instance:
    """The latest life of an instance."""

    place: MemberPlace
    up: bool = True
    reason: str = ""
    node: int = -1
    stuck: str = ""
    """Why it is being ended; empty if it is not."""
    since: float = 0.0
    """When it came up, or ended."""
    failed: bool = False
    spent: tuple[float, float] = (0.0, 0.0)
    """Seconds in which it has worked and was idle; known at its end."""
    seq: int = 0
    """Number of the event by which it came up."""


@dataclass
class Role:
    """One role of the job."""

    spec: RoleSpec
    status: RoleStatus = RoleStatus.WAITING
    #: starts of its job so far
    attempt: int = 0
    #: handle of its running job; empty if unknown
    handle: str = ""
    #: number of the last event of its job's current attempt that was handled
    seen: int = 0
    instances: dict[int, Instance] = field(default_factory=dict)
    #: times of the restarts that its failures have cost, within its window
    restarts: list[float] = field(default_factory=list)
    #: all restarts of its job
    restarted: int = 0
    #: restarts by its own job: of its instances, each alone, or of the world of an elastic role
    instance_restarts: int = 0
    #: number of the event of its job's current attempt that was the last such restart
    counted: int = 0
    #: where the time of lives that are over went, and that between lives
    use: Use = field(default_factory=Use)

    @property
    def up(self) -> int:
        """Instances that run."""
        return sum(one.up for one in self.instances.values())

    @property
    def is_there(self) -> bool:
        """True if roles that depend on it may start."""
        if self.status is RoleStatus.SUCCEEDED:
            return True
        wanted = self.spec.least * self.spec.processes
        return self.status is RoleStatus.RUNNING and self.up >= wanted

    def comes_again(self, one: Instance) -> bool:
        """Return whether an instance that has ended is to start again."""
        again = self.status in (RoleStatus.WAITING, RoleStatus.RESTARTING)
        return not one.up and (again or (one.failed and self.status is RoleStatus.RUNNING))


class JobEnd(msgspec.Struct, frozen=True):
    """Why the job ends."""

    exit_code: int
    reason: str
    role: str = ""


@dataclass
class RolesMachine:
    """Responds to each input; `handle` is the only way to change it."""

    job: RolesJob = field(default_factory=lambda: RolesJob(name="", roles=()))
    roles: dict[str, Role] = field(default_factory=dict)
    submitted_at: float = 0.0
    #: set once the job is to end; its roles may still be ending
    end: JobEnd | None = None
    #: when the job ended with all its roles; None before
    ended_at: float | None = None
    commands: list[Command] = field(default_factory=list)

    def handle(self, event: Input, now: float) -> list[Command]:
        """Handle one input at time ``now`` (seconds since the epoch); return the resulting commands.

        Inputs may be repeated and may come late. An input that no longer applies changes nothing.
        """
        self.commands = []
        if self.ended_at is None:
            self._dispatch(event, now)
            self._advance(now)
        return self.commands

    def _dispatch(self, event: Input, now: float) -> None:
        match event:
            case Submitted(job):
                self.job, self.submitted_at = job, now
                self.roles = {spec.name: Role(spec) for spec in job.roles}
                self._emit(events.RolesSubmitted(job.name, tuple(self.roles)))
            case CoordinatorStarted(replayed):
                self._recovered(replayed)
            case StopRequested(reason, exit_code):
                self._finish(JobEnd(exit_code, reason))
            case Stuck() | Spent():
                known = self.roles[event.place.role].instances.get(event.place.index)
                if known is not None and known.place == event.place and known.up:
                    self._said(known, event)
            case KeeperDown(keeper, reason, lost, left):
                self._emit(events.KeeperEnded(keeper, reason, lost, left))
            case RoleLaunched() | RoleExited():
                if self._is_current(event.role, event.attempt):
                    self._job_did(self.roles[event.role], event, now)
            case _:
                self._followed(event, now)

    def _is_current(self, name: str, attempt: int) -> bool:
        role = self.roles.get(name)
        return role is not None and role.attempt == attempt and role.status in _ALIVE

    # ---- instances

    def _followed(self, event: InstanceUp | InstanceDown, now: float) -> None:
        """Take in an event of a role's own job, once and in order."""
        role = self.roles[event.role]
        if not self._is_current(event.role, event.attempt) or event.seq < role.seen:
            return
        role.seen = event.seq
        match event:
            case InstanceUp():
                self._up(role, event, now)
            case InstanceDown(_, _, index, reason):
                ended = self._down(role, index, reason, now, failed=event.failed)
                if ended and event.failed and event.seq != role.counted:
                    role.instance_restarts += 1
                    role.counted = event.seq

    def _up(self, role: Role, event: InstanceUp, now: float) -> None:
        place = MemberPlace(event.role, event.index, event.attempt, event.round)
        known = role.instances.get(event.index)
        if known is not None and place.life <= known.place.life and event.seq > known.seq:
            # Under its number, the service would take the new process for the old one.
            if role.status is RoleStatus.RUNNING:
                self._start_again(role, ExitCode.INFRASTRUCTURE, FORGOTTEN, now)
            return
        if known is not None and place.life < known.place.life:
            return
        stuck = known.stuck if known is not None and known.place == place else ""
        if known is not None:
            spent = now - known.since
            role.use = role.use.plus(of_life(spent, *known.spent) if known.up else Use(away=spent))
        role.instances[event.index] = Instance(
            place, node=event.node, stuck=stuck, since=now, seq=event.seq
        )
        self._send(MemberStarted(place))

    def _said(self, known: Instance, event: Stuck | Spent) -> None:
        """Note how a living instance has spent its time; end one without progress, once."""
        if isinstance(event, Spent):
            known.spent = event.worked, event.idled
            return
        role = self.roles[event.place.role]
        if not known.stuck and role.status is RoleStatus.RUNNING:
            body = events.InstanceStuck(
                role.spec.name, event.place.index, event.phase, event.seconds
            )
            known.stuck = body.why()
            self._emit(body)
            self._send(EndInstance(known.place, known.stuck, known.node))

    def _down(self, role: Role, index: int, reason: str, now: float, *, failed: bool) -> bool:
        """Note an instance's end; return whether it was up."""
        known = role.instances.get(index)
        if known is None or not known.up:
            return False
        reason = known.stuck or reason.rstrip(".")
        role.use = role.use.plus(of_life(now - known.since, *known.spent))
        known.up, known.reason, known.failed, known.since = False, reason, failed, now
        name = role.spec.name
        self._send(MemberEnded(known.place, reason))
        if failed:
            self._emit(events.InstanceEnded(name, index, reason))
            self._with_dependents(name, f"instance {index} of {name} failed, on which it depends")
        return True

    def _with_dependents(self, name: str, reason: str) -> None:
        for spec in self.job.dependents(name):
            self._restart(self.roles[spec.name], reason)

    # ---- the jobs of roles

    def _job_did(self, role: Role, event: RoleLaunched | RoleExited, now: float) -> None:
        if isinstance(event, RoleLaunched):
            role.handle = event.handle
        else:
            self._exited(role, event, now)

    def _exited(self, role: Role, event: RoleExited, now: float) -> None:
        """Respond to the end of a role's job."""
        name, before = role.spec.name, role.status
        succeeded = event.exit_code == ExitCode.SUCCESS
        for index in list(role.instances):
            failed = not succeeded and before is RoleStatus.RUNNING
            self._down(role, index, event.reason, now, failed=failed)
        role.handle = ""
        if before is RoleStatus.STOPPING:
            role.status = RoleStatus.SUCCEEDED if succeeded else RoleStatus.STOPPED
        elif before is RoleStatus.RESTARTING:
            role.status = RoleStatus.WAITING
        elif succeeded:
            role.status = RoleStatus.SUCCEEDED
            self._emit(events.RoleEnded(name, event.exit_code, event.reason))
        else:
            self._failed(role, event, now)

    def _failed(self, role: Role, event: RoleExited, now: float) -> None:
        """Restart what a failed role's policy says, or end the job."""
        name, spec = role.spec.name, role.spec
        role.status = RoleStatus.FAILED
        self._emit(events.RoleEnded(name, event.exit_code, event.reason))
        if event.hopeless or (spec.restarts_itself and not event.vanished):
            self._finish(JobEnd(event.exit_code, f"role {name}: {event.reason}", name))
            return
        self._start_again(role, event.exit_code, event.reason.rstrip("."), now)

    def _start_again(self, role: Role, exit_code: int, reason: str, now: float) -> None:
        """Restart a role that has failed as a whole, with the others if its policy says so; end the job without a budget."""
        name, spec = role.spec.name, role.spec
        role.restarts = [at for at in role.restarts if at > now - spec.window]
        if len(role.restarts) >= spec.max_restarts:
            used = f"all {spec.max_restarts} restarts within {spec.window:g} s are used"
            self._finish(JobEnd(exit_code, f"role {name}: {reason}; {used}.", name))
            return
        role.restarts.append(now)
        self._restart(role, reason)
        if spec.failover is Failover.JOB:
            for other in self.roles.values():
                if other is not role:
                    self._restart(other, f"role {name} failed, and the job restarts with it")

    def _restart(self, role: Role, reason: str) -> None:
        """Restart a role that runs, has failed or, if the whole job restarts, has succeeded."""
        before = role.status
        if before in (
            RoleStatus.WAITING,
            RoleStatus.RESTARTING,
            RoleStatus.STOPPING,
            RoleStatus.STOPPED,
        ):
            return
        role.restarted += 1
        self._emit(events.RoleRestarts(role.spec.name, reason))
        if before is RoleStatus.RUNNING:
            role.status = RoleStatus.RESTARTING
            self._send(StopRole(role.spec.name, role.attempt))
        else:
            role.status = RoleStatus.WAITING

    def _finish(self, end: JobEnd) -> None:
        """Begin to end the job; the first reason stays."""
        if self.end is not None:
            return
        self.end = end
        for role in self.roles.values():
            if role.status is RoleStatus.RUNNING:
                self._send(StopRole(role.spec.name, role.attempt))
            if role.status in _ALIVE:
                role.status = RoleStatus.STOPPING
            elif role.status is RoleStatus.WAITING:
                role.status = RoleStatus.STOPPED

    def _recovered(self, replayed: int) -> None:
        """Repeat what the last coordinator may not have done."""
        self._emit(events.CoordinatorRecovered(replayed))
        for role in self.roles.values():
            name = role.spec.name
            for one in role.instances.values():
                self._send(MemberStarted(one.place))
                if not one.up:
                    self._send(MemberEnded(one.place, one.reason))
                elif one.stuck:
                    self._send(EndInstance(one.place, one.stuck, one.node))
            if role.status in _ALIVE:
                self._send(StartRole(name, role.attempt))
            if role.status in (RoleStatus.RESTARTING, RoleStatus.STOPPING):
                self._send(StopRole(name, role.attempt))

    # ---- what the state allows after an input

    def _advance(self, now: float) -> None:
        deciding = [self.roles[name] for name in self.job.deciding]
        if (
            self.end is None
            and deciding
            and all(r.status is RoleStatus.SUCCEEDED for r in deciding)
        ):
            what = f"the driver, {self.job.driver}," if self.job.driver else "all roles that end"
            self._finish(JobEnd(ExitCode.SUCCESS, f"{what} succeeded.".capitalize()))
        if self.end is None:
            for role in self.roles.values():
                if role.status is RoleStatus.WAITING and self._may_start(role):
                    self._start(role)
        elif all(role.status in _OVER for role in self.roles.values()):
            self.ended_at = now
            end = self.end
            self._emit(events.JobEnded(end.exit_code, end.reason))
            self._send(EndJob(end.exit_code, end.reason, end.role))

    def _may_start(self, role: Role) -> bool:
        return all(self.roles[name].is_there for name in role.spec.depends_on)

    def _start(self, role: Role) -> None:
        role.status = RoleStatus.RUNNING
        role.attempt += 1
        role.seen = role.counted = 0
        self._emit(events.RoleStarts(role.spec.name, role.attempt))
        self._send(StartRole(role.spec.name, role.attempt))

    def waits_for(self, role: Role) -> list[str]:
        """Return the names of the roles that a waiting role waits for."""
        return [name for name in role.spec.depends_on if not self.roles[name].is_there]

    def _send(self, command: Command) -> None:
        self.commands.append(command)

    def _emit(self, body: events.EventBody) -> None:
        self.commands.append(Emit(body))

    # ---- invariants

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        for role in self.roles.values():
            assert role.attempt > 0 or role.status in (RoleStatus.WAITING, RoleStatus.STOPPED)
            assert role.status in _ALIVE or not role.up, "an instance of a role that does not run"
            assert role.status in _ALIVE or not role.handle, "a job of a role that does not run"
            assert len(role.restarts) <= role.spec.max_restarts, "a budget is overdrawn"
            for one in role.instances.values():
                assert one.up or one.reason or not one.stuck
                assert one.place.attempt <= role.attempt
            running = role.status in (RoleStatus.RUNNING, RoleStatus.RESTARTING, RoleStatus.WAITING)
            assert self.end is None or not running, "a role runs on after the end"
            assert self.end is not None or role.status is not RoleStatus.FAILED, (
                "a failure was left"
            )
        if self.ended_at is not None:
            assert self.end is not None
            assert all(role.status in _OVER for role in self.roles.values())
