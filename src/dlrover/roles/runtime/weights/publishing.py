"""A state is copied, part by part, into memory that a process of the job keeps, and becomes a version."""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dlrover.checkpoint.machine.extent import entire
from dlrover.checkpoint.saver.memory import kernels
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError
from dlrover.roles.messages import (
    HOLDER,
    LIVE,
    WEIGHTS,
    CallAddress,
    JobView,
    MemberPlace,
    PublishedAs,
    PublishPart,
    Version,
)
from dlrover.roles.runtime import payload
from dlrover.roles.runtime.holding import CommitPart, DiscardPart, PartListed
from dlrover.roles.runtime.link import expected
from dlrover.roles.runtime.memory import HolderConnection
from dlrover.roles.runtime.payload import ALIGNMENT
from dlrover.roles.runtime.weights.holders import holders
from dlrover.roles.runtime.weights.parts import (
    THREADS,
    WeightEntry,
    checksum,
    encoded,
    flat,
    piece_of,
)
from dlrover.roles.runtime.worker import RoleWorker, current_worker, step_number

HOLDER_LIMIT = 60.0
"""Seconds to look for a process that keeps weights; the coordinator replaces one that has gone."""
AGAIN = 0.5
"""Seconds between two tries if the coordinator knows no other process."""
WAIT = 600.0
"""Seconds to wait for a version, or for the view that lists it."""


def publish(state: Mapping[str, Any], version: int, *, name: str = WEIGHTS) -> Version:
    """Publish a state as a version of weights; return it once it is safe. Readers see it when all ranks have.

    If any value is a ``DTensor`` or a `dlrover.checkpoint.Shard`, each rank publishes its part of those, and rank 0
    everything else. Otherwise rank 0 publishes the state, and the others nothing.

    Args:
        state: Tensors and arrays by name, as ``model.state_dict()``; plain values may be among them.
        version: Step of the state, above that of the last version.
        name: Name of the weights, if the job has several. A name belongs to one role.

    Raises:
        ConfigurationError: The version was published before, or a value cannot be published.
        InfrastructureError: Memory is short.
    """
    worker = current_worker()
    version = step_number("version", version)
    pieces = {key: piece_of(key, value) for key, value in state.items()}
    spread = {key for key, one in pieces.items() if one is not None and one[2]}
    parts = worker.instances if spread else 1
    if worker.index >= parts:
        return Version(_epoch(worker.link.view, name), version)
    mine = [(key, one) for key, one in pieces.items() if one is not None]
    if worker.index:
        mine = [(key, one) for key, one in mine if key in spread]
    values = (
        {key: state[key] for key, one in pieces.items() if one is None} if not worker.index else {}
    )
    for key, value in values.items():
        payload.encode_named(f"the value {key} of the weights", value)
    with holders.publishing:
        end = math.inf
        while True:
            seen = worker.link.view.number
            holder, address = _holder(worker)
            try:
                connection = holders.connection(worker, holder, address)
                return _published(worker, connection, holder, mine, values, (name, version, parts))
            except OSError as error:
                holders.drop(holder)
                end = min(end, time.monotonic() + HOLDER_LIMIT)  # the first may have died slowly
                if time.monotonic() > end:
                    raise InfrastructureError(
                        f"The process that keeps weights has gone: {error}."
                    ) from error
            with contextlib.suppress(InfrastructureError):  # the same one again, after a while
                worker.link.wait(functools.partial(_is_newer, seen), AGAIN, "another view")


def _is_newer(number: int, view: JobView) -> bool:
    return view.number > number


def _published(
    worker: RoleWorker,
    connection: HolderConnection,
    holder: MemberPlace,
    mine: Sequence[tuple[str, Any]],
    values: Mapping[str, Any],
    what: tuple[str, int, int],
) -> Version:
    entries, offset = [], 0
    for key, (array, dtype, extent) in mine:
        box = extent or entire(array.shape)
        nbytes = array.nbytes
        entries.append(WeightEntry(key, dtype, box.whole, box.at, box.shape, offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    key = f"{worker.place.role}-{worker.index}-{holders.id}-{next(holders.numbers)}"
    memory = connection.writable(key, offset + 2 * len(encoded(entries, values)) + mmap.PAGESIZE)
    try:
        index = encoded(_copied([array for _, (array, _, _) in mine], entries, memory), values)
        memory[offset : offset + len(index)] = index
        connection.ask(CommitPart(key, offset, len(index), checksum(index)))
        name, version, parts = what
        reply = worker.link.ask(
            PublishPart(worker.place, name, version, worker.index, parts, holder, key, offset)
        )
    except (ConfigurationError, ProtocolError):
        connection.ask(DiscardPart(key))
        raise
    except BaseException:  # it may be published or not: whoever keeps it learns that from the job
        connection.close()
        raise
    published = expected(reply, PublishedAs)
    with contextlib.suppress(
        OSError
    ):  # what was published is lost with who kept it, as at any later time
        connection.ask(PartListed(key, published.view))
    worker.link.wait(
        lambda view: view.number >= published.view, WAIT, "the view of what was published"
    )
    worker.progress()
    return published.version


def _copied(
    arrays: Sequence[Any], entries: Sequence[WeightEntry], memory: mmap.mmap
) -> list[WeightEntry]:
    """Copy arrays to their places; return their entries with checksums, from the same pass."""
    target = np.frombuffer(memory, np.uint8)
    sources = [flat(array) for array in arrays]
    sums = kernels().copy_hash(
        np.array([source.ctypes.data for source in sources], np.uint64),
        np.array([target.ctypes.data + entry.offset for entry in entries], np.uint64),
        np.array([entry.nbytes for entry in entries], np.uint64),
        THREADS,
    )
    return [
        msgspec.structs.replace(entry, sum=int(one))
        for entry, one in zip(entries, sums, strict=True)
    ]


def _holder(worker: RoleWorker) -> tuple[MemberPlace, CallAddress]:
    """Return the process that keeps weights on this machine: one for that, or else this process itself."""
    for one in worker.link.view.role(HOLDER).members:
        if one.state == LIVE and one.address.machine == worker.machine:
            return one.place, one.address
    return worker.place, worker.listener.address


def _epoch(view: JobView, name: str) -> int:
    known = view.weights.get(name)
    return len(known.rollbacks) if known is not None else 0
