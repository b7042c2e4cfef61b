"""Typed events of a job: the content of ``events.jsonl`` and the output of ``dlrover events``.

An event is written once, when its decision is made, and reads as one sentence. Each file has those of one subject.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dlrover.spec.events.faults import (
    HangFound,
    HostExcluded,
    Recovered,
    ReplicaJoined,
    RestartDecided,
    SlowRank,
    SlowRankRecovered,
    StepsUndone,
    WorkerFailed,
)
from dlrover.spec.events.job import (
    JobEnded,
    JobSubmitted,
    MasterAdopted,
    MasterRecovered,
    SamplesSkipped,
    StepStored,
    StrategyChosen,
)
from dlrover.spec.events.nodes import (
    MemoryBound,
    MemoryGrows,
    MigrationEnded,
    NodeConnected,
    NodeLaunched,
    NodeLost,
    NodeMigrates,
    NodeReleased,
    NodeSucceeded,
    NodeWaits,
    SpareReady,
    SparesDecided,
    SpareTakesPlace,
)
from dlrover.spec.events.roles import (
    CoordinatorRecovered,
    InstanceEnded,
    InstanceRestarts,
    InstanceStarted,
    InstanceStuck,
    KeeperEnded,
    RoleEnded,
    RoleRestarts,
    RolesSubmitted,
    RoleStarts,
)
from dlrover.spec.events.rounds import (
    NodeCheckFinding,
    NodeCheckFinished,
    NodeCheckStarted,
    RoundCompleted,
    RoundOpened,
)
from dlrover.spec.events.scaling import (
    AutoScalingEnded,
    FirstSize,
    HotServer,
    JobScaled,
    PlanDropped,
    PlanMade,
    PlanMeasured,
    SizeSettled,
    SlotsRestored,
)

EventBody: TypeAlias = (
    JobSubmitted
    | MasterRecovered
    | MasterAdopted
    | RolesSubmitted
    | CoordinatorRecovered
    | RoleStarts
    | RoleRestarts
    | RoleEnded
    | NodeLaunched
    | SparesDecided
    | SpareReady
    | SpareTakesPlace
    | NodeWaits
    | NodeConnected
    | NodeLost
    | JobScaled
    | NodeReleased
    | RoundOpened
    | NodeCheckStarted
    | NodeCheckFinding
    | NodeCheckFinished
    | RoundCompleted
    | WorkerFailed
    | InstanceStarted
    | InstanceRestarts
    | InstanceStuck
    | InstanceEnded
    | KeeperEnded
    | RestartDecided
    | ReplicaJoined
    | HostExcluded
    | HangFound
    | SlowRank
    | SlowRankRecovered
    | SamplesSkipped
    | StrategyChosen
    | Recovered
    | StepsUndone
    | StepStored
    | NodeSucceeded
    | HotServer
    | SlotsRestored
    | FirstSize
    | MemoryGrows
    | MemoryBound
    | NodeMigrates
    | MigrationEnded
    | PlanMade
    | PlanMeasured
    | PlanDropped
    | SizeSettled
    | AutoScalingEnded
    | JobEnded
)


class Event(msgspec.Struct, frozen=True):
    """An event with its place in the job's history."""

    seq: int
    """Number of the event, from 1 without gaps."""
    time: float
    """Seconds since the epoch."""
    body: EventBody

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return self.body.sentence()
