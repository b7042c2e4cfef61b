"""The memory that a rank saves to, enlarged and provided before it is needed."""

from __future__ import annotations

import logging
import threading

import torch

from dlrover.checkpoint.engine import devices
from dlrover.checkpoint.engine.client import SaverClient
from dlrover.checkpoint.machine.layout import PackedLayout
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import memory
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.storage.stores import reason
from dlrover.errors import DLRoverError, InfrastructureError

logger = logging.getLogger(__name__)


class Room:
    """The generations of this rank, as its worker sees them.

    A thread has their memory provided one after the other, so a save waits only for the generation that it
    writes to.
    """

    def __init__(self, client: SaverClient) -> None:
        self._client = client
        self._buffers: dict[int, tuple[Generation, torch.Tensor]] = {}
        self._warned: set[str] = set()
        self._changed = threading.Condition()
        self._provider: threading.Thread | None = None
        """Thread that provides memory; None before it starts and after it ends."""
        self._wanted = 0
        """Bytes that each generation should have."""
        self._ready = 0
        """Number of generations that have their memory; the following ones do not have it yet."""
        self._problem = ""
        """Reason why memory does not suffice for even one generation; empty if it does."""
        self._error: DLRoverError | None = None
        """Error of the last request for memory; None if it succeeded."""

    def make(self, layout: PackedLayout) -> bool:
        """Wait until a state fits in at least one generation; return False if memory is short.

        The other generations follow in the background.
        """
        with self._changed:
            if self._problem or self._error or self._wanted < memory.needed_for(layout):
                self._provide(memory.room_for(layout))
            self._changed.wait_for(lambda: self._ready or self._provider is None)
            problem, error = self._problem, self._error
        if error is not None:
            raise error
        if problem:
            self._warn("none", f"{problem} Only steps for storage are saved, and `save` waits")
        return not problem

    def reserve_ahead(self, layout: PackedLayout, more: int) -> None:
        """Have memory provided in the background, and entered in this process's page tables.

        ``more``: bytes of tensors that the state will gain.
        """
        with self._changed:
            self._provide(memory.room_for(layout, more))

    def begin(self, save: SaveId) -> int:
        """Return the generation to write next, once it has its memory.

        Raises:
            DLRoverError: another generation needs memory, and the request for it failed.
        """
        while True:
            with self._changed:
                done = self._provider is None and self._error is None
                ready = len(self._client.generations) if done else self._ready
            slot = self._client.begin(save, ready)
            if slot < ready:
                return slot
            self._wait_for(slot)

    def _wait_for(self, slot: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready > slot or self._provider is None)
            if self._error is not None and self._ready <= slot:
                raise self._error

    def buffer(
        self, slot: int, device: torch.device | None = None
    ) -> tuple[Generation, torch.Tensor]:
        """Return a generation and its data as a tensor; the same ones until the generation is mapped again.

        ``device``: the accelerator that will write to the tensor, if there is one.
        """
        generation = self._client.generation(slot)
        known = self._buffers.get(slot)
        if known is None or known[0] is not generation:
            data = torch.frombuffer(generation.data, dtype=torch.uint8)
            if device is not None:
                devices.pin(generation, data, device)
            known = self._buffers[slot] = generation, data
        return known

    def wait(self) -> None:
        """Wait until no memory is being provided in the background."""
        with self._changed:
            self._changed.wait_for(lambda: self._provider is None)

    def forget(self) -> None:
        """Wait for the background thread and release the memory."""
        self.wait()
        self._buffers.clear()
        self._wanted = self._ready = 0

    # ---- in the background

    def _provide(self, nbytes: int) -> None:
        """Start providing memory, or restart with a larger size. Hold the lock."""
        self._wanted = max(self._wanted, nbytes)
        self._ready, self._problem, self._error = 0, "", None
        if self._provider is None:
            self._provider = threading.Thread(target=self._run, name="memory")
            self._provider.start()

    def _run(self) -> None:
        failed = InfrastructureError("No memory is provided any more: its thread has ended.")
        try:
            self._provide_all()
        except OSError as error:
            failed = InfrastructureError(f"Memory cannot be asked for: {reason(error)}.")
        finally:
            with self._changed:
                if self._provider is threading.current_thread():  # the thread failed
                    self._provider, self._error = None, failed
                    self._changed.notify_all()

    def _provide_all(self) -> None:
        while True:
            with self._changed:
                if self._problem or self._error or self._ready >= len(self._client.generations):
                    self._provider = None
                    self._changed.notify_all()
                    break
                slot, nbytes = self._ready, self._wanted
            self._provide_one(slot, nbytes)
        if self._ready == 1:
            self._warn(
                "one",
                "There is memory for one generation only: a process that dies during a save costs the"
                " memory checkpoint",
            )

    def _provide_one(self, slot: int, nbytes: int) -> None:
        problem, failed = "", None
        try:
            problem = self._client.reserve(slot, nbytes)
        except DLRoverError as error:
            failed = error
        generations = self._client.generations
        if not (problem or failed) and slot < len(generations):
            memory.populate(generations[slot], threading.main_thread().is_alive)
        with self._changed:
            if self._wanted == nbytes:  # else more was requested meanwhile
                self._problem, self._error = problem, failed
                self._ready = slot if problem or failed else min(slot + 1, len(generations))
                self._changed.notify_all()

    def _warn(self, subject: str, warning: str) -> None:
        """Log a warning once per subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning("%s", warning)
