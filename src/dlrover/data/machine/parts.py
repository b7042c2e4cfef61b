"""Samples that are read together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dlrover.spec.shards import Span


class Part(NamedTuple):
    """Consecutive samples."""

    span: Span
    """Positions of the samples. In a stream there is one sample, at the end of the span."""
    items: Sequence[Any]
    """Inputs from which the source makes the samples."""

    def places(self) -> Iterator[tuple[Span, Any]]:
        """Yield each sample's own place and its input."""
        partition, start, stop = self.span.partition, self.span.start, self.span.stop
        if len(self.items) == 1:
            yield self.span, self.items[0]
            return
        for at, item in zip(range(start, stop), self.items, strict=True):
            yield Span(partition, at, at + 1), item

    def cut(self, count: int) -> tuple[Part, Part | None]:
        """Split into the first ``count`` samples and the rest, which is None if empty."""
        if count >= len(self.items):
            return self, None
        partition, middle = self.span.partition, self.span.start + count
        first = Part(Span(partition, self.span.start, middle), self.items[:count])
        return first, Part(Span(partition, middle, self.span.stop), self.items[count:])
