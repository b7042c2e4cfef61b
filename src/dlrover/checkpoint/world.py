"""The ranks that save and load together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dlrover.errors import ConfigurationError


class World:
    """The ranks of ``torch.distributed`` if it is initialised, else this process alone.

    Making one is collective.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if _is_initialised():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            # A group of its own: the training's may be bound to devices, or be in use.
            self._group = dist.new_group(backend="gloo")

    def check(self) -> None:
        """Refuse to go on when the process has joined a world since.

        Raises:
            ConfigurationError: it has.
        """
        if self._group is None and _is_initialised() and dist.get_world_size() > 1:
            raise ConfigurationError(
                "The Checkpointer was made before torch.distributed.init_process_group; make it after."
            )

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, by rank; all must give equally many 64-bit integers. Collective."""
        if self._group is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64)
        all_of_them = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(all_of_them, mine, group=self._group)
        return [tensor.tolist() for tensor in all_of_them]


def _is_initialised() -> bool:
    return bool(dist.is_available() and dist.is_initialized())
