"""A table of parameters that is spread over servers, in blocks of neighbouring rows.

A worker pulls the rows that a batch needs, and pushes their gradients. It waits for no other worker, so the
rows may have changed in between: the training is asynchronous. A server serves one request at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from clicks import WORDS
from torch import Tensor

from dlrover.checkpoint import Shard

BLOCKS = 64
ROWS = WORDS // BLOCKS
"""Rows of a block."""
WIDTH = 9
"""Parameters of a row: a weight, and a vector that meets those of the other words."""
WHOLE = (ROWS, WIDTH + 1)
"""The shape of a block: each row also has the sum of its squared gradients, for Adagrad."""
PULL, PUSH, SAVE, STOP = range(4)
"""What a worker can want of a server."""


def divide(load: Tensor, servers: int) -> list[int]:
    """The server of each block: the heaviest block first, each to the server that has least so far.

    Args:
        load: Rows of each block that were asked for; all 0 in a new training, which gets equal parts.
        servers: How many there are.
    """
    if not load.any():
        return [block * servers // BLOCKS for block in range(BLOCKS)]
    owners, filled = [0] * BLOCKS, [0.0] * servers
    for block in load.argsort(descending=True).tolist():
        owners[block] = min(range(servers), key=filled.__getitem__)
        filled[owners[block]] += float(load[block]) + 1
    return owners


class Table:
    """The table as a worker sees it."""

    def __init__(self, owners: Sequence[int], ranks: Sequence[int]) -> None:
        """Know where each block is.

        Args:
            owners: The server of each block.
            ranks: The rank of each server.
        """
        self._owners = torch.tensor(owners)
        self._ranks = ranks
        self.load = torch.zeros(BLOCKS, dtype=torch.float64)
        """Rows of each block that this worker has pulled."""

    def pull(self, rows: Tensor) -> Tensor:
        """The parameters of some rows."""
        self.load += torch.bincount(rows // ROWS, minlength=BLOCKS)
        found = torch.empty(len(rows), WIDTH)
        parts = list(self._parts(rows))
        for rank, places in parts:
            _ask(rank, PULL, rows[places])
        for rank, places in parts:
            part = torch.empty(len(places), WIDTH)
            dist.recv(part, rank)
            found[places] = part
        return found

    def push(self, rows: Tensor, gradients: Tensor) -> None:
        """Let the servers learn from the gradients of some rows."""
        for rank, places in self._parts(rows):
            _ask(rank, PUSH, rows[places])
            dist.send(gradients[places], rank)

    def tell(self, what: int) -> None:
        """Tell all servers: ``SAVE``, or ``STOP``."""
        for rank in self._ranks:
            dist.send(torch.tensor([what, 0]), rank)

    def _parts(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The servers that have some of the rows, and which ones."""
        owners = self._owners[rows // ROWS]
        for server, rank in enumerate(self._ranks):
            places = (owners == server).nonzero().squeeze(1)
            if len(places):
                yield rank, places


def _ask(rank: int, what: int, rows: Tensor) -> None:
    dist.send(torch.tensor([what, len(rows)]), rank)
    dist.send(rows, rank)


class Toil(NamedTuple):
    """What a server does for each row that it gives out or takes in, to play a larger model. Seconds."""

    idle: float = 0.0
    compute: float = 0.0

    def do(self, rows: int) -> None:
        """For so many rows."""
        time.sleep(self.idle * rows)
        until = time.thread_time() + self.compute * rows
        while time.thread_time() < until:
            pass


class Server:
    """The blocks that one server has."""

    def __init__(self, blocks: Iterable[int], lr: float, toil: Toil) -> None:
        """Make blocks that have learned nothing.

        Args:
            blocks: Their numbers.
            lr: How fast they learn.
            toil: What more the server does for each row.
        """
        self._numbers = list(blocks)
        self._values = torch.zeros(len(self._numbers) * ROWS, WHOLE[1])
        random = torch.Generator().manual_seed(0)
        self._values[:, 1:WIDTH] = 0.01 * torch.randn(
            len(self._values), WIDTH - 1, generator=random
        )
        self._places = torch.full((BLOCKS,), -1)
        self._places[self._numbers] = torch.arange(len(self._numbers))
        self._lr, self._toil = lr, toil

    def blocks(self) -> dict[int, Tensor]:
        """The live blocks, for checkpoints."""
        blocks = self._values.view(len(self._numbers), *WHOLE)
        return dict(zip(self._numbers, blocks, strict=True))

    def serve(self, workers: int, save: Callable[[], None]) -> None:
        """Do what workers ask for, until all of them have said ``STOP``; save when all have said so."""
        header = torch.empty(2, dtype=torch.int64)
        said = {SAVE: 0, STOP: 0}
        while said[STOP] < workers:
            worker = dist.recv(header)
            what, count = header.tolist()
            if what in said:
                said[what] += 1
            else:
                self._answer(worker, what, count)
            if said[SAVE] == workers:
                said[SAVE] = 0
                save()

    def _answer(self, worker: int, what: int, count: int) -> None:
        rows = torch.empty(count, dtype=torch.int64)
        dist.recv(rows, worker)
        places = self._places[rows // ROWS] * ROWS + rows % ROWS
        self._toil.do(count)
        if what == PULL:
            dist.send(self._values[places, :WIDTH], worker)
            return
        gradients = torch.empty(count, WIDTH)
        dist.recv(gradients, worker)
        values = self._values[places]
        values[:, WIDTH] += gradients.square().mean(1)
        values[:, :WIDTH] -= self._lr * gradients / (values[:, WIDTH:].sqrt() + 1e-8)
        self._values[places] = values


def shards(blocks: dict[int, Tensor]) -> dict[str, Shard]:
    """All blocks for a checkpoint: of those that are elsewhere, nothing."""
    nothing = Shard(torch.empty(0, WHOLE[1]), WHOLE, (ROWS, 0))
    return {
        str(block): Shard(blocks[block], WHOLE, (0, 0)) if block in blocks else nothing
        for block in range(BLOCKS)
    }
