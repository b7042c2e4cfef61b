"""Policies that choose which stored steps are kept.

After each stored step the policy is applied, and the steps that it does not keep are deleted. A policy
never wants a step that it dropped before, so it does not matter how often it is applied.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dlrover._util import decoding
from dlrover.errors import ConfigurationError

MAX_METRICS = 64
"""Maximum number of metrics of one step."""
MAX_NAME = 200
"""Maximum length of a metric's name, in characters."""
_A_NAME = f"1 to {MAX_NAME} printable characters"


class StepInfo(msgspec.Struct, frozen=True):
    """A stored step as a policy sees it."""

    step: int
    line: int = 0
    """Line of the training that the step belongs to; the newest line has the greatest number."""
    number: int = 0
    """Number of the save; greater for a later one."""
    metrics: dict[str, float] = {}

    @property
    def age(self) -> tuple[int, int, int]:
        """Sort key, greater for the newer step; the line decides first."""
        return self.line, self.number, self.step


class Policy(msgspec.Struct, frozen=True, tag=True):
    """Base of all policies. ``a | b`` keeps what either of them keeps."""

    @property
    def uses_metrics(self) -> bool:
        """True if the policy needs `StepInfo.metrics`."""
        return False

    def kept(self, steps: Sequence[StepInfo]) -> set[int]:
        """Return the steps to keep; the newest one is always among them."""
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
    """Keep the first step stored at or after each multiple of ``interval`` steps, forever.

    If the training went back and passed a multiple again, the step of the newer line is kept.

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

    If values are equal, the newer step is better. A step saved without the metric is not kept by this policy.

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
        """Always True: the metric decides."""
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
    """Keep the steps that at least one of several policies keeps; made by ``|``."""

    policies: tuple[KeepLast | KeepEvery | KeepBest, ...]

    @property
    def uses_metrics(self) -> bool:
        """True if one of the policies needs metrics."""
        return any(policy.uses_metrics for policy in self.policies)

    def _wanted(self, steps: Sequence[StepInfo]) -> set[int]:
        return {step for policy in self.policies for step in policy.kept(steps)}


_Known = KeepLast | KeepEvery | KeepBest | KeepAny
_decoder = decoding.json_decoder(_Known | int)


def policy_of(keep: int | Policy) -> Policy:
    """Return the policy for a user's ``keep``; a number of steps means the newest ones.

    Raises:
        ConfigurationError: ``keep`` is neither a number of at least 1 nor a policy.
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
    """Encode the policy as one line of JSON, for a command line."""
    return msgspec.json.encode(policy).decode()


def decode(text: str) -> Policy:
    """Decode a policy from JSON; a number means the newest steps.

    Raises:
        ConfigurationError: the text is not a policy.
    """
    try:
        return policy_of(_decoder.decode(text))
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"keep is {text!r}, which is not a policy: {error}.") from error


def checked_metrics(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Return a step's metrics as they are stored, without those that are not finite: they are never the best.

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
