"""The agent's state machine: decides when to join, start and stop the workers, and reports to the master.

It has no clock and does no I/O. After a reconnection it repeats the messages that still hold, so that a
broken connection loses none. While workers run, it never waits for the master.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from dlrover.rpc import messages
from dlrover.spec.check import CheckOrder, CheckReport
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.outcome import Outcome
from dlrover.spec.requests.membership import Members
from dlrover.spec.world import Holding, World


class Stage(str, enum.Enum):
    """The stage of the node's life."""

    CONNECTING = "connecting"
    """No message of the master has arrived yet."""
    JOINED = "joined"
    """Ready for `AgentMachine.round`; no workers."""
    RUNNING = "running"
    FAILED = "failed"
    """A worker failed and the master has not decided yet. Other workers may still run."""
    SUCCEEDED = "succeeded"
    """All workers ended with exit code 0."""
    STOPPING = "stopping"
    """The workers are being stopped, to join `AgentMachine.round` or to leave."""
    LEFT = "left"


# ---- inputs


class WorkerEnded(msgspec.Struct, frozen=True):
    """Input: a worker ended by itself; ``failure`` is None after exit code 0."""

    local_rank: int
    failure: Failure | None


class WorkersStopped(msgspec.Struct, frozen=True):
    """Input: `StopWorkers` is done; no process of the workers remains."""


class Abandon(msgspec.Struct, frozen=True):
    """Input: this node shuts down without the master's order, for instance on a signal."""

    outcome: Outcome
    store: bool
    """True to store what the workers have in memory first."""


Input: TypeAlias = messages.MasterMessage | Abandon | CheckReport | WorkerEnded | WorkersStopped

# ---- commands


class JoinRound(msgspec.Struct, frozen=True):
    """Command: report to the master that this node is ready for ``round``."""

    round: int


class EndWorker(msgspec.Struct, frozen=True):
    """Command: end a worker, if it runs, to start it again; its `WorkerEnded` follows in any case."""

    local_rank: int


class StopWorkers(msgspec.Struct, frozen=True):
    """Command: stop all workers, then report `WorkersStopped`."""


class FlushMemory(msgspec.Struct, frozen=True):
    """Command: have what the workers have in memory stored once they end, or now if they have ended."""

    partial: bool = False
    """True if nodes of the world are lost."""


Command: TypeAlias = (
    JoinRound
    | EndWorker
    | FlushMemory
    | StopWorkers
    | messages.Failed
    | messages.Leaving
    | messages.Succeeded
    | CheckReport
    | CheckOrder
    | messages.AssignWorld
    | messages.StartAgain
    | Members
    | messages.StandBy
    | messages.Dismiss
)
"""Besides its own, a command is a message: one to the master is sent, or dropped without a connection. Of the
master's, `CheckOrder` checks this node (the `CheckReport` is the next input; an unfinished earlier check is
cancelled), `AssignWorld` starts its workers, `StartAgain` some of them, `Members` is for them, `StandBy` loads what
they need, and `Dismiss` ends the agent."""


@dataclass
class AgentMachine:
    """The state of one agent."""

    nproc: int
    stage: Stage = Stage.CONNECTING
    #: id assigned by the master; -1 before
    node_id: int = -1
    #: the round to join, or the joined one
    round: int = 0
    #: the world whose workers run or ran; None before the first and after they were stopped
    world: World | None = None
    #: local ranks of workers that have not ended; empty without a world
    running: set[int] = field(default_factory=set)
    #: attempt of each worker's process, by local rank
    attempts: dict[int, int] = field(default_factory=dict)
    #: by local rank, the attempt of each worker that is to be started again once it has been ended, and if afresh
    again: dict[int, tuple[int, bool]] = field(default_factory=dict)
    #: the newest membership of ``world``; None before the master has sent one
    members: Members | None = None
    #: failures in ``world``, until the next one or until the worker is started again
    failures: list[Failure] = field(default_factory=list)
    #: the highest round whose workers were stopped
    left: int = 0
    #: the world's highest attempt there
    left_attempt: int = 0
    #: the highest round that a master has announced
    last_round: int = 0
    #: the highest epoch of a master so far
    epoch: int = 0
    #: the last order to check the node; None once workers start
    order: CheckOrder | None = None
    #: the answer to ``order``; None until the check is done
    report: CheckReport | None = None
    #: set once the node must leave
    outcome: Outcome | None = None
    #: True once what the workers have in memory is to be stored before it leaves
    stores: bool = False
    #: said to each master if the node leaves without an order
    notice: messages.Leaving | None = None

    @property
    def running_round(self) -> int:
        """Round whose workers run, ended or are being stopped here; 0 for none."""
        return self.world.round if self.world is not None else 0

    def holding(self, steps: int) -> Holding:
        """Return this node's state for a master that may know nothing; ``steps`` are its workers' steps."""
        return Holding(
            round=self.last_round,
            world=self.world,
            left=self.left,
            left_attempt=self.left_attempt,
            nproc=self.nproc,
            steps=steps,
            succeeded=self.stage is Stage.SUCCEEDED,
            stopping=self.stage is Stage.STOPPING,
            members=self.members,
            attempts=dict(self.attempts) if any(self.attempts.values()) else {},
        )

    def refuses(self, event: Input) -> bool:
        """Return whether ``event`` comes from a replaced master, whose connection the caller must close."""
        return isinstance(event, messages.Welcome) and event.epoch < self.epoch

    def handle(self, event: Input) -> list[Command]:  # noqa: C901, PLR0911, PLR0912 - one case per input
        """Process one input and return the resulting commands."""
        if self.stage is Stage.LEFT:
            return []
        match event:
            case messages.Welcome():
                return self._welcome(event)
            case messages.CallToRound():
                return [*_flush(event.store), *self._join_later(event.round)]
            case messages.AssignWorld():
                return self._assign(event)
            case messages.StartAgain():
                return self._start_again(event)
            case Members():
                return self._note_members(event)
            case CheckOrder():
                return self._order_check(event)
            case CheckReport():
                return self._note_check(event)
            case WorkerEnded():
                return self._worker_ended(event)
            case WorkersStopped():
                return self._workers_stopped()
            case messages.Dismiss():
                return self._leave(event.outcome, event.store, partial=event.partial)
            case Abandon():
                return self._abandon(event)
            case messages.StandBy():
                return [event] if self.stage is Stage.JOINED else []
            case messages.CollectEvidence() | messages.StoreMemory():
                return []

    def _welcome(self, event: messages.Welcome) -> list[Command]:
        self.node_id = event.node_id
        self.epoch = max(self.epoch, event.epoch)
        said: list[Command] = [messages.Failed(failure) for failure in self.failures]
        if self.notice is not None:
            said.append(self.notice)
        if self.stage in (Stage.CONNECTING, Stage.JOINED):
            self.stage = Stage.JOINED
            self._note_round(event.round)
            said.append(JoinRound(self.round))
        elif self.stage is Stage.SUCCEEDED:
            said.append(messages.Succeeded(self.running_round))
        return said

    def _note_round(self, round_: int) -> None:
        self.round = round_
        self.last_round = max(self.last_round, round_)

    def _join_later(self, round_: int) -> list[Command]:
        self._note_round(round_)
        if self.stage is Stage.JOINED:
            return [JoinRound(self.round)]
        if self.stage in (Stage.RUNNING, Stage.FAILED, Stage.SUCCEEDED):
            self.stage = Stage.STOPPING
            return [StopWorkers()]
        return []

    def _note_members(self, event: Members) -> list[Command]:
        if event.round != self.running_round:
            return []
        known = self.members
        if known is None or (event.number, event.over) > (known.number, known.over):
            self.members = event
        return [event]

    def _order_check(self, order: CheckOrder) -> list[Command]:
        if self.stage is not Stage.JOINED:
            return []
        if self.order is not None and _same(self.order, order):
            return [self.report] if self.report is not None else []
        self.order, self.report = order, None
        return [order]

    def _note_check(self, report: CheckReport) -> list[Command]:
        if self.order is None or not _same(self.order, report):
            return []
        self.report = report
        return [report]

    def _assign(self, event: messages.AssignWorld) -> list[Command]:
        world = event.world
        if self.stage is not Stage.JOINED:
            return []  # a repetition: these workers already run, or are being stopped
        self.stage = Stage.RUNNING
        self._note_round(world.round)
        self.world = world
        self.order = self.report = None
        self.failures = []
        self.running = set(range(self.nproc))
        self.attempts = dict.fromkeys(self.running, world.attempt)
        self.members = None
        return [event]

    def _start_again(self, event: messages.StartAgain) -> list[Command]:
        at_work = self.stage in (Stage.RUNNING, Stage.FAILED)
        if not at_work or event.round != self.running_round:
            return []
        due = {
            local: attempt
            for local, attempt in event.attempts.items()
            if attempt
            > max(self.attempts.get(local, attempt), self.again.get(local, (0, False))[0])
        }
        # A worker that runs has lost the others of its row: it is ended first.
        ended = [EndWorker(i) for i in due if i in self.running and i not in self.again]
        self.again |= {i: (due.pop(i), event.fresh) for i in self.running & due.keys()}
        return [*ended, *self._start_those(due, event.fresh)]

    def _start_those(self, due: dict[int, int], fresh: bool) -> list[Command]:
        """Start ended workers again."""
        if not due:
            return []
        self.attempts.update(due)
        self.running |= due.keys()
        self.failures = [f for f in self.failures if f.local_rank not in due]
        self.stage = Stage.FAILED if self.failures else Stage.RUNNING
        return [messages.StartAgain(self.running_round, due, fresh)]

    def awaits(self, round_: int, local_rank: int, attempt: int) -> bool:
        """Return whether a worker is still to be started in this attempt."""
        at_work = self.stage in (Stage.RUNNING, Stage.FAILED) and round_ == self.running_round
        return at_work and local_rank in self.running and self.attempts[local_rank] == attempt

    def _worker_ended(self, event: WorkerEnded) -> list[Command]:
        if self.world is None:
            return []
        self.running.discard(event.local_rank)
        attempt, fresh = self.again.pop(event.local_rank, (0, False))
        if attempt and self.stage in (Stage.RUNNING, Stage.FAILED):
            # It may be why the row was lost, if it was in its own end when it was to be ended.
            failure, again = event.failure, self._start_those({event.local_rank: attempt}, fresh)
            if failure is None or (failure.kind, failure.signal) == (
                FailureKind.SIGNAL,
                signal.SIGKILL,
            ):
                return again
            return [messages.Failed(failure), *again]
        if event.failure is not None:
            self.failures.append(event.failure)
            if self.stage is Stage.RUNNING:
                self.stage = Stage.FAILED
            return [messages.Failed(event.failure)]
        if self.stage is Stage.RUNNING and not self.running:
            self.stage = Stage.SUCCEEDED
            return [messages.Succeeded(self.running_round)]
        return []

    def _workers_stopped(self) -> list[Command]:
        if self.world is not None:
            now = self.running_round, self.world.attempt
            self.left, self.left_attempt = max((self.left, self.left_attempt), now)
        self.running = set()
        self.world = self.members = None
        self.attempts, self.again = {}, {}
        if self.outcome is not None:
            self.stage = Stage.LEFT
            return [messages.Dismiss(self.outcome)]
        self.stage = Stage.JOINED
        return [JoinRound(self.round)]

    def _abandon(self, event: Abandon) -> list[Command]:
        if self.outcome is None:
            self.notice = messages.Leaving(event.outcome.reason)
            return [self.notice, *self._leave(event.outcome, event.store)]
        return []

    def _leave(self, outcome: Outcome, store: bool, *, partial: bool = False) -> list[Command]:
        flush = _flush(store and not self.stores, partial=partial)
        self.stores = self.stores or store
        if self.outcome is not None:
            return flush
        self.outcome = outcome
        if self.stage is Stage.STOPPING:
            return flush
        if self.world is not None:
            self.stage = Stage.STOPPING
            return [*flush, StopWorkers()]
        self.stage = Stage.LEFT
        return [*flush, messages.Dismiss(outcome)]

    def validate(self) -> None:
        """Check the invariants; raise AssertionError at the first violation."""
        has_world = self.stage in (Stage.RUNNING, Stage.FAILED, Stage.SUCCEEDED, Stage.STOPPING)
        assert has_world or self.world is None, "a world without workers"
        assert not has_world or self.world is not None, "workers without a world"
        assert self.world is not None or not self.running, "running workers without a world"
        assert self.stage is not Stage.SUCCEEDED or not (self.running or self.failures)
        assert self.stage is not Stage.FAILED or self.failures, "failed without a failure"
        assert self.round <= self.last_round, "a round beyond the last one announced"
        assert self.order is None or self.world is None, "a check beside workers"
        assert self.again.keys() <= self.running, "a worker is to be ended that does not run"
        assert self.world is None or self.running <= self.attempts.keys(), (
            "a worker without an attempt"
        )
        assert self.members is None or self.members.round == self.running_round, (
            "a membership of another world"
        )
        assert self.report is None or self.order is not None, "a report without an order"
        assert self.stage is not Stage.LEFT or self.outcome is not None, "left without an outcome"


def _flush(wanted: bool, *, partial: bool = False) -> list[Command]:
    return [FlushMemory(partial)] if wanted else []


def _same(order: CheckOrder, other: CheckOrder | CheckReport) -> bool:
    """Return whether two messages concern the same round of the same check."""
    return (order.check, order.round) == (other.check, other.round)
