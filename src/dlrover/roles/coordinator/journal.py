"""The coordinator's journal: the inputs of the job's machine and those of the roles' service, in one order."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dlrover.master.journal.file import FileJournal
from dlrover.master.journal.journal import Codec
from dlrover.roles.machine.job import Input

_decoder = msgspec.msgpack.Decoder(Input)
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


def open_journal(path: Path, *, read_only: bool = False) -> FileJournal:
    """Open the journal of the coordinator at ``path``; see `FileJournal` for errors."""
    return FileJournal(path, read_only=read_only, codec=CODEC)
