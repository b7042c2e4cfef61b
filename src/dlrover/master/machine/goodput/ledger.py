"""The goodput ledger: the cause of every microsecond of every node of a job.

It gets the same inputs as the job machine, after the machine has handled them, and reads the nodes' state. A
node's time begins when it is launched or first connects, and ends when it is lost or released. After the
job's end, it ends with the node's connection. Each moment in between belongs to exactly one cause, so the
sums equal the wall time, to the microsecond.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.incidents import IncidentAccount, IncidentBook
from dlrover.master.machine.goodput.roundtime import (
    DEGRADED,
    INDEX,
    MICRO,
    PRODUCTIVE,
    RECOMPUTED,
    SHUTDOWN,
    RoundTime,
    add,
    microseconds,
    nothing,
)
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Node
from dlrover.rpc.messages import Hello
from dlrover.spec import events
from dlrover.spec.node import NodeStatus, Size
from dlrover.spec.outcome import CAUSES, Cause, Goodput

_WAITING = INDEX[Cause.WAITING_FOR_RESOURCES]
_RENDEZVOUS = INDEX[Cause.RENDEZVOUS]
_NODE_CHECK = INDEX[Cause.NODE_CHECK]
_IDLE = INDEX[Cause.IDLE]
_WORLD = -1
"""Placeholder for a cause: the node's workers run in the world, and its `RoundTime` has the causes."""


class IntervalListener(Protocol):
    """Receiver of intervals once their causes are known. Times are microseconds since the epoch."""

    def node_spent(self, node: int, since: int, until: int, parts: Sequence[int]) -> None:
        """Record a node's time, by cause."""

    def round_spent(self, number: int, since: int, until: int, parts: Sequence[int]) -> None:
        """Record the time of each node in the world of a round, by cause."""

    def node_ran(self, node: int, number: int, since: int, until: int) -> None:
        """Record that a node was in the world of a round; its time there is the round's."""


@dataclass
class _Account:
    """Account of a present node; ``spent`` is its time from ``began`` to ``since``, by cause."""

    node: int
    began: int
    since: int
    cause: int
    #: True from its launch to its first connection
    pending: bool = False
    spent: list[int] = field(default_factory=nothing)


class Ledger:
    """The ledger of one job. `handle` is the only way to change it."""

    def __init__(self, listener: IntervalListener | None = None) -> None:
        self.incidents = IncidentBook()
        #: accounts of the present nodes, by id
        self.accounts: dict[int, _Account] = {}
        #: number of nodes that the job ever had
        self.nodes = 0
        #: time of completed intervals, by cause
        self.closed = nothing()
        #: time of the nodes that are gone
        self.closed_wall = 0
        #: the running world; None without one
        self.round: RoundTime | None = None
        self.rounds_without_first_step = 0
        #: past time of worlds with fewer nodes than wanted, or in which not all ranks trained
        self.degraded = 0
        # since when the running world has been such a one; -1 if it is none
        self._short_since = -1
        # True if the running world was formed with fewer nodes than wanted
        self._formed_short = False
        # most nodes of any world, for jobs whose nodes come by themselves
        self._largest = 0
        self.submitted_at = 0
        self.ended_at = -1
        self._listener = listener
        self._now = 0
        # number of the first step that no round has made
        self._furthest = 0
        # True if the program is known to report its steps
        self._reports_steps = False
        # True if any round has made a step
        self._trained = False
        # since when each disconnected node has been away
        self._away: dict[int, int] = {}
        # the incident that ended the last round; None if no fault did
        self._undone_by: IncidentAccount | None = None
        self._key: tuple[object, ...] = ()
        self._members: tuple[int, ...] = ()
        # of the open intervals: their number and the sum of their beginnings, by cause
        self._open = nothing()
        self._open_since = nothing()
        self._in_world = 0
        self._pending = 0
        self._began = 0

    # ---- queries

    def sums(self, now: int) -> list[int]:
        """Return the microseconds of all nodes until ``now`` by cause, in the order of `CAUSES`."""
        sums = self.certain(now)
        if self.round is not None:
            add(sums, self.round.unproved(now), self._in_world)
        return sums

    def certain(self, now: int) -> list[int]:
        """Return the sums without the running world's time since its last new step; none ever shrinks."""
        sums = [
            closed + count * now - since
            for closed, count, since in zip(self.closed, self._open, self._open_since, strict=True)
        ]
        if self.round is not None:
            add(sums, self.round.spent, self._in_world)
        return sums

    def wall(self, now: int) -> int:
        """Return the microseconds of wall time of all nodes until ``now``."""
        return self.closed_wall + len(self.accounts) * now - self._began

    def goodput(self, now: float) -> Goodput:
        """Return the report at a time in seconds since the epoch."""
        at = max(self._now, microseconds(now))
        sums, wall, book = self.sums(at), self.wall(at), self.incidents
        ended = self.ended_at if self.ended_at >= 0 else at
        trained = self._trained or (self.round is not None and self.round.trained)
        return Goodput(
            goodput_ratio=sums[PRODUCTIVE] / wall if wall and trained else None,
            wall_seconds=wall / MICRO,
            job_seconds=(ended - self.submitted_at) / MICRO,
            nodes=self.nodes,
            seconds={c.value: us / MICRO for c, us in zip(CAUSES, sums, strict=True)},
            incidents=tuple(entry.cost(at, sums) for entry in book.entries),
            earlier_incidents=book.earlier_count,
            earlier_incident_seconds=book.earlier / MICRO,
            degraded_seconds=(self.degraded + self._short_for(at)) / MICRO,
            rounds_without_first_step=self.rounds_without_first_step + self._lacks_first_step(),
        )

    # ---- inputs

    def handle(self, event: inputs.Input, now: float, machine: JobMachine) -> None:
        """Take in an input at time ``now`` (seconds since the epoch) after ``machine`` has handled it."""
        at = max(self._now, microseconds(now))
        if isinstance(event, inputs.Submitted):
            self.submitted_at = at
        if isinstance(event, inputs.MasterStarted) and event.replayed and self.ended_at < 0:
            trained = self.round is not None
            number, alive = machine.rendezvous.last_round, self._last_alive(event)
            self.incidents.begin_master(alive, number, self.sums(alive), trained=trained)
        self._note_progress(event, at, machine)
        self._note_absence(event, at, machine)
        self._close_round(event, at, machine)
        touched = self._touched(event, machine)
        for node_id in touched:
            self._note_presence(machine.nodes[node_id], at, machine)
        self._classify(touched, at, machine)
        self._note_incident(event, at, machine)
        if machine.outcome is not None and self.ended_at < 0:
            self.ended_at = at
        self._now = at

    def _note_progress(self, event: inputs.Input, now: int, machine: JobMachine) -> None:
        """Record reports on the workers of the running world."""
        round_ = self.round
        if round_ is None:
            return
        match event:
            case inputs.Progressed(number, steps, seconds, first_step) if number == round_.number:
                at = round_.lived(event.ended) if event.ended else now - microseconds(event.idle)
                report = (seconds, steps, first_step)
            case events.WorkerFailed(failure) if failure.round == round_.number:
                if machine.instances.owns(failure.node_id):
                    return
                serves = failure.node_id in machine.rendezvous.servers
                at = self._first_sign(event, now, machine)
                report = ((), 0 if serves else failure.steps, -1)
            case _:
                return
        since, before, began = round_.proved, list(round_.spent), round_.first_step
        round_.report(round_.within(at, now), *report)
        parts = [new - old for new, old in zip(round_.spent, before, strict=True)]
        if round_.proved > since and self._listener is not None:
            self._listener.round_spent(round_.number, since, round_.proved, parts)
        if round_.first_step >= 0 and self._undone_by is not None:
            self._undone_by.redo(parts[RECOMPUTED] * self._in_world)
            if began < 0 <= machine.progress.reached:
                self._undone_by.undo(max(0, machine.progress.reached - round_.first_step))

    def _note_absence(self, event: inputs.Input, now: int, machine: JobMachine) -> None:
        """Record since when nodes have been disconnected."""
        match event:
            case Hello(uid):
                self._away.pop(machine.fleet.by_uid[uid], None)
            case inputs.NodeDisconnected(node_id) if node_id in self.accounts:
                self._away.setdefault(node_id, now)
            case inputs.MasterStarted():
                # The nodes were last known to be present at the dead master's last entry.
                alive = self._last_alive(event)
                self._away = dict.fromkeys(self.accounts, alive) | self._away

    def _last_alive(self, event: inputs.MasterStarted) -> int:
        """Return when the dead master last wrote to the journal; not all entries reach the ledger."""
        return max(self._now, microseconds(event.last))

    def _touched(self, event: inputs.Input, machine: JobMachine) -> list[int]:
        """Return the nodes that the input may have changed; changes of the whole round do not count."""
        new = itertools.islice(reversed(machine.nodes), max(0, len(machine.nodes) - self.nodes))
        touched = [*new][::-1]
        self.nodes = len(machine.nodes)
        match event:
            case inputs.MasterStarted() | inputs.ScaleRequested():
                return [*machine.nodes]
            case inputs.DeadlinePassed():
                return [*touched, *self._away]
            case Hello(uid):
                return [*touched, machine.fleet.by_uid[uid]]
            case events.WorkerFailed(failure) if failure.node_id in machine.nodes:
                return [*touched, failure.node_id]
            case inputs.MigrationRequested():
                return touched  # it may name any node and changes no present one
            case _:
                return [*touched, event.node_id] if hasattr(event, "node_id") else touched

    def _note_presence(self, node: Node, now: int, machine: JobMachine) -> None:
        """Open the account of a node that has come; close the account of one that has gone."""
        account = self.accounts.get(node.id)
        if not _is_there(node, machine):
            if account is not None:
                self._close(account, now)
            return
        if account is None:
            account = self.accounts[node.id] = _Account(node.id, now, now, _WAITING)
            self._begin(_WAITING, now)
            self._began += now
        pending = node.status is NodeStatus.PENDING
        self._pending += pending - account.pending
        account.pending = pending

    def _close_round(self, event: inputs.Input, now: int, machine: JobMachine) -> None:
        """End the running world if the machine has ended it."""
        round_, rdzv = self.round, machine.rendezvous
        if round_ is None or (
            rdzv.round == round_.number and not rdzv.collecting and machine.outcome is None
        ):
            return
        succeeded = machine.outcome is not None and machine.outcome.exit_code == ExitCode.SUCCESS
        incident = machine.incident
        fault = incident is not None
        # The fault did not hold up a step that was completed after its first sign.
        sign = max(round_.proved, self._first_sign(event, now, machine)) if fault else now
        failed_start = isinstance(event, events.WorkerFailed) and not round_.steps
        if succeeded:
            last = round_.done(now)
        elif machine.outcome is not None and not fault:
            last = round_.stopped(now)
        else:
            last = round_.cut_off(now, 0 if failed_start else now - sign)
        members = [a for a in self.accounts.values() if a.cause == _WORLD]
        for account in members:
            self._leave_world(account, now, last)
            account.cause = _RENDEZVOUS
            self._begin(_RENDEZVOUS, now)
        opened = self.incidents.open
        if (
            opened is not None
            and opened.survived
            and incident is not None
            and not incident.survived
        ):
            self.incidents.end(now, self.sums(now))  # this fault stops all ranks
        if fault and self.incidents.open is None:
            lost = (a.node for a in members if machine.nodes[a.node].status.final)
            entry = IncidentAccount(sign, round_.number, self.sums(now), next(lost, -1))
            entry.charge(last, len(members))
            self.incidents.begin(entry)
        self._undone_by = self.incidents.open
        self._reports_steps, self._trained = round_.reports_steps, round_.trained
        if round_.first_step >= 0:
            self._furthest = max(self._furthest, round_.first_step + round_.steps)
        self.rounds_without_first_step += self._lacks_first_step()
        self._note_short(now, short=False)
        self.round = None

    def _note_short(self, now: int, *, short: bool) -> None:
        """Note whether the running world lacks nodes or ranks from now on."""
        if not short:
            self.degraded += self._short_for(now)
            self._short_since = -1
        elif self._short_since < 0:
            self._short_since = now

    def _short_for(self, now: int) -> int:
        """Return for how long the running world has lacked nodes or ranks."""
        return now - self._short_since if self._short_since >= 0 else 0

    def _lacks_first_step(self) -> bool:
        """Return whether the running round may repeat earlier steps without reporting its first step."""
        round_ = self.round
        return round_ is not None and round_.number > 1 and round_.steps > 0 > round_.first_step

    def _first_sign(self, event: inputs.Input, now: int, machine: JobMachine) -> int:
        """Return when the fault reported by an input began."""
        match event:
            case inputs.NodeSilent(_, seconds) | inputs.Hung(events.HangFound(seconds=seconds)):
                return now - max(0, microseconds(seconds))
            case events.WorkerFailed(failure):
                ended = microseconds(failure.time)
                return ended if 0 < ended < now else now
        lost = [i for i in self._away if machine.nodes[i].status.final]
        return min((self._away[i] for i in lost), default=now)

    def _classify(self, touched: Iterable[int], now: int, machine: JobMachine) -> None:
        """Assign the time from now on to the right causes."""
        rdzv, over = machine.rendezvous, machine.outcome is not None
        if self.round is None and not rdzv.collecting and rdzv.members and not over:
            reports_steps, trained = self._reports_steps, self._trained
            self.round = RoundTime(
                rdzv.round, now, self._furthest, reports_steps=reports_steps, trained=trained
            )
            size, wanted = rdzv.size.nodes, machine.scaling.world.nodes
            self._largest = max(self._largest, size)
            self._formed_short = size < (wanted or self._largest)
        membership = machine.state.membership
        if self.round is not None:
            self._note_short(now, short=self._formed_short or membership.lacks_ranks)
        here = len(self.accounts) - self._pending - len(machine.spares.offers)
        serving = sum(i in self.accounts and not self.accounts[i].pending for i in rdzv.servers)
        short = rdzv.collecting and not rdzv.usable(Size(here - serving, serving)).nodes
        checking = machine.checks.count if machine.checks.run is not None else 0
        adopting, leaving = machine.adoption.pending, len(machine.scaling.leaving)
        members = membership.number, len(membership.replacements), len(membership.ranks)
        lacks = self._short_since >= 0
        key = (rdzv.round, rdzv.collecting, short, over, checking, adopting, leaving, lacks)
        changed, self._key = key != self._key, key
        moved, self._members = members != self._members, members
        if (changed or moved) and self.round is not None:
            self.round.miss(*membership.missing(), now)
        if moved:  # thousands of ranks may be lost and join
            touched = [*touched, *membership.replacements]
        for node_id in list(self.accounts) if changed else touched:
            account, node = self.accounts.get(node_id), machine.nodes[node_id]
            if account is not None and _is_there(node, machine):
                self._switch(account, self._cause(node, machine, short), now)
            elif account is not None:
                self._close(account, now)

    def _cause(self, node: Node, machine: JobMachine, short: bool) -> int:
        """Return the cause of a node's time from now on."""
        if machine.outcome is not None or machine.state.leaves(node.id):
            return SHUTDOWN
        if node.status is NodeStatus.PENDING:
            trains = self.round is not None and not machine.state.is_spare(node)
            return DEGRADED if trains else _WAITING
        run = machine.checks.run
        if run is not None and node.id in run.offers:
            return _NODE_CHECK
        if node.id in machine.spares.offers:
            return _IDLE
        if machine.rendezvous.collecting or machine.adoption.pending:
            return _WAITING if short else _RENDEZVOUS
        lacks = node.launched and self._short_since >= 0
        membership, running = machine.state.membership, _WORLD
        if node.id in membership.replacements:
            # The time of the world's nodes is counted for all of them from its beginning.
            running = PRODUCTIVE if membership.trains(node.id) else DEGRADED
        after = {NodeStatus.RUNNING: running, NodeStatus.SUCCEEDED: SHUTDOWN}
        return after.get(node.status, DEGRADED if lacks else _IDLE)

    def _switch(self, account: _Account, cause: int, now: int) -> None:
        if cause == account.cause:
            return
        self._end_interval(account, now, done=cause == SHUTDOWN)
        account.cause = cause
        self._begin(cause, now)

    def _close(self, account: _Account, now: int) -> None:
        """Fold the account of a node that has gone into the sums."""
        self._end_interval(account, now, done=False)
        wall = now - account.began
        assert sum(account.spent) == wall, f"node {account.node}: its time is not accounted for"
        self.closed_wall += wall
        self._began -= account.began
        self._pending -= account.pending
        del self.accounts[account.node]
        self._away.pop(account.node, None)

    # ---- intervals

    def _begin(self, cause: int, now: int) -> None:
        if cause == _WORLD:
            self._in_world += 1
        else:
            self._open[cause] += 1
            self._open_since[cause] += now

    def _end_interval(self, account: _Account, now: int, *, done: bool) -> None:
        """Attribute a node's time since its last change."""
        cause, since = account.cause, account.since
        if cause == _WORLD:
            assert self.round is not None
            last = self.round.done(now) if done else self.round.cut_off(now, 0)
            self._leave_world(account, now, last)
            return
        self._open[cause] -= 1
        self._open_since[cause] -= since
        self.closed[cause] += now - since
        account.spent[cause] += now - since
        account.since = now
        if self._listener is not None and now > since:
            parts = nothing()
            parts[cause] = now - since
            self._listener.node_spent(account.node, since, now, parts)

    def _leave_world(self, account: _Account, now: int, last: Sequence[int]) -> None:
        """Take a node out of the world; ``last`` is its time since the last new step, by cause."""
        round_ = self.round
        assert round_ is not None
        for parts in (round_.spent, last):
            add(account.spent, parts)
            add(self.closed, parts)
        self._in_world -= 1
        account.since = now
        if self._listener is not None:
            self._listener.node_ran(account.node, round_.number, round_.since, round_.proved)
            if now > round_.proved:
                self._listener.node_spent(account.node, round_.proved, now, last)

    # ---- incidents

    def _note_incident(self, event: inputs.Input, now: int, machine: JobMachine) -> None:
        book, incident = self.incidents, machine.incident
        over = machine.outcome is not None
        away = any(not self.accounts[i].pending for i in self._away)
        if book.master is not None and (over or not away):
            book.end_master(now, self.sums(now), trains=self.round is not None)
        if book.open is None and incident is not None and not over:
            # A fault that ends no world: others go on, no world runs, or the report is late.
            entry = IncidentAccount(now, incident.round, self.sums(now), survived=incident.survived)
            if incident.survived:
                entry.since, entry.steps_lost = self._first_sign(event, now, machine), 0
            book.begin(entry)
        if book.open is None:
            return
        if incident is not None and (incident.decided or over):
            book.describe(incident)
        if incident is None or over:
            book.end(now, self.sums(now))

    # ---- the end, and invariants

    def finish(self, now: float) -> None:
        """Attribute all open time until ``now``; no input can be handled afterwards."""
        at = max(self._now, microseconds(now))
        for account in list(self.accounts.values()):
            if account.cause == _WORLD:
                assert self.round is not None
                self._leave_world(account, at, self.round.unproved(at))
                account.cause = SHUTDOWN
                self._begin(SHUTDOWN, at)
            self._end_interval(account, at, done=True)
            self._begin(account.cause, at)
        self._now = at

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        now = self._now
        assert sum(self.sums(now)) == self.wall(now), "the causes do not add up to the wall time"
        assert min(self.sums(now)) >= 0, "a cause has a negative time"
        assert self._in_world == sum(a.cause == _WORLD for a in self.accounts.values())
        assert self._pending == sum(a.pending for a in self.accounts.values())
        assert not self._in_world or self.round is not None
        assert self._short_since < 0 or self.round is not None, (
            "no world, yet one with too few nodes"
        )
        if self.round is not None:
            round_ = self.round
            assert sum(round_.so_far(now)) == now - round_.since, "a round's time has a gap"
            assert sum(round_.spent) == round_.proved - round_.since
            assert sum(round_.pending) == round_.settled - round_.proved
        for account in self.accounts.values():
            assert sum(account.spent) == account.since - account.began, "a node's time has a gap"


def _is_there(node: Node, machine: JobMachine) -> bool:
    """Return whether a node's time counts; that of instances does not, which make no steps."""
    if node.status.final or node.gone or machine.state.is_instance(node):
        return False
    return machine.outcome is None or node.connected
