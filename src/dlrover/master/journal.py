"""The journal: every input of the master's machines, in order, before it takes effect.

Replaying it gives the machines their state back. It also says who is the job's master: each start of a
master takes the next *epoch* in the store, and an append by a master of an older epoch is refused.

Where a journal lies is named like a URL, by the setting ``journal``:

- ``file:`` is a SQLite file in the job directory, ``file:/path`` one elsewhere;
- ``memory:`` is lost with the master: the next one adopts what the job's agents hold.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from dlrover.errors import ConfigurationError, FencedError
from dlrover.master.machine import inputs
from dlrover.rpc import messages
from dlrover.spec.shards import ShardRequest

Entry = inputs.Input | messages.StoreRequest | ShardRequest

JOURNALS = {
    "file": "dlrover.master.journal_file:open_file",
    "memory": "dlrover.master.journal_memory:open_memory",
}
"""Stores by scheme, as ``module:function``, so that none is imported before it is asked for.

The function takes what follows the scheme, the path of the job directory's own file, and ``read_only``.
"""
DEFAULT = "file:"

_DECODERS = {
    "input": msgspec.msgpack.Decoder(inputs.Input),
    "store": msgspec.msgpack.Decoder(messages.StoreRequest),
    "shards": msgspec.msgpack.Decoder(ShardRequest),
}
_encoder = msgspec.msgpack.Encoder()


class Journal(Protocol):
    """One job's journal in some store. Opening it for writing takes the next epoch.

    Every method raises `InfrastructureError` when the store fails.
    """

    @property
    def epoch(self) -> int:
        """The epoch of the master that opened it, 1 for the first; 0 if it was opened for reading."""

    def append(self, entry: Entry, now: float) -> None:
        """Add an entry; it outlives this process, if the store does, when this returns.

        Raises:
            FencedError: a later epoch was taken; nothing was added.
        """

    def append_all(self, entries: Sequence[Entry], now: float) -> None:
        """Add entries at once, all or none; as `append` otherwise."""

    def entries(self) -> Iterator[tuple[float, Entry]]:
        """What a master that starts now has to replay, with the times, oldest first.

        All entries, or none in a store that does not outlive its master.
        """

    def check(self) -> None:
        """Find out whether this is still the job's journal and its latest epoch.

        Raises:
            FencedError: it is not.
        """

    def raise_epoch(self, above: int) -> None:
        """Take an epoch higher than ``above``, which agents have met and this store has lost.

        Raises:
            FencedError: a later epoch was taken meanwhile.
        """

    def close(self) -> None:
        """Let the store go."""


def open_journal(url: str, own_file: Path, *, read_only: bool = False) -> Journal:
    """The journal that ``url`` names; ``own_file`` is the one in the job directory.

    Raises:
        ConfigurationError: ``url`` has an unknown scheme, or the store cannot be named so.
        FormatError: another version of DLRover wrote it.
        InfrastructureError: the store cannot be opened, or is damaged.
    """
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in JOURNALS:
        known = ", ".join(f"{name}:" for name in sorted(JOURNALS))
        raise ConfigurationError(
            f"journal {url} is unknown; it takes a value that begins with {known}."
        )
    module, _, attribute = JOURNALS[scheme].partition(":")
    opens: Callable[..., Journal] = getattr(importlib.import_module(module), attribute)
    return opens(rest, own_file, read_only=read_only)


def encoded(entry: Entry) -> tuple[str, bytes]:
    """The kind of an entry, and the entry as bytes; for stores."""
    kind = "input" if isinstance(entry, inputs.Input) else "store"
    if isinstance(entry, ShardRequest):
        kind = "shards"
    return kind, _encoder.encode(entry)


def decoded(kind: str, body: bytes) -> Entry:
    """The entry that `encoded` gave.

    Raises:
        msgspec.DecodeError: it is damaged, or of another version.
    """
    entry: Entry = _DECODERS[kind].decode(body)
    return entry


def fenced(epoch: int, latest: int) -> FencedError:
    """What a master of ``epoch`` is told once ``latest`` was taken."""
    return FencedError(
        f"Another master has taken over the job with epoch {latest}; this one has epoch {epoch}."
    )
