"""The ranks that save and load together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from dlrover import launched
from dlrover.checkpoint.storage.stores import StorageAwayError
from dlrover.errors import ConfigurationError, InfrastructureError

_Value = TypeVar("_Value")
_WELL, _CANNOT, _STOPPED, _WRONG = range(4)
"""Outcomes of an action, the gravest last."""
_KINDS = {_CANNOT: InfrastructureError, _STOPPED: StorageAwayError, _WRONG: ConfigurationError}
MAX_SAID = 2000
"""Maximum bytes of an error message that other ranks repeat."""


class TorchWorld:
    """The ranks of ``torch.distributed`` if it is initialised, else this process alone.

    Creating a world is collective.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.group: dist.ProcessGroup | None = None
        if _is_initialised():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            # A group of its own: the training's may be bound to devices, or be in use.
            self.group = dist.new_group(backend="gloo")

    @property
    def alone(self) -> bool:
        """True while this rank, which was started again, replays: the others neither save nor load with it."""
        survival = launched.survival
        return survival is not None and survival.replaying

    @property
    def leads(self) -> bool:
        """True if this rank looks for what is stored."""
        return self.rank == 0 or self.alone

    def close(self) -> None:
        """Destroy the group, whose threads must not outlive the interpreter.

        A gloo thread may still hold a tensor of the last exchange. If it releases the tensor after the
        interpreter has ended, the process aborts (https://github.com/pytorch/pytorch/pull/179291). Dropping
        the last reference to the group waits for its threads.
        """
        group, self.group = self.group, None
        if group is not None and _is_initialised():
            # The program has already destroyed all groups and made new ones.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)

    def check(self) -> None:
        """Refuse to continue if the process has joined a larger world since.

        Raises:
            ConfigurationError: the process has joined one.
        """
        if self.size == 1 and _is_initialised() and dist.get_world_size() > 1:
            raise ConfigurationError(
                "The Checkpointer was made before torch.distributed.init_process_group; make it after."
            )

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's 64-bit integers, by rank; all ranks must give the same number. Collective."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        return [tensor.tolist() for tensor in self._gather(mine)]

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank. Collective."""
        if self.size == 1:
            return [data]
        sizes = [size for (size,) in self.exchange([len(data)])]
        mine = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        every = self._gather(mine)
        return [tensor[:size].numpy().tobytes() for tensor, size in zip(every, sizes, strict=True)]

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        if self.group is None:
            raise InfrastructureError("The Checkpointer was closed; make another.")
        every = [torch.empty_like(mine) for _ in range(self.size)]
        if mine.numel():
            dist.all_gather(every, mine, group=self.group)
        return every

    def agree(self, action: Callable[[], _Value]) -> _Value:
        """Run an action on all ranks; return its value if all succeed. Collective.

        All ranks raise an error of the same kind, the gravest one: if one rank cannot read the data now, no
        other rank may take it for damaged.

        Raises:
            ConfigurationError: the request is wrong, on this rank or another.
            StorageAwayError: this rank or another cannot read the storage, or failed unexpectedly.
            InfrastructureError: this rank or another failed.
        """
        error: Exception | None = None
        value = None
        try:
            value = action()
        except Exception as caught:  # noqa: BLE001 - raised below, when the others know
            error = caught
        mine = _outcome(error)
        outcomes = [outcome for (outcome,) in self.exchange([mine])]
        worst = max(outcomes)
        if worst == _WELL:
            return value  # type: ignore[return-value]  # no error: the action has returned
        said = self.gather(str(error or "").encode(errors="replace")[:MAX_SAID])
        if error is not None and mine == worst:
            raise error
        first = outcomes.index(worst)
        reason = said[first].decode(errors="replace")
        raise _KINDS[worst](f"Rank {first} cannot go on: {reason}") from error


def _outcome(error: Exception | None) -> int:
    if error is None:
        return _WELL
    if isinstance(error, ConfigurationError):
        return _WRONG
    is_usual = isinstance(error, InfrastructureError) and not isinstance(error, StorageAwayError)
    return _CANNOT if is_usual else _STOPPED


def _is_initialised() -> bool:
    return bool(dist.is_available() and dist.is_initialized())
