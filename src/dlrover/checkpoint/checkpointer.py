"""What a training program uses: save, load, wait."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import torch

from dlrover import config
from dlrover.checkpoint import copying, faults, layout as layouts, memory, storage, tree
from dlrover.checkpoint.client import SaverClient
from dlrover.checkpoint.copying import Copier
from dlrover.checkpoint.layout import Layout, PackedLayout
from dlrover.checkpoint.memory import PAGE, Generation
from dlrover.checkpoint.protocol import Held, SaverGoneError
from dlrover.checkpoint.tree import State
from dlrover.checkpoint.world import World
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError

logger = logging.getLogger(__name__)

MAX_STORED = 64
"""Stored steps that a load considers, newest first."""
MADV_POPULATE_WRITE = 23
POPULATE_CHUNK = 1 << 26
"""Bytes for which page tables are made at a time."""
_libc = ctypes.CDLL(None, use_errno=True)


_Found = tuple[int, Literal["memory", "storage"]]


class LoadRecord(msgspec.Struct, frozen=True):
    """What a load took."""

    step: int
    source: Literal["memory", "storage"]
    seconds: float


class Checkpointer:
    """Keeps a training's state in the memory of this node's saver, and in a directory.

    Make one in every rank, after ``init_process_group``; that is collective, and so is `load`. Not for
    use by several threads.

    Args:
        path: the directory; all ranks must see the same one.
        keep: how many stored steps to keep, the newest ones.
        linger: seconds that the saver, and with it the memory, outlives the last worker.

    Raises:
        ConfigurationError: an argument is wrong.
        InfrastructureError: the saver cannot be started, or another job uses the directory.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep: int = 3, linger: float = 60.0
    ) -> None:
        if keep < 1:
            raise ConfigurationError(f"keep is {keep}; at least 1 step must be kept.")
        if not linger >= 0:
            raise ConfigurationError(f"linger is {linger}; it must be 0 seconds or more.")
        self._world = World()
        self._directory = Path(path).absolute()
        identity = storage.identity(self._directory)
        self._client = SaverClient(
            self._directory, identity, keep=keep, linger=linger, env=config.environ()
        )
        self._copier = Copier()
        self._buffers: dict[int, tuple[Generation, torch.Tensor]] = {}
        self._reserved = threading.Event()
        """Cleared while memory is reserved in the background."""
        self._reserved.set()
        self._asked: set[int] = set()
        self._problems: list[str] = []
        try:
            saver = self._client.attach(self._world.rank)
            facts = self._world.exchange([saver, secrets.randbits(63)])
            self._session = facts[0][1]
            self._ranks = tuple(rank for rank, (other, _) in enumerate(facts) if other == saver)
            self._client.join(self._session, self._world.size, self._ranks)
        except BaseException:
            self._client.close()
            raise

    # ---- save

    def save(self, step: int, state: State, to: Literal["memory", "storage"] = "memory") -> None:
        """Copy ``state`` to memory; with ``to="storage"`` it is also stored, in the background.

        Returns when the copy is done. All ranks save the same steps, but do not wait for each other.

        Raises:
            ConfigurationError: the state holds something that cannot be kept, or an argument is wrong.
            InfrastructureError: there is not enough memory.
        """
        if to not in ("memory", "storage"):
            raise ConfigurationError(f"to is {to!r}; it must be 'memory' or 'storage'.")
        if step < 0:
            raise ConfigurationError(f"step is {step}; it must be 0 or more.")
        self._world.check()
        flat = tree.flatten(state)
        layout = self._copier.layout(flat)
        try:
            self._save(step, layout, to_storage=to == "storage")
        except SaverGoneError as error:
            logger.warning("%s It is started again", error)
            self._reconnect()
            self._save(step, layout, to_storage=to == "storage")

    def _save(self, step: int, layout: PackedLayout, *, to_storage: bool) -> None:
        self._make_room(layout)
        slot = self._client.begin(step)
        faults.point("save.begun")
        generation, buffer = self._buffer(slot)
        self._copier.copy(buffer)
        faults.point("save.copied")
        generation.publish(
            layout,
            rank=self._world.rank,
            world_size=self._world.size,
            step=step,
            session=self._session,
        )
        self._client.publish(slot, step, to_storage=to_storage)
        faults.point("save.published")
        if to_storage:
            self._asked.add(step)

    def wait(self) -> None:
        """Wait until all that was asked for storage is durable.

        Raises:
            InfrastructureError: something was not stored since the last call; the message says what.
        """
        try:
            self._problems += self._client.wait()
        except SaverGoneError:
            self._reconnect()
        problems, self._problems = self._problems, []
        self._asked.clear()
        if problems:
            raise InfrastructureError(" ".join(problems))

    def close(self) -> None:
        """Disconnect from the saver, which goes on storing what it was asked for."""
        self._reserved.wait()
        self._copier.forget()
        self._buffers.clear()
        self._client.close()

    def _reconnect(self) -> None:
        """Find a new saver; the memory of the old one is gone with it."""
        for step in sorted(self._asked):
            if not (storage.step_directory(self._directory, step) / storage.MANIFEST).exists():
                self._problems.append(f"Step {step} was not stored: the saver ended before.")
        self._asked.clear()
        self._reserved.wait()
        self._buffers.clear()
        self._client.attach(self._world.rank)
        self._client.join(self._session, self._world.size, self._ranks)

    # ---- memory

    def _buffer(self, slot: int) -> tuple[Generation, torch.Tensor]:
        """A generation and its data as a tensor; the same one as long as it is as large."""
        generation = self._client.generation(slot)
        known = self._buffers.get(slot)
        if known is None or known[0] is not generation:
            data = torch.frombuffer(generation.data, dtype=torch.uint8)
            known = self._buffers[slot] = generation, data
        return known

    def _make_room(self, layout: PackedLayout) -> None:
        self._reserved.wait()
        needed = memory.needed_for(layout)
        if min(self._client.generation(slot).size for slot in range(2)) < needed:
            self._client.reserve(memory.room_for(layout))

    def _reserve_ahead(self, state: State) -> None:
        """Have memory for ``state`` provided in the background, and entered in this process's tables."""
        layout = self._copier.layout(tree.flatten(state))
        nbytes = memory.room_for(layout, tree.expected_bytes(state))
        self._copier.forget()

        def reserve() -> None:
            try:
                self._client.reserve(nbytes)
                generations = [self._client.generation(slot) for slot in range(2)]
            except DLRoverError as error:
                logger.warning("No memory is reserved ahead: %s", error)
                generations = []
            finally:
                self._reserved.set()
            for generation in generations:
                _populate(generation)

        self._reserved.clear()
        threading.Thread(target=reserve, daemon=True, name="reserve").start()

    # ---- load

    def load(self, state: State) -> LoadRecord | None:
        """Restore the newest step that all ranks can, in place: from memory, else from storage.

        Objects with ``load_state_dict`` get their state by it, tensors their content; plain values are
        set in the dicts. None if nothing was ever saved.

        Raises:
            ConfigurationError: the saved state has other keys, types or shapes than ``state``.
            InfrastructureError: there were checkpoints, and none can be loaded.
        """
        self._world.check()
        self._reserved.wait()
        began = time.monotonic()
        refused: list[str] = []
        found = self._load_from_memory(state, refused) or self._load_from_storage(state, refused)
        if found is None:
            self._refuse_fresh_start(refused)
        record = None
        if found is not None:
            step, source = found
            record = LoadRecord(step, source, time.monotonic() - began)
            logger.info("Step %d was loaded from %s in %.2f s", step, source, record.seconds)
        self._reserve_ahead(state)
        return record

    def _load_from_memory(self, state: State, refused: list[str]) -> _Found | None:
        held = {
            (item.step, item.session): item
            for item in self._client.look()
            if item.world_size == self._world.size
        }
        for key in self._common(list(held)):
            item = held[key]
            problem = self._attempt(functools.partial(self._restore, state, item))
            if not problem:
                self._client.keep(item.slot)
                return item.step, "memory"
            logger.warning("Step %d is not loaded from memory: %s", item.step, problem)
            refused.append(problem)
        self._client.keep(-1)
        return None

    def _common(self, mine: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The steps, with their sessions, that every rank holds; newest first."""
        padded = [*mine, (-1, -1), (-1, -1)][:2]
        everyone = [
            set(zip(values[::2], values[1::2], strict=True))
            for values in self._world.exchange([part for key in padded for part in key])
        ]
        yield from sorted(set.intersection(*everyone) - {(-1, -1)}, reverse=True)

    def _restore(self, state: State, item: Held) -> None:
        generation, buffer = self._buffer(item.slot)
        header = generation.header()
        if header is None or header.step != item.step:
            raise InfrastructureError(f"Step {item.step} is not in memory any more.")
        layout = generation.layout(header)
        with _meanwhile(lambda: self._client.verify(item.slot)):
            _put(state, layout, buffer)

    def _load_from_storage(self, state: State, refused: list[str]) -> _Found | None:
        listed = [*storage.steps(self._directory), *[-1] * MAX_STORED][:MAX_STORED]
        for step in self._world.exchange(listed)[0]:
            if step < 0:
                break
            problem = self._attempt(functools.partial(self._restore_stored, state, step))
            if not problem:
                return step, "storage"
            refused.append(problem)
            if self._world.rank == 0:
                bad = storage.quarantine(self._directory, step)
                logger.error("Step %d cannot be loaded and is now %s: %s", step, bad, problem)
            self._world.exchange([])
        return None

    def _restore_stored(self, state: State, step: int) -> None:
        directory = storage.step_directory(self._directory, step)
        stored = storage.StoredState(directory, self._world.rank, self._world.size)
        with stored:
            stored.verify()
            tensors = [
                torch.frombuffer(data, dtype=torch.uint8)
                .view(tree.DTYPES[found.dtype])
                .view(found.shape)
                if data
                else torch.empty(found.shape, dtype=tree.DTYPES[found.dtype])
                for found, data in stored.tensor_bytes()
            ]
            tree.restore(state, layouts.decode(stored.index.skeleton), tensors)

    def _refuse_fresh_start(self, refused: list[str]) -> None:
        tracked = storage.tracked(self._directory)
        if tracked is None and not refused:
            return
        was = "no step was stored"
        if tracked is not None:
            was = f"step {tracked} was stored" if tracked >= 0 else "the file latest is damaged"
        reasons = " ".join(refused) or f"There is no directory {self._directory}/step-*."
        raise InfrastructureError(
            f"No checkpoint in {self._directory} can be loaded ({was}): {reasons} Remove the directory to"
            " start afresh."
        )

    def _attempt(self, load: Callable[[], None]) -> str:
        """Let all ranks try; what went wrong on any of them, or an empty text.

        Raises:
            ConfigurationError: the checkpoint is whole, but does not fit.
        """
        problem, wrong = "", None
        try:
            load()
        except InfrastructureError as error:
            problem = str(error)
        except ConfigurationError as error:
            wrong = error
        outcomes = [
            value for (value,) in self._world.exchange([2 if wrong else 1 if problem else 0])
        ]
        if wrong is not None:
            raise wrong
        if 2 in outcomes:
            raise ConfigurationError(
                f"The checkpoint does not fit the state of rank {outcomes.index(2)}; see its error."
            )
        if not problem and 1 in outcomes:
            return f"Rank {outcomes.index(1)} cannot load it."
        return problem


def _put(state: State, layout: Layout, buffer: torch.Tensor) -> None:
    tree.restore(state, layouts.decode(layout.skeleton), copying.views(buffer, layout.entries))


@contextlib.contextmanager
def _meanwhile(check: Callable[[], str]) -> Iterator[None]:
    """Run ``check`` beside the block; afterwards raise what it found.

    Raises:
        InfrastructureError: it found something, or could not look.
    """
    found: list[str] = []

    def run() -> None:
        try:
            found.append(check())
        except InfrastructureError as error:
            found.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        if not found or found[0]:
            raise InfrastructureError(found[0] if found else "The check ended with an error.")


def _populate(generation: Generation) -> None:
    """Enter the memory in this process's page tables, so that the first copy does not have to.

    A kernel before 5.14 does not know how; then the first copy is slower.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(generation.buffer))
    for start in range(0, generation.size, POPULATE_CHUNK):
        size = min(POPULATE_CHUNK, generation.size - start) // PAGE * PAGE
        _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), MADV_POPULATE_WRITE)
