"""Queues between roles. The items belong to the job, not to the process that made them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, overload

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.roles.messages import (
    MAX_BODY,
    MAX_ITEMS,
    MAX_WAIT,
    AckItems,
    GetItems,
    Later,
    LeasedItem,
    LeasedItems,
    LookQueue,
    OpenQueue,
    PutItems,
    QueueStatus,
)
from dlrover.roles.runtime import payload, wire
from dlrover.roles.runtime.link import expected
from dlrover.roles.runtime.worker import current_worker, encode_cursor, step_number

SIZE = 1000
WAIT = 600.0
"""Seconds that `Queue.put` waits for room and `Queue.get` for items."""


class Items(Sequence[Any]):
    """Items that this process has leased: read them as a list, acknowledge them all or a part of them.

    Attributes:
        numbers: Their numbers in the queue: an item that is leased again has the same one.
        deliveries: How often each was leased, this time included.
    """

    def __init__(self, leased: Iterable[tuple[LeasedItem, Any]] = ()) -> None:
        self._leased = list(leased)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the items."""
        return [item.number for item, _ in self._leased]

    @property
    def deliveries(self) -> list[int]:
        """How often each item was leased."""
        return [item.deliveries for item, _ in self._leased]

    def __len__(self) -> int:
        return len(self._leased)

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self._leased)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Items: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Items(self._leased[index])
        return self._leased[index][1]

    def __add__(self, other: Items) -> Items:
        return Items([*self._leased, *other._leased])

    def __repr__(self) -> str:
        return f"Items({list(self)!r})"


class _Unsure(NamedTuple):
    """A put that has ended with an error: how much of it was added is not known."""

    bodies: list[bytes]
    cursor: bytes | None
    first: int
    """Number of its first request; the others follow."""
    answered: int = 0
    """Requests that were answered."""


class Queue:
    """A queue of the job, by its name. One thread uses an object; others make their own.

    An item waits until it is leased by `get`, and is leased again if the process that has it dies before it
    acknowledges it. It is never leased again after that, unless the acknowledgement names a step and the role goes
    back behind it.

    Args:
        name: Name of the queue.
        size: Items that may wait; `put` waits for room beyond it.
        kind: What the items are; any text. All users of the queue must agree on size and kind.

    Raises:
        ConfigurationError: The queue is used with another size or kind.
    """

    def __init__(self, name: str, size: int = SIZE, kind: str = "") -> None:
        if not len(name) >= 1 or size < 1:
            raise ConfigurationError(
                f"Queue {name!r} with size {size}: it needs a name and a size of 1 or more."
            )
        self.name, self.size = name, size
        self._worker = current_worker()
        self._id = secrets.randbits(62)
        self._lock = threading.Lock()
        self._puts = 0
        """Number of the next request to put."""
        self._unsure: _Unsure | None = None
        """The last put, if it has failed."""
        self._mine: dict[int, None] = {}
        self._got = 0, Items()
        """Number of the next request to get, and what was leased by a `get` that failed: the next one returns it."""
        self._ask(OpenQueue(self._worker.place, name, size, kind))

    def _ask(self, request: Any) -> Any:
        return self._worker.link.ask(request)

    def put(self, *items: Any, timeout: float = WAIT, cursor: Any = None) -> None:
        """Add items; wait for room. They are safe when this returns, and each is there once.

        After an interrupt, as by Ctrl-C, or the loss of the coordinator, the same items may be put again at once: those
        that were added already are not added twice.

        Args:
            items: Values as for calls between roles: no pickle.
            timeout: Seconds to wait for room.
            cursor: New `RoleWorker.cursor`, set at the same instant as all items are added; None: unchanged.

        Raises:
            InfrastructureError: There was no room in time; the error says how many items were added.
            ConfigurationError: An item cannot be kept.
        """
        bodies = [self._encoded(item) for item in items]
        groups = list(_groups(bodies, min(self.size, MAX_ITEMS)))
        if cursor is not None and len(groups) != 1:
            raise ConfigurationError(
                f"{len(items)} items of {sum(map(len, bodies))} bytes with a cursor: one put takes 1 to {self.size} items"
                f" and {MAX_BODY} bytes."
            )
        data = encode_cursor(cursor) if cursor is not None else None
        until = time.monotonic() + timeout
        sent, answered, has_room = None, 0, True
        try:
            with self._lock:
                sent = self._begun(bodies, data, len(groups))
                answered = sent.answered
                while has_room and answered < len(groups):
                    group = tuple(groups[answered])
                    has_room = self._put(group, data, sent.first + answered, until)
                    if has_room:
                        answered += 1
                        self._worker.progress(len(group))
                self._unsure = None
            if not has_room:
                added = sum(map(len, groups[:answered]))
                self._late(
                    f"room for {timeout:.0f} s", f"; {added} of {len(items)} items were added"
                )
        except BaseException:
            if sent is not None and has_room:
                self._unsure = sent._replace(answered=answered)
            raise

    def _begun(self, bodies: list[bytes], cursor: bytes | None, requests: int) -> _Unsure:
        """Return the last put if it has failed and this is the same one, otherwise a new one."""
        known = self._unsure
        if known is not None and (known.bodies, known.cursor) == (bodies, cursor):
            return known
        first = self._puts
        self._puts += requests
        return _Unsure(bodies, cursor, first)

    def _put(
        self, group: tuple[bytes, ...], cursor: bytes | None, number: int, until: float
    ) -> bool:
        while True:
            wait = min(MAX_WAIT, max(0.0, until - time.monotonic()))
            request = PutItems(self._worker.place, self.name, self._id, number, group, cursor, wait)
            if not isinstance(self._ask(request), Later):
                return True
            if time.monotonic() >= until:
                return False

    def get(self, count: int = 1, *, wait: bool = True, timeout: float = WAIT) -> Items:
        """Lease ``count`` items and return them. What was leased when this fails, the next ``get`` returns.

        Args:
            count: Items to lease.
            wait: False: return those that are there, at most ``count``, perhaps none.
            timeout: Seconds to wait; then, return those that are there.

        Raises:
            InfrastructureError: There was none in time.
        """
        if not 1 <= count <= min(self.size, MAX_ITEMS):
            raise ConfigurationError(
                f"get({count}): a get takes 1 to {min(self.size, MAX_ITEMS)} items of the queue {self.name}."
            )
        leased = Items()
        try:
            with self._lock:
                until = time.monotonic() + (timeout if wait else 0.0)
                while (missing := count - len(self._got[1])) > 0:
                    left = until - time.monotonic()
                    more = self._get(missing, missing if left > 0 else 1, left)
                    if not more and left <= 0:
                        break
                number, leased = self._got
                found = leased[:count]
                self._mine |= dict.fromkeys(found.numbers)
                self._got = number, leased[count:]
            if not found and wait:
                self._late(f"items for {timeout:.0f} s")
            return found  # noqa: TRY300 - an interrupt here, too, means that the caller has not got them
        except BaseException:
            if leased:
                self._mine = {n: None for n in self._mine if n not in leased.numbers}
                self._got = self._got[0], leased
            raise

    def _get(self, count: int, least: int, left: float) -> bool:
        """Lease items; return whether there were any."""
        wait = min(MAX_WAIT, max(0.0, left))
        place = self._worker.place
        # The next request has another number once this one has leased items: an answer that was lost comes again.
        number, leased = self._got
        reply = self._ask(GetItems(place, self.name, self._id, number, count, least, wait))
        if isinstance(reply, Later):
            return False
        items = expected(reply, LeasedItems).items
        more = Items((item, _decoded(item.body)) for item in items)
        self._got = number + 1, leased + more
        return bool(more)

    def ack(self, items: Items | None = None, *, step: int = -1, cursor: Any = None) -> None:
        """Acknowledge leased items: they are done, whatever dies.

        Args:
            items: What `get` has returned, or a part of it; None: all that this object has leased.
            step: Step whose state learns from them: if the role goes on from an earlier step, they are leased again.
                Acknowledge before you save that step. -1: they are done for ever.
            cursor: New `RoleWorker.cursor`, set at the same instant; None: unchanged.

        Raises:
            ConfigurationError: An item is not leased to this process, or the step is no whole number.
        """
        if step != -1:
            step = step_number("step", step)
        data = encode_cursor(cursor) if cursor is not None else None
        with self._lock:
            numbers = items.numbers if items is not None else list(self._mine)
            parts = [numbers[i : i + MAX_ITEMS] for i in range(0, len(numbers), MAX_ITEMS)]
            if data is not None and not parts:
                parts = [[]]
            for place, part in enumerate(parts, 1):
                last = data if place == len(parts) else None
                self._ask(AckItems(self._worker.place, self.name, tuple(part), step, last))
                for number in part:
                    self._mine.pop(number, None)
                self._worker.progress(len(part))

    def status(self) -> QueueStatus:
        """Return the queue in numbers."""
        return expected(self._ask(LookQueue(self._worker.place, self.name)), QueueStatus)

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return self.status().waiting

    def _late(self, missing: str, added: str = "") -> NoReturn:
        raise InfrastructureError(
            f"The queue {self.name} had no {missing}: {self._described()}{added}."
        )

    def _described(self) -> str:
        now = self.status()
        return f"{now.waiting} of {now.size} wait, {now.leased} are leased, {now.done} are done"

    def _encoded(self, item: Any) -> bytes:
        head, buffers = payload.encode_named(f"an item of the queue {self.name}", item)
        body = wire.packed(head, buffers)
        if len(body) > MAX_BODY:
            raise ConfigurationError(
                f"An item of the queue {self.name} has {len(body)} bytes; at most {MAX_BODY} are accepted: send large"
                " arrays by a call or by weights."
            )
        return body


def _groups(bodies: list[bytes], most: int) -> Iterator[list[bytes]]:
    """Yield items in groups that fit in one request."""
    group: list[bytes] = []
    size = 0
    for body in bodies:
        if group and (len(group) >= most or size + len(body) > MAX_BODY):
            yield group
            group, size = [], 0
        group.append(body)
        size += len(body)
    if group:
        yield group


def _decoded(body: bytes) -> Any:
    return payload.decode(*wire.unpacked(body))
