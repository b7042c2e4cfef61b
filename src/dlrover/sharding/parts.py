"""Samples that are read together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dlrover.spec.shards import Span


class Part(NamedTuple):
    """Samples that follow each other."""

    span: Span
    """Where they stand. Of a stream there is one sample, at its end."""
    items: Sequence[Any]
    """What the source makes each of them of."""

    def places(self) -> Iterator[tuple[Span, Any]]:
        """Each sample's own place, and what it is made of."""
        lane, start, stop = self.span.lane, self.span.start, self.span.stop
        if len(self.items) == 1:
            yield self.span, self.items[0]
            return
        for at, item in zip(range(start, stop), self.items, strict=True):
            yield Span(lane, at, at + 1), item

    def cut(self, count: int) -> tuple[Part, Part | None]:
        """The first ``count`` samples and the rest, if there is one."""
        if count >= len(self.items):
            return self, None
        lane, middle = self.span.lane, self.span.start + count
        first = Part(Span(lane, self.span.start, middle), self.items[:count])
        return first, Part(Span(lane, middle, self.span.stop), self.items[count:])
