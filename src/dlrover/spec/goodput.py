"""What the time of a job's nodes went into: the causes, and the sums that a report shows."""

from __future__ import annotations

import enum

import msgspec


class Cause(str, enum.Enum):
    """What a node's time goes into. The value is its key in JSON and its label in metrics."""

    PRODUCTIVE = "productive"
    """Training steps that had not been made before."""
    DATA = "data"
    """Waiting for the next batch."""
    EVAL = "eval"
    """Evaluation."""
    CHECKPOINT_BLOCK = "checkpoint_block"
    """Training held up by saving or loading a checkpoint."""
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
    """From a fault's first sign to its detection, as far as no step was completed meanwhile."""
    WAITING_FOR_RESOURCES = "waiting_for_resources"
    """Until an ordered node connects, and for nodes that wait while there are too few for a world."""
    IDLE = "idle"
    """A spare node, while the world trains without it."""
    SHUTDOWN = "shutdown"
    """From the last step of a node's workers, or the end of the job, to the node's leaving."""
    NOT_MEASURED = "not_measured"
    """In a world whose program has reported no training step."""

    @property
    def label(self) -> str:
        """The cause in words."""
        return "start-up" if self is Cause.START_UP else self.value.replace("_", " ")


CAUSES = tuple(Cause)
"""Every cause, in the order of tables."""


class IncidentKind(str, enum.Enum):
    """What an incident interrupted."""

    TRAINING = "training"
    """A fault stopped the workers; the incident lasts until the first new step."""
    MASTER = "master"
    """The master died; the incident lasts until the nodes are connected to the next one. Training may go on."""


class IncidentCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one incident cost. Seconds are summed over all nodes."""

    kind: IncidentKind = IncidentKind.TRAINING
    """What it interrupted: `training`, or only the `master`, without which training may go on."""

    since: float
    """When the fault's first sign was, seconds since the epoch."""
    until: float
    """When the first new step was completed, or the job ended, or the report was made."""
    over: bool
    """Whether training went on or the job ended."""
    title: str
    """What happened, for instance ``rank 1 was killed by SIGKILL``."""
    node: int
    """The node on which it happened, -1 if it is not known."""
    round: int
    """The round that it interrupted."""
    seconds: dict[str, float]
    """What the time until the first new step went into, and later the steps made again, by `Cause`."""
    steps_lost: int
    """Steps that it undid: made before, and to be made again. A step counts each time that it is undone. -1 while that
    is not known."""

    @property
    def lost(self) -> float:
        """Seconds of all nodes that the incident cost."""
        return sum(self.seconds.values())


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's time went into. The sum of ``seconds`` is ``wall_seconds``."""

    goodput_ratio: float | None
    """Productive seconds of all seconds; None while no training step was reported."""
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
    """Incidents before these that are no longer listed."""
    earlier_incident_seconds: float = 0.0
    """What they cost in all."""
    rounds_without_first_step: int = 0
    """Rounds after the first whose programs did not report with which step they began. Steps that they made
    again count as productive, so the ratio is then an upper bound."""

    def in_words(self) -> str:
        """The ratio as people read it: ``93.1 %``, ``at most 93.1 %`` or ``not measured``."""
        if self.goodput_ratio is None:
            return "not measured"
        bound = "at most " if self.rounds_without_first_step else ""
        return f"{bound}{100 * self.goodput_ratio:.1f} %"

    def largest_loss(self) -> tuple[Cause, float] | None:
        """The cause that is a loss with the most seconds; None without any."""
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
