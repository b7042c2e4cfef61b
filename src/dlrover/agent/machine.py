"""The agent's decisions: when to join, to start and to stop the workers, and what to tell the master.

A plain state machine: no clock, no I/O. After a reconnection it says again what still holds, so that
nothing is lost when a connection breaks, and nothing here waits for the master while workers run.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from dlrover.rpc import messages
from dlrover.spec.check import CheckOrder, CheckReport
from dlrover.spec.failure import Failure
from dlrover.spec.outcome import Outcome
from dlrover.spec.world import Holding, World


class Stage(str, enum.Enum):
    """What the node is doing."""

    CONNECTING = "connecting"
    """The master has not been heard of yet."""
    JOINED = "joined"
    """Ready for `AgentMachine.round`; no workers."""
    RUNNING = "running"
    FAILED = "failed"
    """A worker failed; the master has not said yet what to do. Other workers may still run."""
    SUCCEEDED = "succeeded"
    """All workers ended with exit code 0."""
    STOPPING = "stopping"
    """The workers are being stopped, to join `AgentMachine.round` or to leave."""
    LEFT = "left"


# ---- inputs


class WorkerEnded(msgspec.Struct, frozen=True):
    """A worker ended by itself; ``failure`` is None after exit code 0."""

    local_rank: int
    failure: Failure | None


class WorkersStopped(msgspec.Struct, frozen=True):
    """`StopWorkers` is done: nothing of the workers is left."""


class Abandoned(msgspec.Struct, frozen=True):
    """The node must leave without the master's word: its owner died, or the master is gone for good."""

    outcome: Outcome


class Checked(msgspec.Struct, frozen=True):
    """`RunCheck` is done."""

    report: CheckReport


Input: TypeAlias = messages.MasterMessage | Checked | WorkerEnded | WorkersStopped | Abandoned

# ---- commands


class JoinRound(msgspec.Struct, frozen=True):
    """Tell the master that this node is ready for ``round``."""

    round: int


class Say(msgspec.Struct, frozen=True):
    """Tell the master something. Dropped while there is no connection."""

    message: messages.Failed | messages.Succeeded | CheckReport


class RunCheck(msgspec.Struct, frozen=True):
    """Check this node, then report `Checked`. What an earlier order left undone is given up."""

    order: CheckOrder


class StartWorkers(msgspec.Struct, frozen=True):
    """Start this node's workers of a world."""

    world: World
    fresh: bool = False
    """From processes that have loaded nothing yet."""


class StopWorkers(msgspec.Struct, frozen=True):
    """Stop all workers, then report `WorkersStopped`."""


class Leave(msgspec.Struct, frozen=True):
    """End the agent."""

    outcome: Outcome


Command: TypeAlias = JoinRound | Say | RunCheck | StartWorkers | StopWorkers | Leave


@dataclass
class AgentMachine:
    """One agent's state."""

    nproc: int
    stage: Stage = Stage.CONNECTING
    #: given by the master; -1 before
    node_id: int = -1
    #: the round to join, or the one that was joined
    round: int = 0
    #: the world whose workers run or ran; None before the first and after they were stopped
    world: World | None = None
    #: local ranks of workers that have not ended; empty unless there is a world
    running: set[int] = field(default_factory=set)
    #: failures in ``world``, until the next one
    failures: list[Failure] = field(default_factory=list)
    #: the highest round that a master has told of
    last_round: int = 0
    #: the highest epoch of a master that was heard of
    epoch: int = 0
    #: the last order to check the node, before its workers start
    order: CheckOrder | None = None
    #: the answer to it, once there is one
    report: CheckReport | None = None
    #: set once the node is to leave
    outcome: Outcome | None = None

    @property
    def running_round(self) -> int:
        """The round whose workers run, ended or are being stopped here; 0 for none."""
        return self.world.round if self.world is not None else 0

    def holding(self, steps: int) -> Holding:
        """What this node holds, for a master that may know nothing; ``steps`` are its workers'."""
        return Holding(
            round=self.last_round,
            world=self.world,
            nproc=self.nproc,
            steps=steps,
            succeeded=self.stage is Stage.SUCCEEDED,
            stopping=self.stage is Stage.STOPPING,
        )

    def refuses(self, event: Input) -> bool:
        """Whether ``event`` comes from a master that another one has replaced: hang up on it."""
        return isinstance(event, messages.Welcome) and event.epoch < self.epoch

    def handle(self, event: Input) -> list[Command]:
        """Take in one input; what is to be done about it."""
        if self.stage is Stage.LEFT:
            return []
        return _HANDLERS[type(event)](self, event)

    def _welcome(self, event: messages.Welcome) -> list[Command]:
        self.node_id = event.node_id
        self.epoch = max(self.epoch, event.epoch)
        said: list[Command] = [Say(messages.Failed(failure)) for failure in self.failures]
        if self.stage in (Stage.CONNECTING, Stage.JOINED):
            self.stage = Stage.JOINED
            self._told(event.round)
            said.append(JoinRound(self.round))
        elif self.stage is Stage.SUCCEEDED:
            said.append(Say(messages.Succeeded(self.running_round)))
        return said

    def _told(self, round_: int) -> None:
        self.round = round_
        self.last_round = max(self.last_round, round_)

    def _called(self, event: messages.CallToRound) -> list[Command]:
        self._told(event.round)
        if self.stage is Stage.JOINED:
            return [JoinRound(self.round)]
        if self.stage in (Stage.RUNNING, Stage.FAILED, Stage.SUCCEEDED):
            self.stage = Stage.STOPPING
            return [StopWorkers()]
        return []

    def _check_ordered(self, order: CheckOrder) -> list[Command]:
        if self.stage is not Stage.JOINED:
            return []
        if self.order is not None and _same(self.order, order):
            return [Say(self.report)] if self.report is not None else []
        self.order, self.report = order, None
        return [RunCheck(order)]

    def _checked(self, event: Checked) -> list[Command]:
        if self.order is None or not _same(self.order, event.report):
            return []
        self.report = event.report
        return [Say(self.report)]

    def _assigned(self, event: messages.AssignWorld) -> list[Command]:
        world = event.world
        if self.stage is not Stage.JOINED:
            return []  # a repetition: these workers are already there, or are being stopped
        self.stage = Stage.RUNNING
        self._told(world.round)
        self.world = world
        self.order = self.report = None
        self.failures = []
        self.running = set(range(self.nproc))
        return [StartWorkers(world, event.fresh)]

    def _worker_ended(self, event: WorkerEnded) -> list[Command]:
        if self.world is None:
            return []
        self.running.discard(event.local_rank)
        if event.failure is not None:
            self.failures.append(event.failure)
            if self.stage is Stage.RUNNING:
                self.stage = Stage.FAILED
            return [Say(messages.Failed(event.failure))]
        if self.stage is Stage.RUNNING and not self.running:
            self.stage = Stage.SUCCEEDED
            return [Say(messages.Succeeded(self.running_round))]
        return []

    def _workers_stopped(self, _event: WorkersStopped) -> list[Command]:
        self.running = set()
        self.world = None
        if self.outcome is not None:
            self.stage = Stage.LEFT
            return [Leave(self.outcome)]
        self.stage = Stage.JOINED
        return [JoinRound(self.round)]

    def _dismissed(self, event: messages.Dismiss | Abandoned) -> list[Command]:
        outcome = event.outcome
        if self.outcome is not None:
            return []
        self.outcome = outcome
        if self.stage is Stage.STOPPING:
            return []
        if self.world is not None:
            self.stage = Stage.STOPPING
            return [StopWorkers()]
        self.stage = Stage.LEFT
        return [Leave(outcome)]

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        has_world = self.stage in (Stage.RUNNING, Stage.FAILED, Stage.SUCCEEDED, Stage.STOPPING)
        assert has_world or self.world is None, "a world without workers"
        assert not has_world or self.world is not None, "workers without a world"
        assert self.world is not None or not self.running, "running workers without a world"
        assert self.stage is not Stage.SUCCEEDED or not (self.running or self.failures)
        assert self.stage is not Stage.FAILED or self.failures, "failed without a failure"
        assert self.round <= self.last_round, "a round that nobody told of"
        assert self.order is None or self.world is None, "a check beside workers"
        assert self.report is None or self.order is not None, "a report that nobody asked for"
        assert self.stage is not Stage.LEFT or self.outcome is not None, "left without an outcome"


def _same(order: CheckOrder, other: CheckOrder | CheckReport) -> bool:
    """Whether two messages are about the same round of the same check."""
    return (order.check, order.round) == (other.check, other.round)


_HANDLERS: dict[type, Callable[[AgentMachine, Any], list[Command]]] = {
    messages.Welcome: AgentMachine._welcome,  # noqa: SLF001
    messages.CallToRound: AgentMachine._called,  # noqa: SLF001
    messages.AssignWorld: AgentMachine._assigned,  # noqa: SLF001
    messages.Dismiss: AgentMachine._dismissed,  # noqa: SLF001
    CheckOrder: AgentMachine._check_ordered,  # noqa: SLF001
    Checked: AgentMachine._checked,  # noqa: SLF001
    Abandoned: AgentMachine._dismissed,  # noqa: SLF001
    WorkerEnded: AgentMachine._worker_ended,  # noqa: SLF001
    WorkersStopped: AgentMachine._workers_stopped,  # noqa: SLF001
}
