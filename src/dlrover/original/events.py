"""The original's training events, as lines of a log, and as activities where the goodput ledger knows them."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import time
import uuid
from collections.abc import Iterator
from typing import Any, TypeVar

from typing_extensions import Self

from dlrover.training.worker import tracker

logger = logging.getLogger("dlrover.events")

ACTIVITIES = {"#evaluate": "eval", "#predict": "eval"}
"""What `dlrover.training.activity` calls a span."""


Span = TypeVar("Span", bound="DurationSpan")


class WarningType(enum.Enum):
    """Kinds of warnings."""

    DEPRECATED = "deprecated"


class DurationSpan:
    """A time from `begin` to `end`, or of a with block."""

    def __init__(self, target: str, name: str, content: dict[str, Any] | None = None) -> None:
        self._target, self._name, self._content = target, name, dict(content or {})
        self._id = uuid.uuid4().hex[:8]
        self._begun = 0.0
        self._open = contextlib.ExitStack()

    def begin(self) -> DurationSpan:
        """Begin the span."""
        self._begun = time.monotonic()
        if self._name in ACTIVITIES:
            self._open.enter_context(tracker.activity(ACTIVITIES[self._name]))
        _log("BEGIN", self._id, self._target, self._name, self._content)
        return self

    def end(self) -> None:
        """End the span, once; later calls have no effect."""
        if not self._begun:
            return
        self._open.close()
        content = {**self._content, "seconds": round(time.monotonic() - self._begun, 6)}
        self._begun = 0.0
        _log("END", self._id, self._target, self._name, content)

    def stage(self, stage: str, content: dict[str, Any] | None = None) -> DurationSpan:
        """Return a span within this one."""
        return DurationSpan(
            self._target, f"{self._name}#{stage}", {**self._content, **(content or {})}
        )

    def extra_args(self, **content: Any) -> DurationSpan:
        """Add values to the next event."""
        return self.extra_dict(content)

    def extra_dict(self, content: dict[str, Any]) -> DurationSpan:
        """Add values to the next event."""
        self._content.update(content)
        return self

    def success(self, **content: Any) -> None:
        """End the span as one that succeeded."""
        self.extra_args(success=True, **content).end()

    def fail(self, error: str = "", **content: Any) -> None:
        """End the span as one that failed."""
        self.extra_args(success=False, error=error, **content).end()

    def load_ckpt(self) -> DurationSpan:
        """Return the span of a load."""
        return self.stage("load_ckpt")

    def load_dataset(self) -> DurationSpan:
        """Return the span of opening the data."""
        return self.stage("load_dataset")

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.success()
        else:
            self.fail(f"{type(error).__name__}: {error}")


class Process:
    """Events of one process."""

    def __init__(self, target: str) -> None:
        self._target = target

    def instant(self, name: str, content: dict[str, Any] | None = None) -> None:
        """Note a moment."""
        _log("INSTANT", uuid.uuid4().hex[:8], self._target, name, content or {})

    def duration(self, name: str, content: dict[str, Any] | None = None) -> DurationSpan:
        """Return a span."""
        return DurationSpan(self._target, name, content)

    def custom_duration(
        self, kind: type[DurationSpan], name: str, content: dict[str, Any] | None = None
    ) -> DurationSpan:
        """Return a span of a class of the program's own."""
        return kind(self._target, name, content)

    def warning(self, warning_type: WarningType, msg: str, **content: Any) -> None:
        """Note a warning."""
        self.instant("#warning", {"warning_type": warning_type.value, "msg": msg, **content})

    def info(self, msg: str) -> None:
        """Log a message."""
        logger.info("%s", msg)

    def error(self, msg: str) -> None:
        """Log a message as an error."""
        logger.error("%s", msg)


_SPANS = ("init", "train", "epoch", "step", "evaluate", "predict", "save", "persist_ckpt")
_MOMENTS = ("start", "finish", "init_end", "substep", "predict_step", "log")


class TrainerProcess(Process):
    """Events of a trainer: each of the original's methods, by its name."""

    def __getattr__(self, name: str) -> Any:
        if name not in (*_SPANS, *_MOMENTS):
            raise AttributeError(f"A trainer has no event {name}.")

        def note(global_step: Any = None, *more: Any, **content: Any) -> DurationSpan | None:
            if global_step is not None:
                content = {"global_step": global_step, **content}
            if more:
                content["content"] = more if len(more) > 1 else more[0]
            if name in _SPANS:
                return self.duration(f"#{name}", content)
            self.instant(f"#{name}", content)
            return None

        return note


class DLRoverAgentEvent(Process):
    """Events of an agent; ours writes its own (``dlrover events``)."""


class DLRoverMasterEvent(Process):
    """Events of a master; ours writes its own (``dlrover events``)."""


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A value that is no JSON must not end a training."""
    try:
        yield
    except (TypeError, ValueError) as error:
        logger.warning("An event could not be written: %s", error)


def _log(kind: str, ident: str, target: str, name: str, content: dict[str, Any]) -> None:
    with _quietly():
        logger.info("%s", json.dumps([kind, ident, target, name, content]))
