"""What the launcher of this process has set, and the hooks by which it observes the program.

A runner of programs (`dlrover.training.worker.bootstrap`) sets these; without one, all are neutral.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


def _ignore(_step: int) -> None:
    pass


def _nothing() -> None:
    pass


def _pass_by(_error: Exception) -> None:
    pass


@dataclass(frozen=True)
class Given:
    """Settings and addresses that the launcher gives this worker process."""

    node: str = ""
    """The process's node, if a machine hosts several, each with a saver; empty: the machine is one node."""
    round: int = 0
    relay: str = ""
    """Abstract Unix socket, without the NUL, on which the node's agent takes requests for the master."""
    save_at_breakpoint: bool = False
    """True to store the newest step in memory when a worker dies, unless the program says otherwise."""
    auto_tuning: bool = False
    """True if loaders and trainers tune themselves, unless the program says otherwise."""
    embedding: bool = False
    """True if the job has embedding servers (`dlrover.embedding`)."""
    rank: int = 0
    world_size: int = 1
    survive: bool = False
    """True if the world goes on with the ranks that are left when one is lost."""
    members: str = ""
    """Abstract Unix socket, without the NUL, on which the node's agent tells which ranks train."""
    attempt: int = 0
    """Earlier processes of this rank in this round."""
    global_batch: int = 0
    """Global batch chosen for the job, in samples; 0: the program's own."""
    checkpoints: str = ""
    """File that lists the directories of the program's checkpoints, for people; empty: none."""


class SurvivingRank(Protocol):
    """This process's rank in a training that goes on without lost ranks."""

    @property
    def replaying(self) -> bool:
        """True while a rank that was started again runs the program without its model."""

    @property
    def whole(self) -> bool:
        """True if all ranks of the world have carried out the last collective: the same on all that train."""

    @property
    def number(self) -> int:
        """Number of the membership that has carried out the last collective: the same on all ranks that train."""

    @property
    def lacking(self) -> bool:
        """True if a rank was lost with which this one has trained last."""

    def place(self) -> tuple[int, int, int]:
        """Return the job's round, the reductions and the steps, to be stored with a save of all ranks; 0, 0, 0: none."""

    def continued(self, save: int, place: tuple[int, int, int]) -> None:
        """Take note of the save that this rank's program continues from: its number, and what `place` gave for it."""


given = Given()
call = 0
"""Number of the present call of a training function that is called again after a loss, alike on all ranks; 0: there is none."""
survival: SurvivingRank | None = None
"""None in a program whose ranks are all started again when one is lost."""
reading: Callable[[int, int, int], None] | None = None
"""Called with the dataset's key, the partition and the first position of each shard whose reading begins."""
blocked: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
"""Returns a context that is entered while the training waits for a checkpoint."""
stepped: Callable[[], None] = _nothing
"""Called after each step of a training whose steps no hook sees."""
imported: Callable[[], None] = _nothing
"""Called by a program that makes no steps, once it has imported what it needs."""
loaded: Callable[[int], None] = _ignore
"""Called with the number of the step that the training continues from; 0 for a fresh start."""
saving: Callable[[int], None] = _ignore
"""Called with the number of each step that is saved."""
steps_made: Callable[[], int] = int
"""Returns the optimizer steps that this worker's process and those before it have made in this round."""
rejoined: Callable[[int], None] = _ignore
"""Called with that number when this worker goes on where another one is."""
trains: Callable[[], bool] = bool
"""Returns whether others train together with this rank, and go on without it if it ends."""
leaves: Callable[[], int] = int
"""Returns the number of a signal that asked this process to end and whose handler runs, or has raised an error for it; else 0."""
finished: Callable[[], None] = _nothing
"""Called once the program has ended by itself and without an error."""
failed: Callable[[Exception], None] = _pass_by
"""Called with the error that the program has ended with; may raise another one in its place."""
furthest: Callable[[], int] = int
"""Returns the most optimizer steps that a worker of this node has made in this round."""
