"""The checkpoint savers of this node, one for each directory that its workers save to, and requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable

from dlrover._util import procs
from dlrover.errors import DLRoverError
from dlrover.rpc.messages import StoredPlace

SAVER = "dlrover.checkpoint.saver.saver"
"""Module of the checkpoint saver: workers start it, it outlives them and holds their generations."""
AGENT = "dlrover.agent"
"""Module of an agent."""
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
    asked = (asyncio.to_thread(_ask, pid, request) for pid in sorted(pids))
    return tuple(await asyncio.gather(*asked))


def _ask(pid: int, request: str) -> StoredPlace:
    options = _options(pid)
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


def _options(pid: int) -> dict[str, str]:
    return dict(itertools.pairwise(procs.command(pid)))
