"""The coordinator's journal: the inputs of the job's machine and those of the roles' service, in one order."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dlrover._util import decoding
from dlrover.errors import FencedError, InfrastructureError
from dlrover.master.journal.file import FileJournal
from dlrover.master.journal.journal import Codec
from dlrover.roles.machine.inputs import Input

logger = logging.getLogger(__name__)

_decoder = decoding.msgpack_decoder(Input)
_encoder = msgspec.msgpack.Encoder()


def _encode(entry: Input | bytes) -> tuple[str, bytes]:
    if isinstance(entry, bytes):
        return "roles", entry  # of the service, which encodes its inputs itself
    return "job", _encoder.encode(entry)


def _decode(kind: str, body: bytes) -> Input | bytes:
    if kind == "roles":
        return body
    entry: Input = _decoder.decode(body)
    return entry


CODEC = Codec(_encode, _decode)


class RolesJournal:
    """A coordinator's journal at ``path``; opening it for writing fences an earlier coordinator off.

    Raises:
        InfrastructureError: as for `FileJournal`, in each method.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._file: Any = FileJournal(path, read_only=read_only, codec=CODEC)
        self._backlog: deque[tuple[float, Input | bytes]] = deque()
        """What has taken effect and is not in the file yet."""
        self.on_fenced: Callable[[FencedError], None] = lambda _: None
        """Called when another coordinator turns out to have taken over."""

    def append(self, entry: Input | bytes, now: float) -> None:
        """Add an entry; it outlives this process when this returns."""
        with self._fenced_off():
            while self._backlog:
                at, older = self._backlog[0]
                self._file.append(older, at)
                self._backlog.popleft()
            self._file.append(entry, now)

    def replace(self, entry: bytes, now: float) -> None:
        """Put an entry of the service in the place of all of its entries."""
        with self._fenced_off():
            self._file.replace(entry, now)

    def append_or_keep(self, entry: Input, now: float) -> None:
        """Add an entry that no process would bring again; while the disk is full, keep it in memory."""
        try:
            self.append(entry, now)
        except FencedError:
            raise
        except InfrastructureError as error:
            with self._fenced_off():
                self._file.check()  # this needs no disk space
            if not self._backlog:
                logger.warning("%s The job goes on; its state is kept in memory.", error)
            self._backlog.append((now, entry))

    @contextlib.contextmanager
    def _fenced_off(self) -> Iterator[None]:
        try:
            yield
        except FencedError as error:
            self.on_fenced(error)
            raise

    def entries(self) -> Iterator[tuple[float, Input | bytes]]:
        """Yield all entries with their times, oldest first."""
        yield from self._file.entries()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
