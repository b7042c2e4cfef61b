"""Which stored steps are kept.

A policy is asked after each step that was stored, and what it does not keep is deleted. It never wants a
step again that it let go before, so it does not matter how often it is asked.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dlrover.errors import ConfigurationError

MAX_METRICS = 64
"""Metrics of one step."""
MAX_NAME = 200
"""Characters in the name of a metric."""
_A_NAME = f"1 to {MAX_NAME} printable characters"


class StepInfo(msgspec.Struct, frozen=True):
    """What a policy knows of a stored step."""

    step: int
    line: int = 0
    """Which line of the training it belongs to; the newest has the greatest."""
    number: int = 0
    """Greater for one that was saved later."""
    metrics: dict[str, float] = {}

    @property
    def age(self) -> tuple[int, int, int]:
        """Greater for the newer one: the newest line comes first."""
        return self.line, self.number, self.step


class Policy(msgspec.Struct, frozen=True, tag=True):
    """Base of all policies. ``a | b`` keeps what either of them keeps."""

    @property
    def uses_metrics(self) -> bool:
        """Whether `StepInfo.metrics` matters."""
        return False

    def kept(self, steps: Sequence[StepInfo]) -> set[int]:
        """The steps that stay; the newest one is always among them."""
        return self._wanted(steps) | _newest(steps, 1)

    def _wanted(self, steps: Sequence[StepInfo]) -> set[int]:
        raise NotImplementedError

    def __or__(self, other: object) -> KeepAny:
        if not isinstance(other, Policy):
            return NotImplemented
        return KeepAny((*_members(self), *_members(other)))


class KeepLast(Policy, frozen=True):
    """Keep the newest ``count`` steps.

    Raises:
        ConfigurationError: ``count`` is less than 1.
    """

    count: int

    def __post_init__(self) -> None:
        _check_positive("KeepLast", "count", self.count)

    def _wanted(self, steps: Sequence[StepInfo]) -> set[int]:
        return _newest(steps, self.count)


class KeepEvery(Policy, frozen=True):
    """Keep the first step stored at or after each multiple of ``interval`` steps, for ever.

    Where the training went back and came by again, the step of the newer line.

    Raises:
        ConfigurationError: ``interval`` is less than 1.
    """

    interval: int

    def __post_init__(self) -> None:
        _check_positive("KeepEvery", "interval", self.interval)

    def _wanted(self, steps: Sequence[StepInfo]) -> set[int]:
        first: dict[int, int] = {}
        for info in sorted(steps, key=lambda info: (-info.line, info.step)):
            first.setdefault(info.step // self.interval, info.step)
        return {step for multiple, step in first.items() if multiple > 0}


class KeepBest(Policy, frozen=True):
    """Keep the ``count`` steps whose ``metric`` is lowest (``mode="min"``) or highest (``"max"``).

    Of equal steps the newer one is better. A step that was saved without the metric is not kept for it.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    count: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check_positive("KeepBest", "count", self.count)
        if not _is_name(self.metric):
            raise ConfigurationError(f"KeepBest's metric is {self.metric!r}; it must be {_A_NAME}.")
        if self.mode not in ("min", "max"):
            raise ConfigurationError(
                f"KeepBest's mode is {self.mode!r}; it must be 'min' or 'max'."
            )

    @property
    def uses_metrics(self) -> bool:
        """It does."""
        return True

    def _wanted(self, steps: Sequence[StepInfo]) -> set[int]:
        sign = 1 if self.mode == "max" else -1
        measured = [
            (sign * info.metrics[self.metric], info.age)
            for info in steps
            if self.metric in info.metrics
        ]
        return {age[-1] for _, age in heapq.nlargest(self.count, measured)}


class KeepAny(Policy, frozen=True):
    """Keep what at least one of several policies keeps; made by ``|``."""

    policies: tuple[KeepLast | KeepEvery | KeepBest, ...]

    @property
    def uses_metrics(self) -> bool:
        """Whether one of them needs them."""
        return any(policy.uses_metrics for policy in self.policies)

    def _wanted(self, steps: Sequence[StepInfo]) -> set[int]:
        return {step for policy in self.policies for step in policy.kept(steps)}


_Known = KeepLast | KeepEvery | KeepBest | KeepAny
_decoder = msgspec.json.Decoder(_Known | int)


def policy_of(keep: int | Policy) -> Policy:
    """The policy that a user means; a number of steps means the newest ones.

    Raises:
        ConfigurationError: it is neither a number from 1 nor a policy.
    """
    if isinstance(keep, Policy):
        return keep
    if not _is_integer(keep):
        raise ConfigurationError(
            f"keep is {keep!r}; it must be a number of steps, or a policy such as KeepLast(3)."
        )
    if keep < 1:
        raise ConfigurationError(f"keep is {keep}; at least 1 step must be kept.")
    return KeepLast(keep)


def encode(policy: Policy) -> str:
    """The policy as one line of JSON, for a command line."""
    return msgspec.json.encode(policy).decode()


def decode(text: str) -> Policy:
    """The policy again; a number means the newest steps.

    Raises:
        ConfigurationError: the text is not a policy.
    """
    try:
        return policy_of(_decoder.decode(text))
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"keep is {text!r}, which is not a policy: {error}.") from error


def checked_metrics(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """A step's metrics as they are stored. One that is not finite is left out: it is never the best.

    Raises:
        ConfigurationError: a name or a value cannot be a metric, or there are too many.
    """
    if len(metrics) > MAX_METRICS:
        raise ConfigurationError(
            f"metrics has {len(metrics)} entries; a step has at most {MAX_METRICS}."
        )
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if not _is_name(name):
            raise ConfigurationError(f"metrics has the name {name!r}; it must be {_A_NAME}.")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigurationError(
                f"The metric {name} is {value!r}; it must be a number."
            ) from error
        if math.isfinite(number):
            numbers[name] = number
    return numbers


def _members(policy: Policy) -> tuple[Any, ...]:
    return policy.policies if isinstance(policy, KeepAny) else (policy,)


def _newest(steps: Sequence[StepInfo], count: int) -> set[int]:
    return {age[-1] for age in heapq.nlargest(count, (info.age for info in steps))}


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_positive(policy: str, field: str, value: int) -> None:
    if not _is_integer(value) or value < 1:
        raise ConfigurationError(f"{policy}'s {field} is {value!r}; it must be 1 or more.")
