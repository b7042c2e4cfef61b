"""A save waits for the memory of the generation that it writes, and not for that of the others."""

import os
import threading

import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.engine.client import GenerationPool
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import memory
from dlrover.checkpoint.saver.memory import Generation
from dlrover.errors import InfrastructureError

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(60)]

STATE = {"w": torch.arange(1000.0)}


@pytest.fixture
def checkpointer(directory):
    made = Checkpointer(directory, linger=0.0)
    yield made
    made.close()


@pytest.fixture
def later(checkpointer, monkeypatch) -> threading.Event:
    """Memory is provided for the first generation; for the others when this is set."""
    event = threading.Event()
    reserve = checkpointer._client.reserve

    def wait(slot: int, nbytes: int) -> str:
        if slot:
            assert event.wait(30)
        return reserve(slot, nbytes)

    monkeypatch.setattr(checkpointer._client, "reserve", wait)
    yield event
    event.set()


def test_the_first_save_does_not_wait_for_the_other_generations(checkpointer, later):
    checkpointer.load(STATE)
    checkpointer.save(1, STATE)
    saved = threading.Thread(target=checkpointer.save, args=(2, STATE))
    saved.start()
    saved.join(0.3)
    assert saved.is_alive(), "the only generation with memory holds the newest step"
    later.set()
    saved.join(30)
    assert not saved.is_alive()
    assert checkpointer.load({"w": torch.zeros(1000)}).step == 2


def test_other_requests_do_not_wait_while_memory_is_provided(checkpointer, later):
    checkpointer.load(STATE)
    checkpointer.save(1, STATE, to="storage")
    checkpointer.wait()
    assert checkpointer._client.stored().step == 1
    assert not later.is_set()


def test_a_state_that_grows_gets_more_memory(checkpointer):
    for step, size in enumerate((10, 100_000, 1_000_000), 1):
        checkpointer.save(step, {"w": torch.full((size,), float(step))})
        fresh = {"w": torch.zeros(size)}
        assert checkpointer.load(fresh).step == step
        assert torch.equal(fresh["w"], torch.full((size,), float(step)))


def test_memory_that_cannot_be_asked_for_is_asked_for_again(checkpointer, monkeypatch):
    reserve = checkpointer._client.reserve

    def refuse(slot: int, nbytes: int) -> str:
        monkeypatch.setattr(checkpointer._client, "reserve", reserve)
        raise InfrastructureError("no answer")

    monkeypatch.setattr(checkpointer._client, "reserve", refuse)
    with pytest.raises(InfrastructureError, match="no answer"):
        checkpointer.save(1, STATE)
    checkpointer.save(2, STATE)
    assert checkpointer.load({"w": torch.zeros(1000)}).step == 2


@pytest.mark.parametrize("setting", ["[advise]", "[never]"])
def test_memory_is_provided_with_and_without_huge_pages(tmp_path, monkeypatch, setting):
    offers = tmp_path / "shmem_enabled"
    offers.write_text(f"always within_size {setting} deny force\n")
    monkeypatch.setattr(memory, "HUGE_PAGES", offers)
    fd = os.memfd_create("test")
    try:
        memory.provide(fd, 1 << 22)
        assert os.fstat(fd).st_blocks * 512 == os.fstat(fd).st_size == 1 << 22
        memory.populate(Generation(fd))
    finally:
        os.close(fd)


def test_memory_that_the_kernel_does_not_provide_leaves_a_generation_as_it_was(monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 4096)
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OSError, match="Cannot allocate"):
            memory.provide(fd, 1 << 22)
        assert os.fstat(fd).st_size == 4096
    finally:
        os.close(fd)


class Client:
    """A saver that gives memory to ``good`` generations; asking for more fails."""

    def __init__(self, good: int) -> None:
        self.generations, self._good = [], good

    def reserve(self, slot: int, nbytes: int) -> str:
        if slot >= self._good:
            raise OSError(24, "Too many open files")
        if not slot:
            self.generations = [Small(), Small()]
        return ""

    def begin(self, save: SaveId, ready: int) -> int:
        return min(1, ready)  # the first one holds the newest step


class Small:
    data = memoryview(bytearray(1))


@pytest.mark.parametrize("good", [0, 1])
def test_a_save_is_told_when_no_descriptor_is_left_to_ask_for_memory(monkeypatch, good):
    monkeypatch.setattr(memory, "populate", lambda *_: None)
    pool = GenerationPool(client := Client(good))
    client.generations = [Small(), Small()]
    layout = Copier().layout(tree.flatten(STATE))
    told = []

    def save() -> None:
        try:
            pool.reserve(layout)
            told.append(pool.begin(SaveId(0, 2, 2, 1)))
        except InfrastructureError as error:
            told.append(str(error))

    saving = threading.Thread(target=save, daemon=True)
    saving.start()
    saving.join(5)
    assert told == ["Memory cannot be asked for: Too many open files."]
