"""Changes of a job's size, and the plans behind them."""

from __future__ import annotations

import msgspec

from dlrover.spec.node import Size
from dlrover.spec.plan import Effect, ScaleKind
from dlrover.spec.words import counted


class JobScaled(msgspec.Struct, frozen=True, tag="job_scaled"):
    """The wanted number of nodes has changed."""

    before: int
    nodes: int
    source: str
    """``user`` or ``plan``."""
    reason: str
    role: str = ""
    """Role of these nodes; empty if they are all of the job's nodes."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        role = f"{self.role} " if self.role else ""
        count = f"{self.nodes} {role}node{'s' if self.nodes > 1 else ''}"
        return f"The job will have {count} instead of {self.before}: {self.reason}."


class HotServer(msgspec.Struct, frozen=True, tag="hot_server"):
    """More is asked of an embedding server than of the others: some of its hash slots move to them."""

    server: int
    ratio: float
    """Keys asked of it, as a multiple of the servers' mean."""
    expected: float
    """The same for the hottest server afterwards."""
    slots: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"Embedding server {self.server} gets {self.ratio:.2f} times the mean of all servers: "
            f"{counted(self.slots, 'slot')} {'move' if self.slots > 1 else 'moves'}; {self.expected:.2f} is expected."
        )


class SlotsRestored(msgspec.Struct, frozen=True, tag="slots_restored"):
    """An embedding server was lost with its newest rows: those of its hash slots are older ones now."""

    server: int
    """The server that has these slots now."""
    slots: int
    step: int | None
    """Step of the checkpoint that the rows come from; null if there is none: they are lost."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        whose = f"{counted(self.slots, 'slot')} of embedding server {self.server}"
        if self.step is None:
            return f"The rows of {whose} are lost: no checkpoint has them."
        return (
            f"The rows of {whose} are those of step {self.step}: a server was lost with newer ones."
        )


class FirstSize(msgspec.Struct, frozen=True, tag="first_size"):
    """The Brain chose the number of nodes with which the job starts."""

    nodes: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"The job starts with {counted(self.nodes, 'node')}, as the Brain says: {self.reason}."
        )


class PlanMade(msgspec.Struct, frozen=True, tag="plan_made"):
    """The auto-scaler begins to carry out a plan: other nodes, servers or batches."""

    number: int
    """1 for a job's first plan."""
    kind: ScaleKind
    nodes: int
    """Wanted number of nodes."""
    before: int
    """Current number of nodes."""
    reason: str
    effect: Effect | None = None
    unit: str = "samples/s"
    """Unit of the throughputs."""
    plan_id: str = ""
    """The Brain's id of the plan; empty if the job's master made it."""
    servers: int = 0
    """Wanted number of parameter servers; ``nodes`` then have the role worker."""
    servers_before: int = 0
    batch: int = 0
    """Wanted samples per step of all workers; 0: unchanged."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        expected = ""
        if self.effect is not None:
            expected = f"; {self.effect.throughput:.3g} {self.unit} are expected"
        whose = " of the Brain" if self.plan_id else ""
        return f"Plan {self.number}{whose}, {self.kind.value}: {self.reason}{expected}."


class PlanMeasured(msgspec.Struct, frozen=True, tag="plan_measured"):
    """A plan was carried out and its effect measured."""

    number: int
    nodes: int
    throughput: float
    """Measured throughput."""
    error: float
    """Relative difference of the measured throughput from the predicted one."""
    within: bool
    """True if it lies in the predicted interval."""
    short: bool
    """True if the throughput is less than its nodes are worth; the change is then rolled back."""
    unit: str = "samples/s"
    """Unit of the throughput."""
    plan_id: str = ""
    """As in the plan."""
    servers: int = 0
    """As in the plan."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        where = "within" if self.within else "outside of"
        short = "; that does not pay" if self.short else ""
        nodes = Size(self.nodes, self.servers).in_words()
        return (
            f"Plan {self.number} brought {self.throughput:.3g} {self.unit} on {nodes}, "
            f"{self.error:+.0%} from what was predicted and {where} its interval{short}."
        )


class PlanDropped(msgspec.Struct, frozen=True, tag="plan_dropped"):
    """A plan was given up before its effect could be measured."""

    number: int
    reason: str
    plan_id: str = ""
    """As in the plan."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Plan {self.number} is given up: {self.reason}."


class SizeSettled(msgspec.Struct, frozen=True, tag="size_settled"):
    """No other number of nodes is worth a change."""

    nodes: int
    throughput: float
    tried: int
    """Number of sizes that were measured."""
    unit: str = "samples/s"
    """Unit of the throughput."""
    servers: int = 0
    """Parameter servers; ``nodes`` then have the role worker."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        nodes = Size(self.nodes, self.servers).in_words()
        return (
            f"The job stays at {nodes} with {self.throughput:.3g} {self.unit}: of {self.tried} "
            "measured sizes none is worth a change, and no other is expected to be."
        )


class AutoScalingEnded(msgspec.Struct, frozen=True, tag="auto_scaling_ended"):
    """A user set the number of nodes, which overrules the auto-scaler."""

    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Auto-scaling ends: {self.reason}."
