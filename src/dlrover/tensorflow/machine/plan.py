"""What the chief of estimators tells the others: the cluster of a generation, and where its data begin."""

from __future__ import annotations

import zlib

import msgspec

from dlrover._util import decoding
from dlrover.errors import ConfigurationError, ProtocolError


class SessionPlan(msgspec.Struct, frozen=True, array_like=True):
    """One generation: the sessions between two changes of the parameter servers."""

    number: int = 0
    """Generations so far; 0: the chief has not started."""
    servers: tuple[str, ...] = ()
    """Addresses of the parameter servers, in their order."""
    base: bytes = b""
    """Samples that the restored model had learned from (packed `Spans`)."""
    ready: bool = False
    """True once the chief has restored the model."""

    @property
    def container(self) -> str:
        """Name of the generation's variables on the servers: a step of an earlier one changes none of them."""
        return f"dlrover{self.number}"

    def packed(self) -> bytes:
        """Return the plan as the chief's note."""
        return msgspec.msgpack.encode(self)


def plan_of(note: bytes) -> SessionPlan:
    """Return the plan in the chief's note.

    Raises:
        ProtocolError: the note is another program's.
    """
    try:
        return decoding.msgpack(note, SessionPlan) if note else SessionPlan()
    except msgspec.DecodeError as error:
        raise ProtocolError(f"The chief's note is no plan: {error}.") from error


class Positions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint's model has learned from, in a file beside the checkpoint."""

    name: str
    size: int
    """Number of records."""
    acknowledged: bytes
    version: int = 1
    checksum: int = -1
    """CRC-32 of the other fields; -1: an earlier version of DLRover wrote none."""

    def packed(self) -> bytes:
        """Return the content of the file."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self, checksum=self._sum()))

    def _sum(self) -> int:
        return zlib.crc32(msgspec.msgpack.encode((self.name, self.size, self.acknowledged)))

    def check(self, path: str, size: int) -> None:
        """Check that the reader, whose records number ``size``, reads what the positions are for.

        Its name may differ: that is the path of a file, which may have been moved.

        Raises:
            ConfigurationError: it has more or fewer records.
        """
        if size != self.size:
            raise ConfigurationError(
                f"{path} holds positions in {self.size:,} records ({self.name}), but the reader has {size:,}; train with"
                " the same records, or remove the file to read the new ones from their beginning."
            )


def positions_of(content: bytes) -> Positions:
    """Return the positions in a file's content.

    Raises:
        ProtocolError: the content is not what was written.
    """
    try:
        found = decoding.msgpack(content, Positions)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"The file holds no positions: {error}.") from error
    if found.checksum not in (-1, found._sum()):  # noqa: SLF001 - of this module
        raise ProtocolError("The file's checksum is wrong.")
    return found
