"""What a training program uses: save, load, wait."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from dlrover import config
from dlrover.checkpoint import defaults, faults, hooks, joining, memory, restore, storage, tree
from dlrover.checkpoint.client import SaverClient
from dlrover.checkpoint.copying import Copier
from dlrover.checkpoint.interval import HOURS_BETWEEN_FAILURES, Auto, Costs, Do
from dlrover.checkpoint.joining import Wishes
from dlrover.checkpoint.layout import PackedLayout, Tensor
from dlrover.checkpoint.loader import Loader
from dlrover.checkpoint.memory import PAGE, Generation
from dlrover.checkpoint.overlap import Background, Guarded, Snapshot, torn
from dlrover.checkpoint.plan import Planner, RankState, Target, restoring, taking
from dlrover.checkpoint.policies import Policy, checked_metrics, policy_of
from dlrover.checkpoint.protocol import SaverGoneError
from dlrover.checkpoint.restore import Prepare, Reading
from dlrover.checkpoint.tree import State
from dlrover.checkpoint.world import World
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23
POPULATE_CHUNK = 1 << 26
"""Bytes for which page tables are made at a time."""
_libc = ctypes.CDLL(None, use_errno=True)


class LoadRecord(msgspec.Struct, frozen=True):
    """What a load took."""

    step: int
    source: Literal["memory", "peer", "storage"]
    """``"peer"``: from memory, some of it of other nodes."""
    seconds: float


class _Order(NamedTuple):
    """What one save is to do."""

    step: int
    to_storage: bool
    metrics: dict[str, float]


class Checkpointer:
    """Keeps a training's state in the memory of this node's saver, and in a directory.

    Make one in every rank, after ``init_process_group``; that is collective, and so is `load`. Not for
    use by several threads.

    Args:
        path: the directory; all ranks must see the same one.
        keep: how many stored steps to keep, the newest ones; or a policy: `KeepLast`, `KeepEvery`,
            `KeepBest`, or several of them joined by ``|``.
        linger: seconds that the saver, and with it the memory, outlives the last worker.
        local: keys of the state that belong to a rank, such as the state of its random numbers; `load`
            leaves them as they are when the number of ranks has changed.
        interval: steps from one save to storage to the next, for saves that do not say where to;
            ``"auto"`` picks how often to save to memory and to storage, and says what it picked.
        hours_between_failures: mean time between two failures of the job, for ``"auto"``; by default as
            many as one published large training had, by the number of ranks.
        overlap: let `save` return at once, and copy while the training goes on; optimizers wait for the
            copy before they step.
        save_at_breakpoint: store the newest step in memory when a worker ends without `close`; by default
            if the launcher was told so (``dlrover-run --save-at-breakpoint``).
        replicas: other nodes whose memory each step is copied to, in the background.
        replica_bandwidth: bytes per second that a node sends for that; by default as many as it can.

    Raises:
        ConfigurationError: an argument is wrong.
        InfrastructureError: the saver cannot be started, or another job uses the directory.
    """

    def __init__(  # noqa: PLR0913  # options, by name
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | Policy = 3,
        linger: float = 60.0,
        local: Collection[str] = (),
        interval: int | Literal["auto"] | None = None,
        hours_between_failures: float | None = None,
        overlap: bool = False,
        save_at_breakpoint: bool | None = None,
        replicas: int = 0,
        replica_bandwidth: float | None = None,
    ) -> None:
        policy = policy_of(keep)
        if not linger >= 0:
            raise ConfigurationError(f"linger is {linger}; it must be 0 seconds or more.")
        _check_interval(interval, hours_between_failures)
        if save_at_breakpoint is None:
            save_at_breakpoint = defaults.save_at_breakpoint
        wishes = Wishes(save_at_breakpoint, replicas, replica_bandwidth)
        self._world = World()
        self._local = frozenset(local)
        self._directory = Path(path).absolute()
        identity = storage.identity(self._directory)
        self._client = SaverClient(
            self._directory, identity, keep=policy, linger=linger, env=config.environ()
        )
        self._interval = interval
        self._auto = _auto(self._world.size, hours_between_failures)
        self._copier = Copier()
        self._guarded = Guarded()
        self._background = Background() if overlap else None
        self._buffers: dict[int, tuple[Generation, torch.Tensor]] = {}
        self._told_of_one = False
        self._reserved = threading.Event()
        """Cleared while memory is reserved in the background."""
        self._reserved.set()
        self._asked: dict[int, float] = {}
        """When steps that are not durable yet were sent to storage, by this process's clock."""
        self._problems: list[str] = []
        try:
            saver = self._client.attach(self._world.rank)
            self._joined = joining.join(self._world, self._client, saver, wishes, config.environ())
            self._session = self._joined.session
        except BaseException:
            self._client.close()
            raise

    # ---- save

    def save(
        self,
        step: int,
        state: State,
        to: Literal["memory", "storage"] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Copy ``state`` to memory; with ``to="storage"`` it is also stored, in the background.

        Without ``to`` the interval decides about storage. Returns when the copy is done; with ``overlap``
        at once. All ranks save the same steps, but do not wait for each other. Rank 0's ``metrics`` are
        stored with the step, for `KeepBest`; one that is not finite is left out.

        Raises:
            ConfigurationError: the state holds something that cannot be kept, or an argument is wrong.
            InfrastructureError: there is not enough memory; or a copy that overlapped with the training
                failed: the message says which.
        """
        if to not in ("memory", "storage", None):
            raise ConfigurationError(f"to is {to!r}; it must be 'memory' or 'storage'.")
        if step < 0:
            raise ConfigurationError(f"step is {step}; it must be 0 or more.")
        measured = checked_metrics(metrics or {})
        self._world.check()
        began = time.monotonic()
        hooks.saving(step)
        with hooks.blocked():
            do = to or self._due(step, began)
            if do != "nothing":
                self._copy(_Order(step, do == "storage", measured), state)
                self._auto.saved(time.monotonic() - began, time.monotonic())
            if to is None and self._interval == "auto" and self._auto.due:
                self._pick_interval()

    def _due(self, step: int, now: float) -> Do:
        if self._interval == "auto":
            self._note_durable(now)
            return self._auto.ask(now)
        return "storage" if self._interval and step % self._interval == 0 else "memory"

    def _note_durable(self, now: float) -> None:
        for step, began in list(self._asked.items()):
            if self._is_stored(step):
                self._auto.stored(now - began)
                del self._asked[step]

    def _is_stored(self, step: int) -> bool:
        return (storage.step_directory(self._directory, step) / storage.MANIFEST).exists()

    def _pick_interval(self) -> None:
        mine = [round(seconds * 1e6) for seconds in self._auto.costs]
        worst = [max(values) / 1e6 for values in zip(*self._world.exchange(mine), strict=True)]
        picked = self._auto.settle(Costs(*worst))
        if picked is not None and self._world.rank == 0:
            logger.info("%s", picked.sentence(Costs(*worst)))

    def _copy(self, order: _Order, state: State) -> None:
        if self._background is not None:
            self._background.wait()
        with _no_collection():
            layout = self._copier.layout(tree.flatten(state))
        if self._background is None:
            self._save(order, layout, self._copy_all)
            return
        snapshot = Snapshot(self._copier, self._guarded.unguarded(state, self._copier))

        def copy(buffer: torch.Tensor) -> None:
            changed = snapshot.copy(buffer)
            if changed:
                self._guarded.distrust(changed)
                raise torn(order.step, self._copier, changed)

        self._background.start(lambda: self._save(order, layout, copy))

    def _copy_all(self, buffer: torch.Tensor) -> None:
        self._copier.copy(buffer)

    def _save(
        self, order: _Order, layout: PackedLayout, copy: Callable[[torch.Tensor], None]
    ) -> None:
        try:
            self._save_once(order, layout, copy)
        except SaverGoneError as error:
            logger.warning("%s It is started again", error)
            self._reconnect()
            self._save_once(order, layout, copy)

    def _save_once(
        self, order: _Order, layout: PackedLayout, copy: Callable[[torch.Tensor], None]
    ) -> None:
        step = order.step
        self._make_room(layout)
        slot = self._client.begin(step)
        faults.point("save.begun")
        generation, buffer = self._buffer(slot)
        copy(buffer)
        faults.point("save.copied")
        generation.publish(
            layout,
            rank=self._world.rank,
            world_size=self._world.size,
            step=step,
            session=self._session,
        )
        self._client.publish(slot, step, to_storage=order.to_storage, metrics=order.metrics)
        faults.point("save.published")
        if order.to_storage:
            self._asked[step] = time.monotonic()

    def wait(self) -> None:
        """Wait until all that was asked for is copied, and durable if it was for storage.

        Raises:
            InfrastructureError: something was not, since the last call; the message says what.
        """
        with hooks.blocked():
            if self._background is not None:
                self._background.wait()
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
        if self._background is not None:
            self._background.close()
        self._reserved.wait()
        self._copier.forget()
        self._buffers.clear()
        self._client.close()

    def _reconnect(self) -> None:
        """Find a new saver; the memory of the old one is gone with it."""
        for step in sorted(self._asked):
            if not self._is_stored(step):
                self._problems.append(f"Step {step} was not stored: the saver ended before.")
        self._asked.clear()
        self._reserved.wait()
        self._buffers.clear()
        self._client.attach(self._world.rank)
        self._client.join(self._joined)

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
        if min(generation.size for generation in self._client.generations) < needed:
            self._client.reserve(memory.room_for(layout))
            self._note_generations()

    def _note_generations(self) -> None:
        count = len(self._client.generations)
        for slot in [slot for slot in self._buffers if slot >= count]:
            del self._buffers[slot]
        if count == 1 and not self._told_of_one:
            self._told_of_one = True
            logger.warning(
                "There is memory for one generation only: a process that dies during a save costs the"
                " memory checkpoint"
            )

    def _reserve_ahead(self, state: State) -> None:
        """Have memory for ``state`` provided in the background, and entered in this process's tables."""
        layout = self._copier.layout(tree.flatten(state))
        nbytes = memory.room_for(layout, tree.expected_bytes(state))

        def reserve() -> None:
            try:
                self._client.reserve(nbytes)
                generations = self._client.generations
            except DLRoverError as error:
                logger.warning("No memory is reserved ahead: %s", error)
                generations = []
            finally:
                self._reserved.set()
            for generation in generations:
                _populate(generation)

        self._reserved.clear()
        threading.Thread(target=reserve, name="reserve").start()

    # ---- load

    def load(self, state: State) -> LoadRecord | None:
        """Restore the newest step that all ranks can, in place: from memory, else from storage.

        Objects with ``load_state_dict`` get their state by it, tensors their content; plain values are
        set in the dicts. None if nothing was ever saved.

        Tensors that are spread over ranks (`DTensor`, `Shard`) may have been spread in another way, or
        over another number of ranks. What all ranks have equally may be loaded by any number of them.

        Raises:
            ConfigurationError: the saved state has other keys, types or shapes than ``state``.
            InfrastructureError: there were checkpoints, and none can be loaded.
        """
        with hooks.blocked(), _no_collection():
            prepare = restore.in_place(state, self._local)
            record = self._load(prepare)
            self._reserve_ahead(state)
        hooks.loaded(0 if record is None else record.step)
        return record

    def read(self, keys: Collection[str] | None = None) -> tuple[LoadRecord, State] | None:
        """The newest step that all ranks have, as new tensors; None if nothing was ever saved. Collective.

        Parts of tensors that are spread over ranks are `Shard`; then as many ranks must read as have
        saved.

        Args:
            keys: keys of the state whose tensors are read. Below other keys they are zeros of the same
                shape and type, which take no memory.

        Raises:
            ConfigurationError: another number of ranks has saved parts, or other tensors each.
            InfrastructureError: there were checkpoints, and none can be loaded.
        """
        readings: list[Reading] = []

        def prepare(tree: Any, specs: Sequence[Tensor], moved: bool) -> Reading:
            reading = Reading(tree, specs, keys)
            if moved and any(
                spec.part is not None and need is not None
                for spec, need in zip(specs, reading.wanted, strict=True)
            ):
                raise ConfigurationError(
                    f"The checkpoint was not saved by {self._world.size} ranks; `load` can restore it."
                )
            readings.append(reading)
            return reading

        with hooks.blocked():
            record = self._load(prepare)
        return None if record is None else (record, readings[-1].state)

    def load_parts(
        self, choose: Callable[[Mapping[int, RankState]], Sequence[Target]]
    ) -> LoadRecord | None:
        """Load parts of saved tensors, whichever ranks saved them. For adapters; collective.

        Args:
            choose: is called with what all ranks saved of a step, and says which parts of it this rank
                needs. It is called again if another step has to be taken.

        Raises:
            InfrastructureError: there were checkpoints, and none can be loaded.
        """
        with hooks.blocked():
            record = self._carry_out(functools.partial(taking, choose))
        hooks.loaded(0 if record is None else record.step)
        return record

    def _load(self, prepare: Prepare) -> LoadRecord | None:
        return self._carry_out(functools.partial(restoring, prepare))

    def _carry_out(self, planner: Planner) -> LoadRecord | None:
        self._world.check()
        if self._background is not None:
            self._background.wait()
        self._reserved.wait()
        began = time.monotonic()
        loader = Loader(self._world, self._client, self._directory, planner)
        found = loader.load()
        if found is None:
            self._refuse_fresh_start(loader.problems)
            return None
        record = LoadRecord(found.step, found.source, time.monotonic() - began)
        logger.info("Step %d was loaded from %s in %.2f s", *msgspec.structs.astuple(record))
        return record

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


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Leave garbage alone: looking for it costs more than a walk over many thousand tensors."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _check_interval(interval: int | str | None, hours_between_failures: float | None) -> None:
    if not (interval in (None, "auto") or (isinstance(interval, int) and interval >= 1)):
        raise ConfigurationError(f"interval is {interval!r}; it must be 1 or more, or 'auto'.")
    if hours_between_failures is not None and not hours_between_failures > 0:
        raise ConfigurationError(
            f"hours_between_failures is {hours_between_failures}; it must be more than 0."
        )


def _auto(ranks: int, hours_between_failures: float | None) -> Auto:
    hours = hours_between_failures or HOURS_BETWEEN_FAILURES / ranks
    return Auto(hours * 3600)


def _populate(generation: Generation) -> None:
    """Enter the memory in this process's page tables, so that the first copy does not have to.

    A kernel before 5.14 does not know how; then the first copy is slower. Ends early with the program.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(generation.buffer))
    for start in range(0, generation.size, POPULATE_CHUNK):
        if not threading.main_thread().is_alive():
            return
        size = min(POPULATE_CHUNK, generation.size - start) // PAGE * PAGE
        _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), MADV_POPULATE_WRITE)
