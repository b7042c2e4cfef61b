"""The saves of one rank: a copy to memory that its saver commits, or a step written straight to storage where memory is short."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from dlrover.checkpoint.collection import no_collection
from dlrover.checkpoint.engine import direct, losses
from dlrover.checkpoint.engine.client import GenerationPool, SaverClient
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.engine.direct import DirectWriter
from dlrover.checkpoint.engine.notifier import StoredStepNotifier
from dlrover.checkpoint.engine.overlap import Background, Guarded, Snapshot, torn
from dlrover.checkpoint.engine.pace import Pace
from dlrover.checkpoint.engine.tree import State
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.machine.layout import PackedLayout
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver.protocol import Attached, JoinSaver, SaverGoneError
from dlrover.checkpoint.storage import faults
from dlrover.checkpoint.storage.stores import Store
from dlrover.errors import DLRoverError, InfrastructureError

logger = logging.getLogger(__name__)


class Order(NamedTuple):
    """One requested save."""

    save: SaveId
    to_storage: bool
    metrics: dict[str, float]


class Saving:
    """The saves of one rank, one after the other; if its saver is gone, it starts another one.

    Args:
        world: the ranks.
        store: the checkpoint directory.
        client: this rank's connection.
        pace: what learns how long saves take.
        overlap: let `save` return at once and copy while the training goes on.
    """

    attached: Attached
    """The saver's reply to `attach`."""
    direct: DirectWriter
    """What writes parts to storage, in the present session."""

    def __init__(
        self, world: TorchWorld, store: Store, client: SaverClient, pace: Pace, *, overlap: bool
    ) -> None:
        self._world, self._store, self._client, self._pace = world, store, client, pace
        self.copier = Copier()
        self.pool = GenerationPool(client)
        self._guarded = Guarded()
        self._background = Background() if overlap else None
        self._notifier = StoredStepNotifier(store, client.stored)
        self._problems: list[str] = []
        self._joined: JoinSaver | None = None

    @property
    def overlaps(self) -> bool:
        """True if copies overlap with the training."""
        return self._background is not None

    # ---- the saver

    def attach(self) -> None:
        """Connect to this node's saver, and start it if there is none."""
        self.attached = self._client.attach(self._world.rank)

    def begin(self, joined: JoinSaver, writer: DirectWriter) -> None:
        """Begin a session, which the saver knows already."""
        self._joined, self.direct = joined, writer

    def _reconnect(self) -> None:
        """Connect to a new saver; the memory of the old one is lost."""
        self._replace_saver()
        if self._joined is not None:
            self._client.join(self._joined)

    def attach_again(self) -> None:
        """Connect to a new saver if the old one has ended."""
        try:
            self._client.look()
        except SaverGoneError as error:
            logger.warning("%s It is started again", error)
            self._replace_saver()

    def _replace_saver(self) -> None:
        for save in sorted(self._pace.asked):
            if problem := direct.lost(self._store, save):
                self._problems.append(problem)
                if self._world.size > 1:
                    self.direct.give_up_lost(save)
        self._pace.asked.clear()
        self.pool.forget()
        self.attach()

    # ---- a save

    def leave_out(self, save: SaveId) -> None:
        """Note that this rank does not make a save, once it has made those before."""
        if self._background is not None:
            self._background.finish_all()  # the saver must see the saves in order
        self._pass_over(save)

    def _pass_over(self, save: SaveId) -> None:
        """Tell the saver that this rank did not make a save, so that the node's other ranks do not wait."""
        with contextlib.suppress(DLRoverError):  # the saver is gone and knows no save
            self._client.pass_over(save)

    def give_up(self, save: SaveId) -> None:
        """Keep other nodes from waiting for this rank's part of a save."""
        if self._world.size > 1:
            self.direct.give_up(save)

    def save(self, order: Order, state: State) -> None:
        """Copy a state to memory and commit it; with `overlaps`, return at once.

        If it does not fit in memory, write a step for storage there, and drop any other step.

        Raises:
            ConfigurationError: the state holds something that cannot be kept.
            InfrastructureError: the last copy that overlapped with the training failed, or this one.
        """
        self.wait_for_copy()
        with no_collection():
            layout = self.copier.layout_of(state)
        if order.to_storage and self._world.rank == 0:
            self._notifier.expect(order.save, state)
        if not self._reserve(layout):
            self._save_without_memory(order, layout)
            return
        if self._background is None:
            self.copier.mark()
            self._save(order, layout, self._copy_all)
            return
        self._guarded.look_at(state, self.copier)
        snapshot = Snapshot(self.copier, self._guarded)
        self.copier.mark()

        def copy(buffer: torch.Tensor) -> None:
            changed = snapshot.copy(buffer)
            if changed:
                self._guarded.distrust(changed)
                raise torn(order.save.step, self.copier, changed)

        self._background.start(lambda: self._save_or_pass_over(order, layout, copy))

    def _reserve(self, layout: PackedLayout) -> bool:
        """Return whether a state fits in memory."""
        try:
            return self.pool.reserve(layout)
        except SaverGoneError as error:
            logger.warning("%s It is started again", error)
            self._reconnect()
            return self.pool.reserve(layout)

    def _save_without_memory(self, order: Order, layout: PackedLayout) -> None:
        """Write a step for storage straight to storage and wait for it; drop any other step."""
        # The node's other ranks notice it when they reconnect.
        with contextlib.suppress(SaverGoneError):
            self._client.pass_over(order.save, written=order.to_storage)
        if not order.to_storage:
            return
        self._wait_for_saver()  # steps are stored one at a time
        began = time.monotonic()
        with losses.watched(self._world, {order.save: began}, self.give_up):
            problem = self.direct.write(order.save, layout, self.copier.sources, order.metrics)
        if problem:
            logger.error("%s", problem)
            self._problems.append(problem)
            return
        self._pace.stored(began)
        self._notifier.stored(order.save)
        with contextlib.suppress(SaverGoneError):
            self._client.keep(None)  # what is in memory is older

    def _copy_all(self, buffer: torch.Tensor) -> None:
        self.copier.copy(buffer)

    def _save(
        self, order: Order, layout: PackedLayout, copy: Callable[[torch.Tensor], None]
    ) -> None:
        try:
            self._save_once(order, layout, copy)
        except SaverGoneError as error:
            logger.warning("%s It is started again", error)
            self._reconnect()
            if not self.pool.reserve(layout):
                raise InfrastructureError(
                    f"There is no memory for step {order.save.step} any more."
                ) from error
            self._save_once(order, layout, copy)

    def _save_or_pass_over(
        self, order: Order, layout: PackedLayout, copy: Callable[[torch.Tensor], None]
    ) -> None:
        try:
            self._save(order, layout, copy)
        except BaseException:
            self._pass_over(order.save)
            if order.to_storage:
                self.give_up(order.save)
            raise

    def _save_once(
        self, order: Order, layout: PackedLayout, copy: Callable[[torch.Tensor], None]
    ) -> None:
        save = order.save
        slot = self.pool.begin(save)
        faults.point("save.begun")
        generation, buffer = self.pool.buffer(slot, self.copier.device)
        copy(buffer)
        faults.point("save.copied")
        generation.seal(
            layout,
            rank=self._world.rank,
            world_size=self._world.size,
            save=save,
            sums=self.copier.sums,
        )
        self._client.commit(slot, save, to_storage=order.to_storage, metrics=order.metrics)
        faults.point("save.committed")
        if order.to_storage:
            self._pace.asked[save] = time.monotonic()

    # ---- waits

    def wait_for_copy(self) -> None:
        """Wait until the copy that overlaps with the training is done.

        Raises:
            InfrastructureError: it failed; the message says why.
        """
        if self._background is not None:
            self._background.wait()

    def wait(self) -> None:
        """Wait until every save is copied, and durable or failed if it was for storage."""
        self.wait_for_copy()
        self._wait_for_saver()
        self._notifier.settle()

    def take_problems(self) -> list[str]:
        """Return why saves have failed since the last call, one sentence each."""
        problems, self._problems = self._problems, []
        return problems

    def _wait_for_saver(self) -> None:
        try:
            with losses.watched(self._world, self._pace.asked, self.give_up):
                self._problems += self._client.wait()
        except SaverGoneError:
            self._reconnect()

    def close(self) -> None:
        """Disconnect from the saver, which goes on storing the requested steps."""
        if self._background is not None:
            self._background.close()
        self._notifier.close()
        self.copier.forget()
        self.pool.forget()
        self._client.close()
