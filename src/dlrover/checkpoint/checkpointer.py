"""What a training program uses: save, load, wait."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from dlrover import config
from dlrover.checkpoint import (
    defaults,
    direct,
    faults,
    hooks,
    joining,
    pace,
    restore,
    storage,
    tree,
)
from dlrover.checkpoint.client import SaverClient
from dlrover.checkpoint.commits import Commits
from dlrover.checkpoint.copying import Copier
from dlrover.checkpoint.joining import Wishes
from dlrover.checkpoint.layout import PackedLayout, Tensor
from dlrover.checkpoint.loader import Loader
from dlrover.checkpoint.overlap import Background, Guarded, Snapshot, torn
from dlrover.checkpoint.plan import Planner, RankState, Target, restoring, taking
from dlrover.checkpoint.policies import Policy, checked_metrics, policy_of
from dlrover.checkpoint.protocol import SaverGoneError
from dlrover.checkpoint.restore import Prepare, Reading
from dlrover.checkpoint.room import Room
from dlrover.checkpoint.stores import open_shared
from dlrover.checkpoint.tree import State
from dlrover.checkpoint.world import World
from dlrover.errors import ConfigurationError, InfrastructureError

logger = logging.getLogger(__name__)


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
    """Keeps a training's state in the memory of this node's saver, and in a directory or object store.

    Make one in every rank, after ``init_process_group``; that is collective, and so is `load`. Not for
    use by several threads.

    Args:
        path: the directory, or a URL that fsspec knows; all ranks must see the same one.
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
        pace.check(interval, hours_between_failures)
        if save_at_breakpoint is None:
            save_at_breakpoint = defaults.save_at_breakpoint
        wishes = Wishes(save_at_breakpoint, replicas, replica_bandwidth)
        self._world = World()
        self._leave_world = weakref.finalize(self, self._world.close)
        self._local = frozenset(local)
        self._store = open_shared(path)
        identity = storage.identity(self._store)
        self._client = SaverClient(
            self._store, identity, keep=policy, linger=linger, env=config.environ()
        )
        self._pace = pace.Pace(interval, hours_between_failures, self._world)
        self._copier = Copier()
        self._guarded = Guarded()
        self._background = Background() if overlap else None
        self._room = Room(self._client)
        self._problems: list[str] = []
        self._commits = Commits(self._store, self._client.stored)
        try:
            saver = self._client.attach(self._world.rank)
            self._joined = joining.join(self._world, self._client, saver, wishes, config.environ())
            self._session = self._joined.session
            self._direct = direct.Writer(
                self._store, identity, policy, self._world.rank, self._world.size, self._session
            )
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

        Where memory has no room for the state, a step for storage is written there before `save` returns,
        and any other one is not kept.

        Raises:
            ConfigurationError: the state holds something that cannot be kept, or an argument is wrong.
            InfrastructureError: a copy that overlapped with the training failed: the message says which.
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
            do = to or self._pace.due(step, self._client)
            if do != "nothing":
                self._copy(_Order(step, do == "storage", measured), state)
                self._pace.saved(began)
            if to is None:
                self._pace.settle()

    def _is_stored(self, step: int) -> bool:
        try:
            return storage.is_stored(self._store, step)
        except OSError:
            return False  # not as far as it is known

    def _copy(self, order: _Order, state: State) -> None:
        if self._background is not None:
            self._background.wait()
        with tree.no_collection():
            layout = self._copier.layout(tree.flatten(state))
        if order.to_storage and self._world.rank == 0:
            self._commits.expect(order.step, state)
        if not self._has_room(layout):
            self._save_without_memory(order, layout)
            return
        if self._background is None:
            self._copier.mark()
            self._save(order, layout, self._copy_all)
            return
        snapshot = Snapshot(self._copier, self._guarded.unguarded(state, self._copier))
        self._copier.mark()

        def copy(buffer: torch.Tensor) -> None:
            changed = snapshot.copy(buffer)
            if changed:
                self._guarded.distrust(changed)
                raise torn(order.step, self._copier, changed)

        self._background.start(lambda: self._save(order, layout, copy))

    def _has_room(self, layout: PackedLayout) -> bool:
        """Whether a state fits in memory."""
        try:
            return self._room.make(layout)
        except SaverGoneError as error:
            logger.warning("%s It is started again", error)
            self._reconnect()
            return self._room.make(layout)

    def _save_without_memory(self, order: _Order, layout: PackedLayout) -> None:
        """Write a step that is for storage straight there, and wait for it; any other one is not kept."""
        if not order.to_storage:
            return
        self._wait_for_saver()  # steps are stored one after the other
        began = time.monotonic()
        problem = self._direct.write(order.step, layout, self._copier.sources, order.metrics)
        if problem:
            logger.error("%s", problem)
            self._problems.append(problem)
            return
        self._pace.stored(began)
        self._commits.stored(order.step)
        with contextlib.suppress(SaverGoneError):
            self._client.keep(-1, 0)  # what is in memory is older

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
        if not self._room.make(layout):  # not since the saver was started again
            raise InfrastructureError(f"There is no memory for step {step} any more.")
        slot = self._client.begin(step)
        faults.point("save.begun")
        generation, buffer = self._room.buffer(slot, self._copier.device)
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
            self._pace.asked[step] = time.monotonic()

    def wait(self) -> None:
        """Wait until all that was asked for is copied, and durable if it was for storage.

        Raises:
            InfrastructureError: something was not, since the last call; the message says what.
        """
        with hooks.blocked():
            if self._background is not None:
                self._background.wait()
            self._wait_for_saver()
            self._commits.settle()
        problems, self._problems = self._problems, []
        self._pace.asked.clear()
        if problems:
            raise InfrastructureError(" ".join(problems))

    def _wait_for_saver(self) -> None:
        try:
            self._problems += self._client.wait()
        except SaverGoneError:
            self._reconnect()

    def close(self) -> None:
        """Disconnect from the saver, which goes on storing what it was asked for."""
        if self._background is not None:
            self._background.close()
        self._commits.close()
        self._copier.forget()
        self._room.forget()
        self._client.close()
        self._leave_world()

    def _reconnect(self) -> None:
        """Find a new saver; the memory of the old one is gone with it."""
        for step in sorted(self._pace.asked):
            if not self._is_stored(step):
                self._problems.append(f"Step {step} was not stored: the saver ended before.")
        self._pace.asked.clear()
        self._room.forget()
        self._client.attach(self._world.rank)
        self._client.join(self._joined)

    # ---- load

    def load(self, state: State, step: int | None = None) -> LoadRecord | None:
        """Restore the newest step that all ranks can, in place: from memory, else from storage.

        With ``step`` that one is restored, from storage; what is in memory is not used any more.

        Objects with ``load_state_dict`` get their state by it, tensors their content; plain values are
        set in the dicts. None if nothing was ever saved.

        Tensors that are spread over ranks (`DTensor`, `Shard`) may have been spread in another way, or
        over another number of ranks. What all ranks have equally may be loaded by any number of them.

        Raises:
            ConfigurationError: the saved state has other keys, types or shapes than ``state``; or there
                is no such step.
            InfrastructureError: there were checkpoints, and none can be loaded.
        """
        with hooks.blocked(), tree.no_collection():
            prepare = restore.in_place(state, self._local)
            record = self._load(prepare, step)
            if step is not None:
                self._client.keep(-1, 0)
            layout = self._copier.layout(tree.flatten(state))
            self._room.reserve_ahead(layout, tree.expected_bytes(state))
        hooks.loaded(0 if record is None else record.step)
        return record

    def read(
        self, keys: Collection[str] | None = None, step: int | None = None
    ) -> tuple[LoadRecord, State] | None:
        """The newest step that all ranks have, as new tensors; None if nothing was ever saved. Collective.

        Parts of tensors that are spread over ranks are `Shard`; then as many ranks must read as have
        saved.

        Args:
            keys: keys of the state whose tensors are read. Below other keys they are zeros of the same
                shape and type, which take no memory.
            step: a stored step to read instead.

        Raises:
            ConfigurationError: another number of ranks has saved parts, or other tensors each; or there
                is no such step.
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
            record = self._load(prepare, step)
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

    def _load(self, prepare: Prepare, step: int | None) -> LoadRecord | None:
        return self._carry_out(functools.partial(restoring, prepare), step)

    def _carry_out(self, planner: Planner, step: int | None = None) -> LoadRecord | None:
        self._world.check()
        if self._background is not None:
            self._background.wait()
        self._room.wait()
        began = time.monotonic()
        loader = Loader(self._world, self._client, self._store, planner)
        found = loader.load() if step is None else loader.load_stored(step)
        if found is None:
            self._refuse_fresh_start(loader.problems)
            return None
        record = LoadRecord(found.step, found.source, time.monotonic() - began)
        logger.info("Step %d was loaded from %s in %.2f s", *msgspec.structs.astuple(record))
        return record

    def _refuse_fresh_start(self, refused: list[str]) -> None:
        tracked = storage.tracked(self._store)
        if tracked is None and not refused:
            return
        was = "no step was stored"
        if tracked is not None:
            was = f"step {tracked} was stored" if tracked >= 0 else "the file latest is damaged"
        reasons = " ".join(refused) or f"There is no {self._store.where('step-*')}."
        raise InfrastructureError(
            f"No checkpoint in {self._store.location} can be loaded ({was}): {reasons} Remove the directory"
            " to start afresh."
        )
