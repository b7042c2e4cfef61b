"""Where the rows are: on the servers of the job, or in this process; and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from dlrover.embedding import HashTable, RemoteTable, checkpoints, open_table


class Rows:
    """A table, and its rows at the steps of checkpoints.

    Args:
        out: Folder of the checkpoints.
        dim: Numbers of a row.
        options: As for `HashTable`.
    """

    def __init__(self, out: Path, dim: int, **options: Any) -> None:
        self._out = out / "rows"
        self.table = open_table("rows", dim, **options)
        on_servers = isinstance(self.table, RemoteTable)
        if dist.get_world_size() > 1 and not on_servers:
            raise SystemExit("Several workers need a common table: --embedding-servers N.")
        first = dist.get_rank() == 0
        self._checkpoints = checkpoints(str(self._out)) if on_servers and first else None

    def load(self, step: int) -> None:
        """Go back to the rows of a step; of step 0, a new training, there are none."""
        if self._checkpoints is not None:
            if step:
                self._checkpoints.load(step)
            else:
                self._checkpoints.save(0)
        elif step and isinstance(self.table, HashTable):
            self.table = HashTable.load(self._file(step))
        dist.barrier()

    def save(self, step: int) -> None:
        """Store the rows; those of older steps are kept until this one is complete."""
        if self._checkpoints is not None:
            self._checkpoints.save(step)
            self._checkpoints.wait()
        elif isinstance(self.table, HashTable):
            self._out.mkdir(parents=True, exist_ok=True)
            self.table.save(self._file(step))
        dist.barrier()

    def forget(self, step: int) -> None:
        """Delete a file of an older step; checkpoints of servers see to that themselves."""
        self._file(step).unlink(missing_ok=True)

    def _file(self, step: int) -> Path:
        return self._out / f"step-{step}"
