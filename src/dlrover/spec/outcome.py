"""Outcome of a job: why it ended, and the use of its time."""

from __future__ import annotations

import enum

import msgspec

from dlrover.spec.failure import Failure, Verdict


class Cause(str, enum.Enum):
    """Use of a node's time. The value is its key in JSON and its label in metrics."""

    PRODUCTIVE = "productive"
    """Training steps that had not been made before."""
    DATA = "data"
    """Waiting for the next batch."""
    EVAL = "eval"
    """Evaluation."""
    CHECKPOINT_BLOCK = "checkpoint_block"
    """Training blocked by saving or loading a checkpoint."""
    COMPILE = "compile"
    """Compiling a model."""
    START_UP = "start_up"
    """From the completion of a world to its first step: processes, imports, set-up, loading."""
    RENDEZVOUS = "rendezvous"
    """Between two worlds while there are enough nodes: stopping workers, joining, waiting for others."""
    NODE_CHECK = "node_check"
    """Checks of a node before it may train."""
    RECOMPUTED_STEPS = "recomputed_steps"
    """Steps made again because a fault undid them, and steps that an interruption cut off."""
    FAULT_DETECTION = "fault_detection"
    """From a fault's first sign, or the last step completed after it, to its detection."""
    WAITING_FOR_RESOURCES = "waiting_for_resources"
    """Until a requested node connects while no world trains, and while nodes wait because there are too few."""
    DEGRADED = "degraded"
    """A node that the job wants is not there yet, or ranks do not train yet, and the others train without them."""
    IDLE = "idle"
    """A spare, while the world trains without it."""
    SHUTDOWN = "shutdown"
    """From the last step of a node's workers, or the end of the job, until the node leaves."""
    NOT_MEASURED = "not_measured"
    """In a world whose program has reported no training step."""

    @property
    def label(self) -> str:
        """The cause in words."""
        return "start-up" if self is Cause.START_UP else self.value.replace("_", " ")


CAUSES = tuple(Cause)
"""Every cause, in the order of tables."""


class IncidentKind(str, enum.Enum):
    """Kind of interruption."""

    TRAINING = "training"
    """A fault stopped the workers; the incident lasts until the first new step."""
    MASTER = "master"
    """The master died; the incident lasts until the nodes connect to the next one. Training may continue."""


class IncidentCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one incident. Seconds are summed over all nodes."""

    kind: IncidentKind = IncidentKind.TRAINING
    """Interrupted part: `training`, or only the `master`, without which training may continue."""

    since: float
    """Time of the fault's first sign, seconds since the epoch."""
    until: float
    """When the first new step was completed, the job ended, or the report was made."""
    over: bool
    """True if training has resumed or the job has ended."""
    title: str
    """What happened, for instance ``rank 1 was killed by SIGKILL``."""
    node: int
    """The node on which it happened; -1 if unknown."""
    round: int
    """The round that it interrupted."""
    seconds: dict[str, float]
    """Seconds by `Cause`: the time until the first new step, and later the steps made again."""
    steps_lost: int
    """Steps that the incident undid, which must be made again. A step counts each time that it is undone. -1
    while unknown."""

    @property
    def lost(self) -> float:
        """Seconds of all nodes that the incident cost."""
        return sum(self.seconds.values())


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a job's time. The sum of ``seconds`` is ``wall_seconds``."""

    goodput_ratio: float | None
    """Productive seconds divided by all seconds; None while no training step was reported."""
    wall_seconds: float
    """Wall time of all nodes together, each from its launch or first connection to its end."""
    job_seconds: float
    """Wall time of the job, from its submission to its end."""
    nodes: int
    """Nodes that the job ever had."""
    seconds: dict[str, float]
    """Seconds of all nodes by `Cause`."""
    incidents: tuple[IncidentCost, ...] = ()
    """The latest incidents, oldest first."""
    earlier_incidents: int = 0
    """Earlier incidents that are no longer listed."""
    earlier_incident_seconds: float = 0.0
    """Total cost of the earlier incidents in seconds."""
    degraded_seconds: float = 0.0
    """Wall time of the job in which a world trained without some of its ranks, or with fewer nodes than the job
    wants; where nodes come by themselves, with fewer than it once had."""
    rounds_without_first_step: int = 0
    """Rounds after the first whose programs did not report their first step. The steps that they made again
    count as productive, so the ratio is then an upper bound."""

    def in_words(self) -> str:
        """Return the ratio as people read it: ``93.1 %``, ``at most 93.1 %`` or ``not measured``."""
        if self.goodput_ratio is None:
            return "not measured"
        bound = "at most " if self.rounds_without_first_step else ""
        return f"{bound}{100 * self.goodput_ratio:.1f} %"

    def largest_loss(self) -> tuple[Cause, float] | None:
        """Return the loss with the most seconds as its cause and seconds; None without any loss."""
        lossless = (Cause.PRODUCTIVE, Cause.NOT_MEASURED)
        losses = [
            (seconds, cause)
            for cause in CAUSES
            if cause not in lossless and (seconds := self.seconds.get(cause.value))
        ]
        if not losses:
            return None
        seconds, cause = max(losses, key=lambda loss: loss[0])
        return cause, seconds


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """End of a job, as its master saw it."""

    exit_code: int
    """Exit code of the launcher; see `dlrover.errors.ExitCode`."""
    reason: str
    """Why the job ended, in one sentence."""
    failure: Failure | None = None
    """The root cause, with its texts bounded; None if no worker's failure ended the job."""
    verdict: Verdict | None = None
    """Meaning of `failure`, or of the hang that ended the job; None if neither did."""
    others: tuple[str, ...] = ()
    """One line for each other failed rank of that round: at most 8, then ``and N more``."""
    restarts: int = 0
    """Rounds started after a failure."""
    steps: int = 0
    """Optimizer steps that the job completed."""
    seconds: float = 0.0
    """Wall time from the submission of the job to its end."""
    goodput: Goodput | None = None
    """Use of the job's time; None if the master runs elsewhere."""
    skipped: tuple[str, ...] = ()
    """One sentence for each skipped sample: at most 3, then ``And N more``."""
    job_dir: str = ""
    """Directory of the job's journal, logs and memory checkpoints."""
