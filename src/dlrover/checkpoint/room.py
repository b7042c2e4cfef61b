"""The memory that a rank saves to: found, made larger, and provided before it is needed."""

from __future__ import annotations

import ctypes
import logging
import threading

import torch

from dlrover.checkpoint import devices, memory
from dlrover.checkpoint.client import SaverClient
from dlrover.checkpoint.layout import PackedLayout
from dlrover.checkpoint.memory import PAGE, Generation
from dlrover.errors import DLRoverError

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23
POPULATE_CHUNK = 1 << 26
"""Bytes for which page tables are made at a time."""
_libc = ctypes.CDLL(None, use_errno=True)


class Room:
    """The generations of this rank, as its worker sees them."""

    def __init__(self, client: SaverClient) -> None:
        self._client = client
        self._buffers: dict[int, tuple[Generation, torch.Tensor]] = {}
        self._told: set[str] = set()
        self._reserved = threading.Event()
        """Cleared while memory is reserved in the background."""
        self._reserved.set()

    def buffer(
        self, slot: int, device: torch.device | None = None
    ) -> tuple[Generation, torch.Tensor]:
        """A generation and its data as a tensor; the same one as long as it is as large.

        ``device``: the accelerator that will write to it, if there is one.
        """
        generation = self._client.generation(slot)
        known = self._buffers.get(slot)
        if known is None or known[0] is not generation:
            data = torch.frombuffer(generation.data, dtype=torch.uint8)
            if device is not None:
                devices.pin(generation, data, device)
            known = self._buffers[slot] = generation, data
        return known

    def make(self, layout: PackedLayout) -> bool:
        """See to it that a state fits in each generation; whether there is memory for one at least."""
        self.wait()
        needed = memory.needed_for(layout)
        if min(generation.size for generation in self._client.generations) < needed:
            problem = self._client.reserve(memory.room_for(layout))
            if problem:
                self._tell("none", f"{problem} Only steps for storage are saved, and `save` waits")
                return False
            self._note_generations()
        return True

    def _tell(self, subject: str, warning: str) -> None:
        """Warn once."""
        if subject not in self._told:
            self._told.add(subject)
            logger.warning("%s", warning)

    def _note_generations(self) -> None:
        count = len(self._client.generations)
        for slot in [slot for slot in self._buffers if slot >= count]:
            del self._buffers[slot]
        if count == 1:
            self._tell(
                "one",
                "There is memory for one generation only: a process that dies during a save costs the"
                " memory checkpoint",
            )

    def reserve_ahead(self, layout: PackedLayout, more: int) -> None:
        """Have memory provided in the background, and entered in this process's tables.

        ``more``: bytes of tensors that the state will get.
        """
        nbytes = memory.room_for(layout, more)

        def reserve() -> None:
            try:
                problem = self._client.reserve(nbytes)
                if problem:
                    logger.warning("No memory is reserved ahead: %s", problem)
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

    def wait(self) -> None:
        """Wait for what is reserved in the background."""
        self._reserved.wait()

    def forget(self) -> None:
        """Let go of the memory."""
        self.wait()
        self._buffers.clear()


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
