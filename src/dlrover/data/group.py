"""Commits of stored checkpoints' offsets to a broker, for monitoring by its consumer groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dlrover.data.machine.state import began, merged
from dlrover.data.services import ShardService
from dlrover.data.sources.stream import Stream
from dlrover.spec.shards import DataSpec, LookShards, Span

logger = logging.getLogger(__name__)


class ConsumerGroup:
    """Consumer group in a stream's address. Committed offsets are never read back."""

    def __init__(self, stream: Stream[Any]) -> None:
        self._stream = stream
        self._name = stream.broker().group
        self._failing = False

    def __bool__(self) -> bool:
        return bool(self._name)

    def commit(
        self, states: Sequence[Mapping[str, Any]], spec: DataSpec, service: ShardService | None
    ) -> None:
        """Commit the offsets of a checkpoint; log errors, once until a commit succeeds again.

        Args:
            states: states of all ranks, as in the checkpoint.
            spec: the dataset.
            service: source of the skipped samples, which appear in no checkpoint; None if nothing was read.
        """
        broker = self._stream.broker()
        try:
            skipped = _skipped(spec.name, service) if service else []
            offsets = offsets_of(states, spec, skipped, broker.is_empty)
            if not offsets:
                return  # no worker had begun to read
            broker.commit(offsets)
        except Exception as error:  # noqa: BLE001 - whatever a client raises: training goes on
            if not self._failing:
                logger.warning(
                    "The checkpoint's offsets could not be committed to the group %s of %s; training goes on: %s",
                    self._name, broker.address, broker.address.scrubbed(error),
                )  # fmt: skip
            self._failing = True
        else:
            logger.info("The group %s of %s is at %s", self._name, broker.address, offsets)
            self._failing = False
        finally:
            broker.close()


def offsets_of(
    states: Sequence[Mapping[str, Any]],
    spec: DataSpec,
    skipped: Iterable[Span],
    is_empty: Callable[[Span], bool],
) -> list[int]:
    """Return, by partition, the first offset that is neither in a checkpoint nor skipped.

    Gaps without a message count as read: the worker that has leased one may not come to it any more.
    """
    acknowledged, _ = merged(states, spec)
    for span in skipped:
        acknowledged.add(span)
    begins, _ = began(states)
    offsets = []
    for number, begin in enumerate(begins):
        start, stop = acknowledged.of(number).gap(begin)
        while stop is not None and is_empty(Span(number, start, stop)):
            start, stop = acknowledged.of(number).gap(stop)
        offsets.append(start)
    return offsets


def _skipped(name: str, service: ShardService) -> list[Span]:
    asking = service.another()
    try:
        return [what.span for what in asking.ask(LookShards(name)).skipped]
    finally:
        asking.close()
