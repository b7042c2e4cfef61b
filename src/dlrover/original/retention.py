"""The original's strategies for the deletion of stored steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlrover.checkpoint.machine.policies import KeepEvery, KeepLast, Policy
from dlrover.errors import ConfigurationError

ALL = KeepEvery(1)
"""The original's default: nothing is deleted."""


class CheckpointDeletionStrategy:
    """Base of the strategies."""

    def policy(self) -> Policy:
        """Return our policy."""
        raise ConfigurationError(
            f"{type(self).__name__} is a deletion strategy of the program's own; use a policy of dlrover.checkpoint:"
            " KeepLast, KeepEvery, KeepBest, or several joined by |."
        )


@dataclass(frozen=True)
class KeepStepIntervalStrategy(CheckpointDeletionStrategy):
    """Keep the newest step and the multiples of an interval."""

    keep_interval: int
    checkpoint_dir: str

    def policy(self) -> Policy:
        """Return our policy."""
        return KeepEvery(self.keep_interval) | KeepLast(1)


@dataclass(frozen=True)
class KeepLatestStepStrategy(CheckpointDeletionStrategy):
    """Keep the newest steps."""

    max_to_keep: int
    checkpoint_dir: str

    def policy(self) -> Policy:
        """Return our policy."""
        return KeepLast(self.max_to_keep)


def policy_of(strategy: Any) -> Policy:
    """Return the policy of the original's ``deletion_strategy``, which may be a policy of ours."""
    if strategy is None:
        return ALL
    if isinstance(strategy, Policy):
        return strategy
    if isinstance(strategy, CheckpointDeletionStrategy):
        return strategy.policy()
    raise ConfigurationError(
        f"deletion_strategy is a {type(strategy).__name__}; it must be KeepLatestStepStrategy,"
        " KeepStepIntervalStrategy, or a policy of dlrover.checkpoint."
    )
