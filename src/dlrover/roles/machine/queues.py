"""Queues whose items belong to the service: each is learned once, whoever dies."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from dlrover.errors import ProtocolError
from dlrover.roles.messages import (
    MAX_BODY,
    AckItems,
    GetItems,
    LeasedItem,
    MemberPlace,
    OpenQueue,
    PutItems,
    QueueStatus,
)

MAX_QUEUES = 1000
KEPT = 2
"""A queue keeps ``KEPT`` times its size of items that each source has acknowledged: its rollback may want them again."""
MAX_FORGOTTEN = 1000
"""Maximum number of steps whose items are counted after they were dropped."""


@dataclass
class ItemQueue:
    """One queue. An item waits, is leased, is kept after its acknowledgement, or is gone.

    Its number orders it: an item that is leased again comes before those that were put later.
    """

    size: int
    kind: str = ""
    bodies: dict[int, bytes] = field(default_factory=dict)
    """Items that are not gone."""
    waiting: list[int] = field(default_factory=list)
    """A heap."""
    leases: dict[int, MemberPlace] = field(default_factory=dict)
    kept: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Source and step that acknowledged each kept item, in the order of the acknowledgements."""
    takers: dict[int, MemberPlace] = field(default_factory=dict)
    """Who acknowledged the latest ``KEPT * size`` items, kept or gone: the one that may repeat it."""
    forgotten: dict[tuple[str, int], int] = field(default_factory=dict)
    """Acknowledged items that are kept no longer, by source and step."""
    deliveries: dict[int, int] = field(default_factory=dict)
    producers: dict[int, tuple[MemberPlace, int]] = field(default_factory=dict)
    """Each producer's process, and its last sequence number."""
    consumers: dict[int, tuple[MemberPlace, int, tuple[int, ...]]] = field(default_factory=dict)
    """Each consumer's process, its last sequence number, and the items that it got."""
    added: int = 0
    done: int = 0
    redelivered: int = 0
    lost: int = 0
    settled: int = 0
    """Acknowledged items that no rollback can want."""

    def __post_init__(self) -> None:
        self._kept_by: dict[str, dict[int, None]] = {}
        """Numbers of the kept items, by source."""
        for number, (source, _) in self.kept.items():
            self._kept_by.setdefault(source, {})[number] = None

    def validate(self) -> None:
        """Check the invariants."""
        waiting = set(self.waiting)
        assert len(waiting) == len(self.waiting), "an item waits twice"
        assert not waiting & self.leases.keys()
        assert not (waiting | self.leases.keys()) & self.kept.keys()
        assert self.bodies.keys() == waiting | self.leases.keys() | self.kept.keys()
        assert all(0 <= number < self.added for number in self.bodies)
        assert len(waiting) + len(self.leases) + self.done + self.lost == self.added
        assert self.done == len(self.kept) + sum(self.forgotten.values()) + self.settled
        assert all(0 < len(numbers) <= KEPT * self.size for numbers in self._kept_by.values())
        assert self.kept.keys() == set().union(*self._kept_by.values())
        assert len(self.kept) == sum(map(len, self._kept_by.values()))
        assert len(self.takers) <= KEPT * self.size
        assert not self.takers.keys() & (waiting | self.leases.keys())
        assert self.deliveries.keys() <= self.bodies.keys()

    def has_room(self, event: PutItems) -> bool:
        """Return whether a put would be handled now; one that was handled before would."""
        return self._is_repeated(event) or len(self.waiting) + len(event.items) <= self.size

    def has_items(self, event: GetItems) -> bool:
        """Return whether a request would get items now."""
        known = self.consumers.get(event.consumer)
        repeated = known is not None and known[1] == event.sequence
        return repeated or len(self.waiting) >= event.least

    def put(self, event: PutItems) -> bool:
        """Add items; return False if they were added before."""
        if self._is_repeated(event):
            return False
        for body in event.items:
            self.bodies[self.added] = body
            heapq.heappush(self.waiting, self.added)
            self.added += 1
        self.producers[event.producer] = (event.place, event.sequence)
        return True

    def _is_repeated(self, event: PutItems) -> bool:
        known = self.producers.get(event.producer)
        return known is not None and known[1] >= event.sequence

    def get(self, event: GetItems) -> tuple[LeasedItem, ...]:
        """Lease items; a repeated request gets those that it got, as far as they are still leased."""
        known = self.consumers.get(event.consumer)
        if known is not None and event.sequence < known[1]:
            raise ProtocolError(
                f"Request {event.sequence} of a consumer came after its request {known[1]}: it is late."
            )
        if known is not None and event.sequence == known[1]:
            numbers = tuple(n for n in known[2] if self.leases.get(n) == event.place)
        else:
            numbers = self._lease(event)
            self.consumers[event.consumer] = (event.place, event.sequence, numbers)
        return tuple(LeasedItem(n, self.bodies[n], self.deliveries[n]) for n in numbers)

    def _lease(self, event: GetItems) -> tuple[int, ...]:
        numbers: list[int] = []
        room = MAX_BODY
        while self.waiting and len(numbers) < event.count:
            room -= len(self.bodies[self.waiting[0]])
            if room < 0 and numbers:
                break
            number = heapq.heappop(self.waiting)
            self.leases[number] = event.place
            self.deliveries[number] = self.deliveries.get(number, 0) + 1
            numbers.append(number)
        return tuple(numbers)

    def check_ack(self, event: AckItems, source: str) -> None:
        """Refuse an acknowledgement of items that another has or has acknowledged, or that were not leased."""
        for number in event.numbers:
            holder = self.leases.get(number) or self.takers.get(number)
            learned = self.kept.get(number, (source, 0))[0]
            waits = number in self.bodies and holder is None and number not in self.kept
            another = holder != event.place if holder is not None else learned != source
            if number >= self.added or waits or another:
                known = holder or (learned if another else "there is none")
                raise ProtocolError(
                    f"Item {number} of the queue {event.queue} is not leased to {event.place}:"
                    f" {'it waits' if waits else known}."
                )

    def ack(self, event: AckItems, source: str) -> None:
        """Acknowledge items for a source; those that were acknowledged before stay so."""
        for number in event.numbers:
            if self.leases.pop(number, None) is None:
                continue
            self.done += 1
            self.takers[number] = event.place
            if event.step < 0:
                self._drop(number)
                self.settled += 1
            else:
                self.kept[number] = (source, event.step)
                self._kept_by.setdefault(source, {})[number] = None
        while len(mine := self._kept_by.get(source, {})) > KEPT * self.size:
            number = next(iter(mine))
            learned = self._unkept(number)
            self.forgotten[learned] = self.forgotten.get(learned, 0) + 1
            self._drop(number)
        while len(self.takers) > KEPT * self.size:
            del self.takers[next(iter(self.takers))]
        while len(self.forgotten) > MAX_FORGOTTEN:
            self.settled += self.forgotten.pop(next(iter(self.forgotten)))

    def _unkept(self, number: int) -> tuple[str, int]:
        """Keep an item no longer; return its source and step."""
        source, step = self.kept.pop(number)
        del self._kept_by[source][number]
        if not self._kept_by[source]:
            del self._kept_by[source]
        return source, step

    def _drop(self, number: int) -> None:
        del self.bodies[number]
        del self.deliveries[number]

    def release(self, place: MemberPlace) -> None:
        """Let others have what a life has leased."""
        for number in [n for n, holder in self.leases.items() if holder == place]:
            del self.leases[number]
            self._again(number)
        for key, (consumer, sequence, _) in self.consumers.items():
            if consumer == place:
                self.consumers[key] = consumer, sequence, ()

    def forget(self, place: MemberPlace) -> None:
        """Forget the requests of a life that is over: it repeats none."""
        self.producers = {key: one for key, one in self.producers.items() if one[0] != place}
        self.consumers = {key: one for key, one in self.consumers.items() if one[0] != place}

    def roll_back(self, source: str, step: int) -> None:
        """Lease again what a source has learned from after a step."""
        for number in [n for n, (by, at) in self.kept.items() if by == source and at > step]:
            self._unkept(number)
            self.takers.pop(number, None)
            self.done -= 1
            self._again(number)
        for key in [key for key in self.forgotten if key[0] == source and key[1] > step]:
            count = self.forgotten.pop(key)
            self.done -= count
            self.lost += count

    def _again(self, number: int) -> None:
        heapq.heappush(self.waiting, number)
        self.redelivered += 1

    def status(self) -> QueueStatus:
        """Return the queue in numbers."""
        return QueueStatus(
            len(self.waiting), len(self.leases), self.size, self.added, self.done, self.redelivered, self.lost
        )  # fmt: skip


@dataclass
class Queues:
    """All queues of a job, by name."""

    queues: dict[str, ItemQueue] = field(default_factory=dict)
    openers: dict[str, str] = field(default_factory=dict)
    """Role that opened each queue first."""

    def validate(self) -> None:
        """Check the invariants."""
        assert self.queues.keys() == self.openers.keys()
        for queue in self.queues.values():
            queue.validate()

    def open(self, event: OpenQueue) -> None:
        """Open a queue.

        Raises:
            ProtocolError: It is open with another size or kind, or there are too many.
        """
        known = self.queues.get(event.queue)
        if known is None:
            if len(self.queues) >= MAX_QUEUES:
                raise ProtocolError(f"The job has {MAX_QUEUES} queues; {event.queue} is one more.")
            self.queues[event.queue] = ItemQueue(event.size, event.kind)
            self.openers[event.queue] = event.place.role
        elif (known.size, known.kind) != (event.size, event.kind):
            raise ProtocolError(
                f"The queue {event.queue} is used in two ways: {self.openers[event.queue]} opened it with"
                f" {_way(known.size, known.kind)}, {event.place.role} wants {_way(event.size, event.kind)}."
            )

    def get(self, name: str) -> ItemQueue:
        """Return an open queue.

        Raises:
            ProtocolError: It is not open.
        """
        if name not in self.queues:
            raise ProtocolError(f"The queue {name} is not open.")
        return self.queues[name]


def _way(size: int, kind: str) -> str:
    return f"size {size}" + (f" and kind {kind}" if kind else "")
