"""Faults, what the job does about them, and the recovery."""

from __future__ import annotations

import msgspec

from dlrover.spec.failure import Action, Failure, Rung, Verdict
from dlrover.spec.words import counted


class WorkerFailed(msgspec.Struct, frozen=True, tag="worker_failed"):
    """A worker ended in failure."""

    failure: Failure
    verdict: Verdict

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"{self.verdict.title} ({self.verdict.origin.value})."


class RestartDecided(msgspec.Struct, frozen=True, tag="restart_decided"):
    """The job restarts its workers after a fault."""

    restart: int
    reason: str
    cause: str = ""
    action: Action = Action.RESTART
    node: int = -1
    rung: Rung = Rung.PROCESS
    """Rung of the ladder of responses."""
    successor: int = -1
    """Node that takes the place of ``node`` at once; -1 if none does."""
    ranks: tuple[int, ...] = ()
    """The ranks that start again, if the others go on."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        done = {
            Action.RESTART_FRESH: f"; node {self.node} starts its workers afresh",
            Action.RELAUNCH: f"; the job goes on without node {self.node}",
            Action.MORE_MEMORY: f"; node {self.node} needs more memory",
        }
        then = {
            Rung.IN_PROCESS: f"; the others go on in their processes; {_ranks(self.ranks)} started again",
            Rung.SPARE: f"; spare node {self.successor} takes the place of node {self.node}",
            Rung.ELSEWHERE: f"; another node will replace node {self.node}",
            Rung.SMALLER: "; the job has fewer nodes from now on",
        }
        return f"Restart {self.restart}: {self.reason}{done.get(self.action, '')}{then.get(self.rung, '')}."


def _ranks(ranks: tuple[int, ...]) -> str:
    named = ", ".join(map(str, ranks))
    return f"rank {named} is" if len(ranks) == 1 else f"ranks {named} are"


class ReplicaJoined(msgspec.Struct, frozen=True, tag="replica_joined"):
    """A rank that was started again trains with the others."""

    rank: int
    members: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Rank {self.rank} trains again, with {counted(self.members - 1, 'other')}."


class HostExcluded(msgspec.Struct, frozen=True, tag="host_excluded"):
    """A host is excluded from the job for some time."""

    hostname: str
    seconds: float
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Host {self.hostname} is kept out for {self.seconds:g} s: {self.reason}."


class HangFound(msgspec.Struct, frozen=True, tag="hang_found"):
    """No rank makes progress, and its processes show that none will."""

    round: int
    ranks: tuple[int, ...]
    """The ranks that the others wait for; empty if nothing distinguishes them."""
    place: str
    """Place of these ranks."""
    groups: str
    """Places of all ranks."""
    seconds: float
    """Time without progress."""
    evidence: str = ""
    """File with the stacks in the job directory; empty if it could not be written."""
    thread: str = ""
    """The exception that had ended a thread of one of these ranks before; empty if none is known."""
    nodes: tuple[int, ...] = ()
    """The nodes of the ranks that the others wait for."""

    @property
    def title(self) -> str:
        """What happened, as a part of a sentence."""
        return f"the training hung in {self.place or self.groups}"

    def sentence(self) -> str:
        """Return the event as one sentence."""
        thread = f"; {self.thread}" if self.thread else ""
        where = f"; see {self.evidence}" if self.evidence else ""
        return (
            f"The training has been hanging for {self.seconds:.0f} s: {self.groups}{thread}{where}."
        )


class SlowRank(msgspec.Struct, frozen=True, tag="slow_rank"):
    """A rank holds up the others."""

    rank: int
    node: int
    factor: float
    """Its own time per step as a multiple of the median rank's."""
    cause: str
    """``data``: it waits for its batches; ``compute``: anything else."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        why = "waits for its data" if self.cause == "data" else "computes"
        return (
            f"Rank {self.rank} on node {self.node} is slow: it {why}, and takes {self.factor:.2f} "
            f"times as long for a step as the median rank."
        )


class SlowRankRecovered(msgspec.Struct, frozen=True, tag="slow_rank_recovered"):
    """A slow rank is as fast as the others again."""

    rank: int
    node: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Rank {self.rank} on node {self.node} is no longer slow."


class Recovered(msgspec.Struct, frozen=True, tag="recovered"):
    """The first new step after a fault: the incident is over."""

    round: int
    seconds: float
    survived: bool = False
    """True if other ranks trained meanwhile."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        what = "All ranks train" if self.survived else "Training steps"
        return f"{what} again, {self.seconds:.2f} s after the fault was seen."


class StepsUndone(msgspec.Struct, frozen=True, tag="steps_undone"):
    """A round began with an earlier step than the last one that the job had reached."""

    round: int
    reached: int
    first_step: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        again = self.reached - self.first_step
        steps = "1 step is" if again == 1 else f"{again} steps are"
        return f"Step {self.reached} -> {self.first_step}: {steps} done again."
