"""What the ranks of an unchanged program have sent each other as objects before their first step, for those that return.

A rank that replays the program takes part in no collective. Seeds, orders of samples and names that one rank has drawn decide what the program
does afterwards, so it gets those of the others: they are in the memory of the master, and of each rank that trains.
"""

from __future__ import annotations

import contextlib
import time

import msgspec
import torch

from dlrover import launched
from dlrover._util import decoding
from dlrover.errors import InfrastructureError
from dlrover.spec.requests.membership import MAX_VALUE
from dlrover.training.machine.places import EXCLUDED_LIMIT
from dlrover.training.replicas.groups import Changed, MeetingStore
from dlrover.training.replicas.link import Link

MOST_PARTS = 128
"""Maximum size of the objects of one collective, in values of the greatest size."""
_decoder = decoding.msgpack_decoder(list[bytes])


class Sent:
    """The results of collectives for objects, in their order; each rank has all of them."""

    def __init__(self, link: Link, given: launched.Given) -> None:
        self._link, self._round = link, given.round
        self._values: dict[str, bytes] = {}
        self._count = 0
        self._end = 0.0
        self._read = self._store()
        self._read.look = self._look

    def _store(self) -> MeetingStore:
        return MeetingStore(self._link, self._round, 0, {}, begun=True)

    def add(self, results: list[torch.Tensor], *, sends: bool) -> None:
        """Keep the results of the next collective; one rank ``sends`` them to the master."""
        values = self._keep(msgspec.msgpack.encode([one.numpy().tobytes() for one in results]))
        if sends:
            self._send(values)

    def _keep(self, data: bytes) -> dict[str, bytes]:
        size = -(-len(data) // MAX_VALUE)
        parts = range(size if size <= MOST_PARTS else 0)
        values = {str(self._count): str(len(parts)).encode()}
        values |= {f"{self._count}.{i}": data[i * MAX_VALUE :][:MAX_VALUE] for i in parts}
        self._values |= values
        self._count += 1
        return values

    def send(self) -> None:
        """Give the master all of them: one that has taken over has none."""
        self._send(self._values)

    def _send(self, values: dict[str, bytes]) -> None:
        store = self._store()
        with contextlib.suppress(Changed):  # there is no room: a rank that returns says so
            for key, value in values.items():
                store.set(key, value)

    def take(self) -> list[torch.Tensor]:
        """Return the results of the next collective, as the others have them.

        Raises:
            InfrastructureError: The master does not have them.
        """
        self._end = time.monotonic() + EXCLUDED_LIMIT
        number = self._count
        try:
            parts = range(int(self._read.get(str(number))))
            data = b"".join(self._read.get(f"{number}.{i}") for i in parts)
        except Changed as change:
            raise InfrastructureError(
                f"--survive: this rank cannot take what the others have sent each other before their first step ({change});"
                " all ranks start again."
            ) from None
        if not data:
            raise InfrastructureError(
                f"--survive: the ranks have sent each other objects of more than {MOST_PARTS * MAX_VALUE} bytes before their first"
                " step, which a rank that returns cannot take; all ranks start again."
            )
        self._keep(data)
        return [
            torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in _decoder.decode(data)
        ]

    def _look(self) -> None:
        if time.monotonic() > self._end:
            raise Changed(f"the master does not know it within {EXCLUDED_LIMIT:g} s")
