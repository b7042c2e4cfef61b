"""The job as a whole, its masters, and what it trains on."""

from __future__ import annotations

import msgspec

from dlrover.spec.words import counted


class JobSubmitted(msgspec.Struct, frozen=True, tag="job_submitted"):
    """A job was submitted to its master."""

    name: str
    min_nodes: int
    max_nodes: int
    min_servers: int = 0
    max_servers: int = 0

    def sentence(self) -> str:
        """Return the event as one sentence."""
        nodes = _span(self.min_nodes, self.max_nodes, "node")
        if self.max_servers:
            nodes += f" and {_span(self.min_servers, self.max_servers, 'server')}"
        return f"Job {self.name} was submitted; it runs on {nodes}."


def _span(least: int, most: int, noun: str) -> str:
    return counted(most, noun) if least == most else f"{least} to {counted(most, noun)}"


class MasterRecovered(msgspec.Struct, frozen=True, tag="master_recovered"):
    """A master took over from the journal of one that died."""

    inputs: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"The master is back: it replayed {self.inputs} journal entries; workers kept running."
        )


class MasterAdopted(msgspec.Struct, frozen=True, tag="master_adopted"):
    """A master without a journal took over a running round from the reports of its nodes."""

    round: int
    nodes: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"The master is back without its journal: it adopted round {self.round} from "
            f"{self.nodes} nodes; workers kept running. The restart budgets start again from zero."
        )


class StepStored(msgspec.Struct, frozen=True, tag="step_stored"):
    """The newest memory checkpoint was to be stored, as a user asked for or as the workers ended."""

    directory: str
    step: int
    """The stored step; -1 if none is."""
    reason: str
    problem: str = ""
    """Why none is stored, in one sentence."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        if self.problem:
            return f"Nothing new is stored in {self.directory} ({self.reason}): {self.problem}"
        return f"Step {self.step} is stored in {self.directory}: {self.reason}."


class StrategyChosen(msgspec.Struct, frozen=True, tag="strategy_chosen"):
    """The parallel strategy of a round, chosen for its number of ranks."""

    round: int
    ranks: int
    strategy: str
    """The strategy in words."""
    step_seconds: float
    """Predicted duration of a step."""
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        ranks = counted(self.ranks, "rank")
        return f"Round {self.round} trains with {self.strategy} on {ranks}: {self.reason}."


class SamplesSkipped(msgspec.Struct, frozen=True, tag="samples_skipped"):
    """Samples of a dataset are skipped: they could not be read, or workers died of them."""

    data: str
    partition: int
    """The epoch, or the partition of a stream."""
    start: int
    """The first position or offset."""
    stop: int
    """The position or offset after the last."""
    error: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        count = self.stop - self.start
        what = "A sample" if count == 1 else f"{count} samples"
        is_or_are = "is" if count == 1 else "are"
        return f"{what} of the data set {self.data} {is_or_are} skipped: {self.error}."


class JobEnded(msgspec.Struct, frozen=True, tag="job_ended"):
    """The job is over."""

    exit_code: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"The job ended with exit code {self.exit_code}: {self.reason}"
