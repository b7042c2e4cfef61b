"""The API for training programs: save, load, wait."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from dlrover import config, launched
from dlrover.checkpoint.collection import no_collection
from dlrover.checkpoint.engine import buffers, direct, joining, losses, pace, shared, tree
from dlrover.checkpoint.engine.client import SaverClient
from dlrover.checkpoint.engine.joining import Wishes
from dlrover.checkpoint.engine.saving import Order, Saving
from dlrover.checkpoint.engine.tree import State
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.loading import fresh, restore
from dlrover.checkpoint.loading.loader import Loader
from dlrover.checkpoint.loading.plan import Planner, RankState, Target, restoring, taking
from dlrover.checkpoint.loading.replay import Replayer
from dlrover.checkpoint.loading.restore import Prepare, StateReading
from dlrover.checkpoint.machine.layout import PackedLayout, TensorSpec
from dlrover.checkpoint.machine.policies import Policy, checked_metrics, policy_of
from dlrover.checkpoint.machine.saves import Newest, SaveId
from dlrover.checkpoint.saver.memory import kernels
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.lease import Lease, job_of
from dlrover.checkpoint.storage.stores import Store, open_shared
from dlrover.errors import (
    ConfigurationError,
    InfrastructureError,
)

logger = logging.getLogger(__name__)


class LoadRecord(msgspec.Struct, frozen=True):
    """The result of a load."""

    step: int
    source: Literal["memory", "peer", "storage"]
    """``"peer"``: from memory, partly from that of other nodes."""
    seconds: float


class Checkpointer:
    """The checkpoints of a training, in the memory of this node's saver and in a directory or object store.

    Create one in every rank, after ``init_process_group``; that is collective, and so is `load`. It is not
    thread-safe.

    Args:
        path: the checkpoint directory, or a URL that fsspec knows; all ranks must see the same one.
        keep: the number of newest stored steps to keep; or a policy: `KeepLast`, `KeepEvery`, `KeepBest`,
            or several of them joined by ``|``.
        linger: seconds that the saver, and with it the memory, outlives the last worker; under ``dlrover-run``, it
            also stays while its node waits for new workers.
        local: keys of the state that belong to one rank, such as its random number state; `load` leaves
            them unchanged when the number of ranks has changed.
        interval: steps between two saves to storage, for saves without ``to``; ``"auto"`` picks how often to
            save to memory and to storage, and logs its choice.
        hours_between_failures: mean time between two failures of the job, for ``"auto"``; by default the
            failure rate of a published large training, scaled to the number of ranks.
        overlap: let `save` return at once and copy while the training goes on; optimizers wait for the
            copy before they step.
        save_at_breakpoint: store the newest step in memory when a worker ends without `close`; by default
            the launcher decides (``dlrover-run --save-at-breakpoint``).
        replicas: the number of other nodes whose memory receives a copy of each step, in the background.
        replica_bandwidth: bytes per second that a node sends for replicas; unlimited by default.
        start_afresh: let `load` return None, instead of raising an error, if all saved steps are lost.
        read_only: only load stored steps, for example to evaluate beside a training that saves here. This
            uses no memory and changes nothing in the directory; `save` raises an error.

    Raises:
        ConfigurationError: an argument or ``DLROVER_NATIVE`` is wrong.
        ImportError: ``DLROVER_NATIVE`` requires the compiled library, and it cannot be used.
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
        start_afresh: bool = False,
        read_only: bool = False,
    ) -> None:
        policy = policy_of(keep)
        if not linger >= 0:
            raise ConfigurationError(f"linger is {linger}; it must be 0 seconds or more.")
        pace.check(interval, hours_between_failures)
        kernels()  # raises here, not in the first save
        if save_at_breakpoint is None:
            save_at_breakpoint = launched.given.save_at_breakpoint
        wishes = Wishes(save_at_breakpoint, replicas, replica_bandwidth)
        self._wishes, self._policy = wishes, policy
        self._world = TorchWorld()
        self._leave_world = weakref.finalize(self, self._world.close)
        self._local = frozenset(local)
        self._start_afresh = start_afresh
        self._read_only = read_only
        self._path = path
        self._store, self._identity = self._open()
        shared.note(self._world, self._store, launched.given.checkpoints)
        self._client = SaverClient(
            self._store, self._identity, node=launched.given.node, keep=policy, linger=linger,
            env=config.environ(),
        )  # fmt: skip
        self._pace = pace.Pace(interval, hours_between_failures, self._world)
        self._saving = Saving(self._world, self._store, self._client, self._pace, overlap=overlap)
        self._pid = os.getpid()
        self._in_memory, self._only_memory = -1, True
        """The newest step, and True if none was sent to storage, and no warning was given."""
        self._findings = direct.LoadFindings()
        self._membership = -1
        """Number of the membership, in a program that survives losses, in which the session has begun."""
        if not read_only:
            try:
                self._world.agree(self._saving.attach)
                if not self._world.alone:
                    self._join(self._newest_stored())
            except BaseException:
                self._client.close()
                raise

    def _open(self) -> tuple[Store, str]:
        """Return the directory and its identity, which are the same on all ranks. Collective."""
        store = self._world.agree(lambda: open_shared(self._path))
        identity = shared.identity(self._world, store, create=not self._read_only)
        shared.check(self._world, store, identity, read_only=self._read_only)
        return store, identity

    def _join(self, newest: Newest) -> None:
        """Begin a session with the other ranks; ``newest`` is the newest save that this rank knows. Collective."""
        self._joined, self._numbering = joining.join(
            self._world, self._client, self._saving.attached, newest, self._wishes, config.environ()
        )
        if not self._saving.overlaps:  # else the training needs the cores
            self._saving.copier.threads = buffers.threads(len(self._joined.ranks))
        writer = direct.DirectWriter(
            self._store, self._identity, self._policy, self._world.rank, self._world.size,
            self._world.agree(self._lease),
        )  # fmt: skip
        self._saving.begin(self._joined, writer)
        if launched.survival is not None:
            self._membership = launched.survival.number

    def _takes_part(self) -> bool:
        """Return whether a save is made: not while a rank of a program that survives losses is away.

        The first save after its return begins a session with it. Then collective.
        """
        survival = launched.survival
        if survival is None:
            return True
        if not survival.whole:
            return False
        if survival.number != self._membership:
            self._saving.wait_for_copy()
            known = self._numbering.newest if self._membership >= 0 else Newest()
            self._open()  # as a rank that has returned and makes its Checkpointer only now
            self._world.agree(self._saving.attach_again)
            self._pace.begin()
            self._join(self._newest_stored().including(known))
        return True

    @property
    def _apart(self) -> bool:
        """True if this rank saves nothing, or nothing yet since it has returned to the others."""
        return self._read_only or (launched.survival is not None and self._membership < 0)

    def _lease(self) -> Lease | None:
        if self._world.rank:
            return None
        lease = Lease(self._store, job_of(config.environ()))
        lease.refuse_other(threading.Event().wait)
        lease.join(self._joined.session)
        return lease

    def _newest_stored(self) -> Newest:
        """Return the newest stored save that rank 0 sees. Collective."""

        def look() -> Newest:
            return storage.newest(self._store) if self._world.rank == 0 else Newest()

        return self._world.agree(look)

    # ---- save

    def save(
        self,
        step: int,
        state: State,
        to: Literal["memory", "storage"] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Copy ``state`` to memory; with ``to="storage"`` also store it, in the background.

        Without ``to``, the interval decides about storage. The call returns when the copy is done; with
        ``overlap`` it returns at once. All ranks must make the same saves in the same order, but do not wait
        for each other. A step may be saved again; its last save counts, for all ranks. Rank 0's ``metrics``
        are stored with the step, for `KeepBest`, without values that are not finite. In a program that survives
        losses, nothing is saved while a rank is away.

        If the state does not fit in memory, a step for storage is written there before `save` returns; any
        other step is dropped.

        Raises:
            ConfigurationError: the state holds something that cannot be kept, or an argument is wrong.
            InfrastructureError: a copy that overlapped with the training failed; the message says which.
        """
        if self._read_only:
            raise ConfigurationError(
                "This Checkpointer only reads, as read_only=True says; make one without it to save."
            )
        self._check_process()
        if not self._takes_part():
            return
        # First: a save that fails on one rank must count there, too.
        save = self._numbering.next(pace.number_of(step), losses.place())
        try:
            self._do_save(save, step, state, to, metrics or {})
        except BaseException:
            self._saving.leave_out(save)
            raise

    def _do_save(
        self,
        save: SaveId,
        given: object,
        state: State,
        to: Literal["memory", "storage"] | None,
        metrics: Mapping[str, float],
    ) -> None:
        step = save.step
        began = time.monotonic()
        launched.saving(step)
        with launched.blocked():
            do = to or self._pace.due(step, self._client)
            try:
                pace.check_arguments(given, to)
                measured = checked_metrics(metrics)
                self._world.check()
                if do != "nothing":
                    self._findings.apply(self._saving.direct, save.session)
                    self._in_memory = step
                    self._only_memory &= do != "storage"
                    self._saving.save(Order(save, do == "storage", measured), state)
                    self._pace.saved(began)
            except BaseException:
                if do == "storage":
                    self._saving.give_up(save)
                raise
            finally:
                if to is None:  # the other ranks do, whatever failed here
                    self._pace.settle()

    def quarantine_damaged(self) -> None:
        """Quarantine the damaged steps that a load found now, instead of at the next save. For adapters.

        A training that ends because of them does so: its next try takes an older step.
        """
        if not self._apart:
            self._findings.apply(self._saving.direct, self._joined.session)

    def wait(self) -> None:
        """Wait until every requested save is copied, and durable if it was for storage.

        Raises:
            InfrastructureError: a save failed since the last call; the message says which.
        """
        if self._apart:
            return
        self._check_process()
        with launched.blocked():
            self._saving.wait()
        self._warn_of_memory()
        problems = self._saving.take_problems()
        self._pace.asked.clear()
        if problems and losses.since(self._world, self._membership):
            logger.warning("%s", " ".join(problems))  # the others go on
        elif problems:
            raise InfrastructureError(" ".join(problems))

    def _warn_of_memory(self) -> None:
        """Warn once if all steps so far are in memory alone, which may end with the job."""
        if not self._only_memory or self._in_memory < 0 or self._world.rank:
            return
        self._only_memory = False
        if not self._wishes.save_at_breakpoint:
            logger.warning(
                "Step %d is in memory only, which ends with the job, and no step was sent to %s;"
                " save(..., to='storage') stores a step, and interval= stores them regularly",
                self._in_memory, self._store.location,
            )  # fmt: skip

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigurationError(
                f"This Checkpointer belongs to process {self._pid}, and this one, {os.getpid()}, is a fork of it: save and"
                " load there, or load here with a Checkpointer of its own, with read_only=True."
            )

    def close(self) -> None:
        """Disconnect from the saver, which goes on storing the requested steps; in a forked process, do nothing."""
        if os.getpid() != self._pid:
            return
        self._saving.close()
        self._leave_world()

    # ---- load

    def load(self, state: State, step: int | None = None) -> LoadRecord | None:
        """Restore in place the newest step that all ranks can load: from memory, else from storage.

        With ``step``, restore that step from storage; saves in memory are no longer used. All later saves
        count as newer than everything saved before.

        Objects with ``load_state_dict`` get their state through it, tensors get their content, and plain
        values are set in the dicts. Return None if nothing was ever saved.

        Tensors that are spread over ranks (`DTensor`, `Shard`) may have been spread in another way, or
        over another number of ranks. Any number of ranks may load what all ranks hold alike.

        Raises:
            ConfigurationError: the saved state has other keys, types or shapes than ``state``; or there
                is no such step.
            CheckpointsLostError: checkpoints existed, even if only in memory, and none can be loaded.
            InfrastructureError: the storage cannot be read now.
        """
        with launched.blocked(), no_collection():
            prepare = restore.in_place(state, self._local)
            again = Replayer(state, self._saving.copier)
            record = self._load(prepare, step, again)
            if self._read_only or self._world.alone:
                return record
            if step is not None:
                self._go_back(step)
            elif record is None or record.source == "storage":
                self._findings.continue_from(None if record is None else record.step)
            self._world.agree(lambda: self._reserve_ahead(state, again.layout))
        launched.loaded(0 if record is None else record.step)
        return record

    def _go_back(self, step: int) -> None:
        """Let later saves count as newer than all that were made after ``step``. Collective."""
        self._world.agree(lambda: self._client.keep(None))
        self._findings.go_back(step, self._numbering.go_back())

    def _reserve_ahead(self, state: State, layout: PackedLayout | None) -> None:
        layout = layout or self._saving.copier.layout_of(state)
        self._saving.pool.reserve_ahead(layout, tree.expected_bytes(state))

    def read(
        self, keys: Collection[str] | None = None, step: int | None = None
    ) -> tuple[LoadRecord, State] | None:
        """Return the newest step that all ranks have, as new tensors; None if there is none. Collective.

        Parts of tensors that are spread over ranks are `Shard` objects; reading them takes as many ranks as
        saved them.

        Args:
            keys: keys of the state whose tensors are read. Tensors below other keys are zeros of the same
                shape and type, which take no memory.
            step: a stored step to read instead.

        Raises:
            ConfigurationError: another number of ranks saved parts of tensors, or tensors that differ
                between ranks; or there is no such step.
            InfrastructureError: checkpoints existed, and none can be loaded.
        """
        readings: list[StateReading] = []

        def prepare(tree: Any, specs: Sequence[TensorSpec], moved: bool) -> StateReading:
            reading = StateReading(tree, specs, keys)
            if moved and any(
                spec.part is not None and need is not None
                for spec, need in zip(specs, reading.wanted, strict=True)
            ):
                raise ConfigurationError(
                    f"The checkpoint was not saved by {self._world.size} ranks; `load` can restore it."
                )
            readings.append(reading)
            return reading

        with launched.blocked():
            record = self._load(prepare, step)
        return None if record is None else (record, readings[-1].state)

    def load_parts(
        self,
        choose: Callable[[Mapping[int, RankState]], Sequence[Target] | None],
        step: int | None = None,
    ) -> LoadRecord | None:
        """Load parts of saved tensors, whichever ranks saved them. For adapters; collective.

        Args:
            choose: called with what all ranks saved of a step, or one of them where all saved the same; returns
                the parts that this rank needs, or None to see all. It is called again if another step has to be
                taken.
            step: a stored step to go back to, as with `load`.

        Raises:
            ConfigurationError: there is no such step.
            InfrastructureError: checkpoints existed, and none can be loaded.
        """
        with launched.blocked():
            record = self._carry_out(functools.partial(taking, choose), step)
            if step is not None and not self._read_only and not self._world.alone:
                self._go_back(step)
        if not self._read_only:
            launched.loaded(0 if record is None else record.step)
        return record

    def _load(
        self, prepare: Prepare, step: int | None, again: Replayer | None = None
    ) -> LoadRecord | None:
        return self._carry_out(functools.partial(restoring, prepare), step, again)

    def _carry_out(
        self, planner: Planner, step: int | None = None, again: Replayer | None = None
    ) -> LoadRecord | None:
        self._world.check()
        if not self._read_only:
            self._check_process()
            self._takes_part()  # with ranks that have returned
        self._world.agree(self._prepare_to_load)
        began = time.monotonic()
        if self._read_only and not self._identity:
            # The directory did not exist before.
            self._identity = shared.identity(self._world, self._store, create=False)
        client = None if self._read_only else self._client
        loader = Loader(self._world, client, self._store, self._identity, planner, again)
        found = loader.load() if step is None else loader.load_stored(step)
        self._findings.damaged |= loader.damaged
        if not self._read_only:
            losses.continued(None if found is None else found.save)
        if found is None and self._world.alone:
            return None
        if found is None:
            fresh.begin(
                self._world, self._store, self._identity, job_of(config.environ()), loader,
                start_afresh=self._start_afresh, read_only=self._read_only,
            )  # fmt: skip
            if client is not None:
                self._world.agree(lambda: client.keep(None))
            return None
        loader.warn_of_loss(found)
        if found.save is not None and not self._read_only and not self._world.alone:
            self._numbering.pass_over(found.save)
        record = LoadRecord(found.step, found.source, time.monotonic() - began)
        logger.info("Step %d was loaded from %s in %.2f s", *msgspec.structs.astuple(record))
        return record

    def _prepare_to_load(self) -> None:
        self._saving.wait_for_copy()
        self._saving.pool.wait()
        if self._world.rank == 0 and not self._read_only and not self._world.alone:
            storage.adopt(self._store)
