"""The division of a global batch into ranks and micro-batches, with weights: arithmetic, without torch.

The samples of a global batch have the positions 0, 1, ... Rank r of W takes the positions r, r + W, ...,
in *micro-batches*, one per pass through the model. All ranks make equally many passes, because a model may
wait for the other ranks in each pass. So a rank with fewer samples than passes computes one sample again,
with the weight 0.

Where shares follow the ranks' speeds (`shares`), rank r takes its share of consecutive positions after those
of the ranks before it, and makes as many passes as it needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dlrover.errors import ConfigurationError


class MicroBatch(NamedTuple):
    """The samples of one rank's pass."""

    positions: range
    """Positions of the samples in the global batch; position 0 alone if the rank has no samples left."""
    weight: float
    """Factor of these samples' mean loss; with it, the gradients averaged over the ranks are those of the
    global batch's mean loss."""


def check(global_batch_size: int, micro_batch_size: int | None, replicas: int) -> None:
    """Check that a global batch can be divided among the ranks.

    Raises:
        ConfigurationError: a size is invalid; the message names it.
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
    """Check the arguments for a global batch chosen from ``least`` to ``most``.

    Raises:
        ConfigurationError: an argument is invalid; the message names it.
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
    """Return the number of micro-batches per rank for a global batch of ``size`` samples."""
    largest = -(-size // replicas)
    return 1 if micro_batch_size is None else -(-largest // micro_batch_size)


def equal_shares(size: int, replicas: int) -> tuple[int, ...]:
    """Return equal shares per rank; if they cannot be equal, they differ by one sample."""
    return tuple(len(range(rank, size, replicas)) for rank in range(replicas))


def deal(
    size: int,
    replicas: int,
    rank: int,
    micro_batch_size: int | None,
    shares: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Return one rank's micro-batches: nearly equal in size, at most ``micro_batch_size`` samples each.

    ``shares`` are the ranks' samples of a full global batch, where they are unequal. Each rank then makes
    as many passes as it needs.
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
    """Return the micro-batches per step for trainers that give each the same size and weight.

    Such trainers are the ``Trainer`` of Transformers (``gradient_accumulation_steps``) and that of Lightning
    (``accumulate_grad_batches``).

    Raises:
        ConfigurationError: the global batch cannot be divided equally; such a trainer would then weigh
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
    """Return the factor for a learning rate that was chosen for another global batch.

    ``linear``: the ratio of the sizes, which suits SGD (Goyal et al., 2017); ``sqrt``: its square root, which
    suits Adam (Malladi et al., 2022); ``none``: 1.

    Args:
        rule: ``linear``, ``sqrt`` or ``none``.
        global_batch_size: samples in a step.
        reference: samples per step for which the learning rate was chosen.

    Raises:
        ConfigurationError: the rule is unknown, or its reference is missing, invalid or superfluous.
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
