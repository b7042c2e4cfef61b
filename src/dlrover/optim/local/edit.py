"""EDiT and A-EDiT (Cheng et al., "EDiT: A Local-SGD-Based Efficient Distributed Training Method", arXiv:2412.07210)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from dlrover.errors import ConfigurationError
from dlrover.optim.local.diloco import DiLoCo
from dlrover.optim.local.fragments import Outer
from dlrover.optim.machine.penalty import Penalty


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return EDiT's outer optimizer: SGD with the rate 0.7 and Nesterov momentum of 0.8."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.8, nesterov=True)


CLIP = 10.0
"""Maximum norm of the mean change."""


class EDiT(DiLoCo):
    """`DiLoCo` with a penalty: replicas whose change is too large are left out, and larger ones weigh less.

    At each sync, all replicas compute the same decision from all norms (`dlrover.optim.machine.penalty`). What is
    left out does not enter the statistics, and the weights of the others add up to 1. If no replica counts, all
    return to the parameters of the last sync.

    Args:
        base: the inner optimizer, with its parameters.
        group: see `DiLoCo`, like all other options.
        penalty: options of the penalty; None for none.
        clip: maximum norm of the mean change.
        outer: function that makes an outer optimizer from a list of parameters.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        group: Any = None,
        *,
        penalty: Penalty | None = Penalty(),  # noqa: B008 - frozen
        clip: float | None = CLIP,
        outer: Outer = nesterov,
        **options: Any,
    ) -> None:
        super().__init__(base, group, penalty=penalty, clip=clip, outer=outer, **options)


class AEDiT(DiLoCo):
    """`EDiT` with syncs by time: between two of them, each replica makes as many steps as it can.

    A replica asks no other one whether it is time, so a slow one delays the others by one of its steps at most.
    All ranks of a replica follow the first one whose time has come. To end together, train until ``total_steps``.

    Args:
        base: the inner optimizer, with its parameters.
        group: see `DiLoCo`, like all other options.
        seconds: time between two syncs of a fragment.
        clock: function that returns the time in seconds.

    Raises:
        ConfigurationError: an argument is out of its range, or is ``interval`` or ``delay``.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        group: Any = None,
        *,
        seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        if not seconds > 0:
            raise ConfigurationError(f"seconds is {seconds}; it must be more than 0.")
        for name in ("interval", "delay"):
            if name in options:
                raise ConfigurationError(f"AEDiT takes no {name}; give seconds instead.")
        fragments = options.get("fragments", 1)
        options = {"penalty": Penalty(), "clip": CLIP, "outer": nesterov, **options}
        super().__init__(base, group, interval=fragments, **options)
        self._schedule = EverySeconds(seconds / fragments, clock, self._over_replica)


class EverySeconds:
    """Syncs by each replica's own clock, all ranks of a replica together.

    Args:
        seconds: time between two syncs.
        clock: function that returns the time in seconds.
        over_replica: function that adds up a number over the replica's ranks.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float],
        over_replica: Callable[[float], list[float]],
    ) -> None:
        self._seconds, self._clock, self._over_replica = seconds, clock, over_replica
        self._last: float | None = None

    def begin(self) -> None:
        """Start the clock with the first step."""
        if self._last is None:
            self._last = self._clock()

    def starts(self, since: int) -> bool:
        """Return whether it is time for a rank of the replica."""
        assert self._last is not None
        (ranks,) = self._over_replica(float(self._clock() - self._last >= self._seconds))
        return ranks > 0

    def ends(self, since: int) -> bool:
        """Return True: a sync ends in the step in which it starts."""
        return True

    def synced(self) -> None:
        """Start the clock anew."""
        self._last = self._clock()
