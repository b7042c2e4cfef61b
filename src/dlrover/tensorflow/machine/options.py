"""Options of a guarded training function."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dlrover.errors import ConfigurationError

_LEAST = {
    "every_seconds": 0,
    "every_steps": 0,
    "keep": 1,
    "spares": 0,
    "timeout": 0,
    "max_failures": 1,
}


@dataclass(frozen=True)
class GuardOptions:
    """Options of `dlrover.tensorflow.resilient`.

    Raises:
        ConfigurationError: a number is too small.
    """

    checkpoint: str
    every_seconds: float
    every_steps: int
    keep: int
    spares: int
    timeout: float
    max_failures: int

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name in _LEAST):
            value, least = getattr(self, name), _LEAST[name]
            if value < least:
                raise ConfigurationError(f"{name} is {value}; it must be at least {least}.")
