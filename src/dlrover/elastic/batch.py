"""Who computes how much of a global batch, and what it weighs: arithmetic, without torch.

The samples of a global batch have the positions 0, 1, ... Rank r of W takes the positions r, r + W, ...,
in *micro-batches*, one for each pass through the model. All ranks make equally many passes, since a model
may wait for the other ranks in each of them. So a rank whose share is smaller than the number of passes
computes a sample once more, with the weight 0.

Where shares follow the ranks' speed (`shares`), rank r takes as many positions as its share says, after those
of the ranks before it, and makes as many passes as that needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dlrover.errors import ConfigurationError


class MicroBatch(NamedTuple):
    """What one rank computes in one pass."""

    positions: range
    """Of its samples in the global batch; where there is none left, that of the first one."""
    weight: float
    """What the mean loss of these samples is multiplied by, so that the gradients, averaged over the ranks,
    are those of the mean loss of the global batch."""


def check(global_batch_size: int, micro_batch_size: int | None, replicas: int) -> None:
    """Refuse sizes that cannot be dealt.

    Raises:
        ConfigurationError: which one, and why.
    """
    _check_positive("global_batch_size", global_batch_size)
    if micro_batch_size is not None:
        _check_positive("micro_batch_size", micro_batch_size)
    if global_batch_size < replicas:
        raise ConfigurationError(
            f"global_batch_size is {global_batch_size}; it must be at least {replicas}, the number of workers,"
            " so that each has a sample."
        )


def check_choice(
    least: int, most: int | None, micro_batch_size: int | None, learning_rate_rule: str
) -> None:
    """Refuse a choice of global batches, from ``least`` to ``most``, that cannot be meant.

    Raises:
        ConfigurationError: which argument is wrong, and why.
    """
    if most is None:
        return
    _check_positive("max_global_batch_size", most)
    if most < least:
        raise ConfigurationError(
            f"max_global_batch_size is {most}; it must be at least global_batch_size, {least}."
        )
    if micro_batch_size is None:
        raise ConfigurationError(
            "max_global_batch_size needs micro_batch_size: the samples for which a worker has the memory."
        )
    if learning_rate_rule == "none":
        raise ConfigurationError(
            "max_global_batch_size needs learning_rate_rule 'linear' or 'sqrt': a larger batch makes no more"
            " progress with the same learning rate."
        )


def passes(size: int, replicas: int, micro_batch_size: int | None) -> int:
    """How many micro-batches every rank makes of a global batch of ``size`` samples."""
    largest = -(-size // replicas)
    return 1 if micro_batch_size is None else -(-largest // micro_batch_size)


def equal_shares(size: int, replicas: int) -> tuple[int, ...]:
    """Samples of each rank where all take as many as the others, or one less."""
    return tuple(len(range(rank, size, replicas)) for rank in range(replicas))


def deal(
    size: int,
    replicas: int,
    rank: int,
    micro_batch_size: int | None,
    shares: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """The micro-batches of one rank, of at most ``micro_batch_size`` samples and of nearly equal size.

    ``shares`` are the samples of each rank of a whole global batch, where they are not equal. Ranks then make
    as many passes as they need.
    """
    if shares is None:
        share = range(rank, size, replicas)
        count = passes(size, replicas, micro_batch_size)
    else:
        ends = [size * sum(shares[:many]) // sum(shares) for many in (rank, rank + 1)]
        share = range(*ends)
        count = passes(max(1, len(share)), 1, micro_batch_size)
    micro_batches = []
    for number in range(count):
        positions = share[len(share) * number // count : len(share) * (number + 1) // count]
        weight = len(positions) * replicas / size
        micro_batches.append(MicroBatch(positions or range(1), weight))
    return micro_batches


def accumulation_steps(global_batch_size: int, micro_batch_size: int, replicas: int) -> int:
    """Micro-batches per step for trainers that give each of them the same size and the same weight.

    These are the ``Trainer`` of Transformers (``gradient_accumulation_steps``) and that of Lightning
    (``accumulate_grad_batches``).

    Raises:
        ConfigurationError: the sizes cannot be dealt, or not equally; such a trainer would then weigh
            samples differently.
    """
    check(global_batch_size, micro_batch_size, replicas)
    step = micro_batch_size * replicas
    if global_batch_size % step:
        raise ConfigurationError(
            f"global_batch_size is {global_batch_size}; with micro_batch_size {micro_batch_size} on {replicas}"
            f" workers it must be a multiple of {step}."
        )
    return global_batch_size // step


def learning_rate_factor(rule: str, global_batch_size: int, reference: int | None) -> float:
    """What a learning rate that was chosen for another global batch is multiplied by.

    ``linear``: by the ratio of the sizes, which suits SGD (Goyal et al., 2017); ``sqrt``: by its square root,
    which suits Adam (Malladi et al., 2022); ``none``: by 1.

    Args:
        rule: one of these words.
        global_batch_size: samples in a step.
        reference: samples in a step that the learning rate was chosen for.

    Raises:
        ConfigurationError: there is no such rule, or no reference for it.
    """
    if rule not in ("none", "linear", "sqrt"):
        raise ConfigurationError(
            f"learning_rate_rule is {rule!r}; it must be 'none', 'linear' or 'sqrt'."
        )
    if rule == "none":
        if reference is not None:
            raise ConfigurationError(
                "reference_batch_size has no effect without learning_rate_rule."
            )
        return 1.0
    if reference is None:
        raise ConfigurationError(
            f"learning_rate_rule {rule!r} needs reference_batch_size: the global batch that the learning rate"
            " was chosen for."
        )
    _check_positive("reference_batch_size", reference)
    ratio = global_batch_size / reference
    return ratio if rule == "linear" else math.sqrt(ratio)


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} is {value!r}; it must be an integer of at least 1.")
