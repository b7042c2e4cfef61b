"""Requests to the checkpoint savers of this node: one for each directory that its workers save to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable

from dlrover._util import procs
from dlrover.errors import DLRoverError
from dlrover.rpc.messages import StoredPlace

PATIENCE = 600.0
"""Seconds that a saver gets to store a step."""


async def save_now(pids: Iterable[int], request: str) -> tuple[StoredPlace, ...]:
    """Have each saver store the newest save in memory; return what became of it."""
    asked = (asyncio.to_thread(_ask, pid, request) for pid in sorted(pids))
    return tuple(await asyncio.gather(*asked))


def _ask(pid: int, request: str) -> StoredPlace:
    words = procs.command(pid)
    options = dict(itertools.pairwise(words))
    directory, identity, node = (
        options.get(name, "") for name in ("--directory", "--identity", "--node")
    )
    try:
        # Its package is an extra, which is installed where a saver runs.
        from dlrover.checkpoint.saver import protocol  # noqa: PLC0415

        with contextlib.closing(protocol.new_socket()) as sock:
            sock.settimeout(PATIENCE)
            sock.connect(protocol.address(directory, identity, node))
            protocol.check_peer(sock)
            protocol.send(sock, protocol.SaveNow(request))
            reply, _ = protocol.receive_reply(sock)
    except (OSError, DLRoverError, ModuleNotFoundError) as error:
        return StoredPlace(directory, problem=f"The saver does not answer: {error}.")
    if not isinstance(reply, protocol.SavedNow):
        return StoredPlace(directory, problem=f"The saver refuses: {reply}.")
    return StoredPlace(directory, reply.step, reply.problem)
