"""The journal: every input of the master's machines, in order, before it takes effect.

Replaying it restores the machines' state. It also decides who is the job's master: each master that starts
takes the next *epoch* in the store, and the store refuses an append by a master of an older epoch.

The setting ``journal`` names the store like a URL:

- ``file:`` is a SQLite file in the job directory, ``file:/path`` one elsewhere;
- ``memory:`` is lost with the master: the next one adopts what the job's agents hold.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from dlrover._util import decoding
from dlrover.errors import ConfigurationError, FencedError
from dlrover.master.machine import inputs
from dlrover.spec.requests.cluster import ClusterRequest
from dlrover.spec.requests.placement import PlacementRequest
from dlrover.spec.requests.shards import ShardRequest
from dlrover.spec.requests.strategies import StrategyRequest

Entry = inputs.Input | ShardRequest | PlacementRequest | ClusterRequest | StrategyRequest

JOURNALS = {
    "file": "dlrover.master.journal.file:open_file",
    "memory": "dlrover.master.journal.memory:open_memory",
}
"""Stores by scheme, as ``module:function``; each is imported on demand.

The function takes the text after the scheme, the path of the job directory's own file, and ``read_only``.
"""

DEFAULT = "file:"
"""The file of the job directory."""

_KINDS: dict[str, Any] = {
    "input": inputs.Input,
    "cluster": ClusterRequest,
    "placement": PlacementRequest,
    "shards": ShardRequest,
    "strategies": StrategyRequest,
}
_DECODERS = {kind: decoding.msgpack_decoder(types) for kind, types in _KINDS.items()}
_encoder = msgspec.msgpack.Encoder()


class Codec(NamedTuple):
    """The entries of a journal as bytes."""

    encode: Callable[[Any], tuple[str, bytes]]
    """Returns the kind of an entry, and the entry as bytes."""
    decode: Callable[[str, bytes], Any]
    """Returns the entry; raises `msgspec.DecodeError` if it is damaged."""


class Journal(Protocol):
    """One job's journal in a store. Opening it for writing takes the next epoch.

    Every method raises `InfrastructureError` when the store fails.
    """

    @property
    def epoch(self) -> int:
        """The epoch of the master that opened the journal, 1 for the first; 0 if opened for reading."""

    def append(self, entry: Entry, now: float) -> None:
        """Add an entry. When this returns, the entry outlives this process if the store does.

        Raises:
            FencedError: a later epoch was taken; nothing was added.
        """

    def append_all(self, entries: Sequence[Entry], now: float) -> None:
        """Add entries at once, all or none; otherwise like `append`."""

    def entries(self) -> Iterator[tuple[float, Entry]]:
        """Return the entries that a starting master has to replay, with their times, oldest first.

        All entries, or none if the store does not outlive its master.
        """

    def check(self) -> None:
        """Check that this is still the job's journal and its latest epoch.

        Raises:
            FencedError: it is not.
        """

    def raise_epoch(self, above: int) -> None:
        """Take an epoch higher than ``above``, which agents have seen and this store has lost.

        Raises:
            FencedError: a later epoch was taken meanwhile.
        """

    def close(self) -> None:
        """Release the store."""


def open_journal(url: str, own_file: Path, *, read_only: bool = False) -> Journal:
    """Open the journal that ``url`` names; ``own_file`` is the one in the job directory.

    Raises:
        ConfigurationError: ``url`` has an unknown scheme, or the rest of it is wrong for its scheme.
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
    """Return the kind of an entry and the entry as bytes, for stores."""
    kind = next(kind for kind, types in _KINDS.items() if isinstance(entry, types))
    return kind, _encoder.encode(entry)


def decoded(kind: str, body: bytes) -> Entry:
    """Return the entry that `encoded` turned into bytes.

    Raises:
        msgspec.DecodeError: it is damaged, or of another version.
    """
    if kind not in _DECODERS:
        raise msgspec.DecodeError(f"an entry has the unknown kind {kind}")
    entry: Entry = _DECODERS[kind].decode(body)
    return entry


MASTER = Codec(encoded, decoded)
"""The entries of a master's journal."""


def fenced(epoch: int, latest: int) -> FencedError:
    """Return the error for a master of ``epoch`` after ``latest`` was taken."""
    return FencedError(
        f"Another master has taken over the job with epoch {latest}; this one has epoch {epoch}."
    )
