"""The checkpoint savers of this node, one for each directory that its workers save to, and requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dlrover._util import procs
from dlrover._util.start import AGENT, SAVER
from dlrover.errors import DLRoverError
from dlrover.rpc.messages import StoredPlace

if TYPE_CHECKING:
    from dlrover.checkpoint.saver import protocol

logger = logging.getLogger(__name__)

WAIT = 5.0
"""Seconds that a saver gets to end with its agent: a supervisor does not wait much longer for its agent."""
PATIENCE = 600.0
"""Seconds that a saver gets to store a step."""


def running(place: str) -> set[int]:
    """Return the pids of the savers of this agent's node.

    A saver that has outlived an earlier agent at the same place serves this one's workers. The launcher is its parent,
    or init where the launcher has ended, too.
    """
    found = procs.running(SAVER)
    if not place:
        return found
    others = procs.running(SAVER, filter(procs.is_own, procs.pids())) - found
    return found | {
        pid
        for pid in others
        if _options(pid).get("--node") == place and not procs.running(AGENT, [procs.parent(pid)])
    }


async def save_now(pids: Iterable[int], request: str) -> tuple[StoredPlace, ...]:
    """Have each saver store the newest save in memory; return what became of it."""
    asked = (asyncio.to_thread(_save_now, pid, request) for pid in sorted(pids))
    return tuple(await asyncio.gather(*asked))


async def store_at_end(pids: Iterable[int], stopping: float, *, partial: bool) -> None:
    """Have each saver store the newest save in memory once the workers end; return when all know it.

    The workers have ``stopping`` seconds to end, here and on other nodes. With ``partial``, some nodes are lost.
    """
    orders = (asyncio.to_thread(_store_at_end, pid, stopping, partial) for pid in pids)
    await asyncio.gather(*orders)


async def stored_at_end(pids: Iterable[int], patience: float) -> tuple[StoredPlace, ...]:
    """Return what became of `store_at_end` once the workers have ended, at most ``patience`` seconds later."""
    asked = (asyncio.to_thread(_stored_at_end, pid, patience) for pid in sorted(pids))
    return tuple(await asyncio.gather(*asked))


class Holds:
    """Connections to a node's savers: while one is open, a saver stays, and with it the memory, without workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, socket.socket] = {}

    def update(self, pids: Iterable[int]) -> None:
        """Hold exactly these savers; one that accepts no connection now is left out."""
        with self._lock:
            for gone in self._open.keys() - set(pids):
                self._open.pop(gone).close()
            for pid in set(pids) - self._open.keys():
                with contextlib.suppress(OSError, DLRoverError, ModuleNotFoundError):
                    self._open[pid] = _connected(pid, 0.0)

    def close(self) -> None:
        """Let all savers go."""
        self.update(())


def _save_now(pid: int, request: str) -> StoredPlace:
    return _place(pid, lambda protocol: protocol.SaveNow(request), PATIENCE)


def _stored_at_end(pid: int, patience: float) -> StoredPlace:
    return _place(pid, lambda protocol: protocol.StoredAtEnd(), patience)


def _place(pid: int, request: Callable[[Any], protocol.Request], patience: float) -> StoredPlace:
    directory = _options(pid).get("--directory", "")
    try:
        # Its package is an extra, which is installed where a saver runs.
        from dlrover.checkpoint.saver import protocol  # noqa: PLC0415

        reply = _ask(pid, request(protocol), patience)
    except (OSError, DLRoverError, ModuleNotFoundError) as error:
        return StoredPlace(directory, problem=f"The saver does not answer: {error}.")
    if not isinstance(reply, protocol.SavedNow):
        return StoredPlace(directory, problem=f"The saver refuses: {reply}.")
    return StoredPlace(directory, reply.step, reply.problem)


def _store_at_end(pid: int, stopping: float, partial: bool) -> None:
    try:
        from dlrover.checkpoint.saver import protocol  # noqa: PLC0415

        _ask(pid, protocol.StoreAtEnd(stopping, partial), WAIT)
    except (OSError, DLRoverError, ModuleNotFoundError) as error:
        logger.warning("What is in memory is not stored: saver %d does not answer: %s", pid, error)


def _ask(pid: int, request: protocol.Request, patience: float) -> protocol.Reply:
    """Return a saver's reply.

    Raises:
        OSError, DLRoverError: it does not answer.
    """
    from dlrover.checkpoint.saver import protocol  # noqa: PLC0415

    with contextlib.closing(_connected(pid, patience)) as sock:
        protocol.send(sock, request)
        reply, _ = protocol.receive_reply(sock)
    return reply


def _connected(pid: int, patience: float) -> socket.socket:
    from dlrover.checkpoint.saver import protocol  # noqa: PLC0415

    options = _options(pid)
    directory, identity, node = (
        options.get(name, "") for name in ("--directory", "--identity", "--node")
    )
    with contextlib.ExitStack() as opened:
        sock = opened.enter_context(protocol.new_socket())
        sock.settimeout(patience)
        sock.connect(protocol.address(directory, identity, node))
        protocol.check_peer(sock)
        opened.pop_all()
    return sock


def _options(pid: int) -> dict[str, str]:
    return dict(itertools.pairwise(procs.command(pid)))
