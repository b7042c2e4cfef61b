"""Check that all nodes of a world see the same checkpoint directory."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dlrover._util import decoding
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import Store
from dlrover.errors import ConfigurationError

logger = logging.getLogger(__name__)

PATIENCE = 75.0
"""Seconds for a node to see a file that another one has written: NFS caches names for up to 60 by default."""
KILLED = 3600.0
"""Age in seconds from which a leftover file belongs to a killed start; far more than clocks differ."""
_MARK = ".shared."
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class _SharedFacts(msgspec.Struct, frozen=True, array_like=True):
    """Data that each rank sends to the others."""

    host: str
    location: str
    identity: str
    token: str

    @property
    def node(self) -> tuple[str, str]:
        """Key that is equal for ranks of one node, which see the same files."""
        return self.host, self.location


def identity(world: TorchWorld, store: Store, *, create: bool) -> str:
    """Return the identity of the directory; with ``create``, rank 0 makes a missing one first. Collective.

    Where a store cannot create a file exclusively, ranks that did so at once would get different ones.

    Raises:
        InfrastructureError: a rank cannot read or write the directory.
    """
    if create:
        world.agree(lambda: storage.identity(store) if world.rank == 0 else "")
    return world.agree(lambda: storage.identity(store, create=create))


def note(world: TorchWorld, store: Store, file: str) -> None:
    """Add the directory to the job's list for people, ``file``, if it is not there yet; rank 0 does."""
    if world.rank or not file:
        return
    with (
        contextlib.suppress(OSError),
        Path(file).open("a+", encoding="utf-8", errors="replace") as listed,
    ):
        listed.seek(0)
        if store.location not in listed.read().splitlines():
            listed.write(f"{store.location}\n")


def check(world: TorchWorld, store: Store, identity: str, *, read_only: bool = False) -> None:
    """Refuse a directory that the nodes do not share. Collective.

    Rank 0 writes a file, and the first rank of every other node must see it. With ``read_only``, or on a
    read-only file system, only the identities of the directories must be equal.

    Raises:
        ConfigurationError: the nodes do not share the directory.
        OSError: the directory cannot be written or read.
    """
    mine = _SharedFacts(socket.gethostname(), store.location, identity, secrets.token_hex(8))
    every = [
        decoding.msgpack(data, _SharedFacts) for data in world.gather(msgspec.msgpack.encode(mine))
    ]
    nodes = [facts.node for facts in every]
    others = [rank for rank, node in enumerate(nodes) if nodes.index(node) == rank and rank]
    _refuse(every, [rank for rank in others if every[rank].identity != every[0].identity])
    if read_only or not others:
        return
    mark = f"{_MARK}{every[0].token}"
    try:
        written = world.agree(lambda: world.rank != 0 or _write(store, mark))
        if not world.exchange([written])[0][0]:
            return
        sees = world.agree(lambda: world.rank not in others or until_seen(store, mark))
        blind = [rank for rank, (flag,) in enumerate(world.exchange([sees])) if not flag]
        _refuse(every, blind)
    finally:
        if world.rank == 0:
            with contextlib.suppress(OSError):  # the next start removes it
                store.delete(mark)


def _refuse(every: Sequence[_SharedFacts], blind: Sequence[int]) -> None:
    """Raise the same error on every rank if some ranks do not see what rank 0 sees."""
    if blind:
        first, other = every[0], every[blind[0]]
        raise ConfigurationError(
            f"The nodes do not share the checkpoint directory {first.location}: rank {blind[0]} on"
            f" {other.host} does not see there what rank 0 on {first.host} has written. Name a directory"
            " on a file system that all nodes have mounted, or a URL."
        )


def _write(store: Store, mark: str) -> bool:
    """Write a file and remove those of killed starts; return False if the directory is read-only."""
    try:
        for name in store.names():
            if name.startswith(_MARK) and _is_old(store, name):
                store.delete(name)
        store.write(mark, str(time.time()).encode())
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        logger.info("%s can only be read", store.location)
        return False
    return True


def _is_old(store: Store, mark: str) -> bool:
    """Return True if no start still waits for the file: a training and its evaluation may start together."""
    try:
        return time.time() - float(store.read(mark)) > KILLED
    except FileNotFoundError:
        return False
    except ValueError:
        return True


def until_seen(store: Store, file: str, patience: float | None = None) -> bool:
    """Wait until this node sees a file that another node has written; return True if it does."""
    until = time.monotonic() + (PATIENCE if patience is None else patience)
    warned = False
    while not store.exists(file):
        if time.monotonic() >= until:
            return False
        if not warned:
            logger.warning(
                "Waiting up to %.0f s for %s, which rank 0 sees: file systems such as NFS cache names",
                until - time.monotonic(), store.where(file),
            )  # fmt: skip
            warned = True
        threading.Event().wait(store.poll)
    return True
