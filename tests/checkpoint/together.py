"""Ranks that are threads of this process, with what they exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from dlrover.checkpoint.engine.world import TorchWorld

PATIENCE = 5.0
"""Seconds that a rank waits for the others; one that has left a collective is missed then."""


class ThreadWorld(TorchWorld):
    """The world as one of several threads sees it."""

    def __init__(self, rank: int, meeting: threading.Barrier, said: list[torch.Tensor | None]):
        self.rank, self.size, self.group = rank, meeting.parties, None
        self._meeting, self._said = meeting, said

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self._said[self.rank] = mine
        self._meeting.wait(PATIENCE)
        every = list(self._said)
        self._meeting.wait(PATIENCE)
        assert len({tensor.shape for tensor in every}) == 1, "ranks are in different collectives"
        return every


def worlds(size: int) -> list[ThreadWorld]:
    """One for each rank."""
    meeting, said = threading.Barrier(size), [None] * size
    return [ThreadWorld(rank, meeting, said) for rank in range(size)]


def each(*acts: Callable[[], Any]) -> Sequence[Any]:
    """Run an action for each rank at the same time: what they return, or raise."""

    def caught(act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(caught, acts))
