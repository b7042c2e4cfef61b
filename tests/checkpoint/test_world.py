"""The group of ranks that save together."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.errors import InfrastructureError


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def threads() -> set[str]:
    """Of this process, by the kernel's number. Their names are no help: a thread sets its own, some time later."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


def test_no_thread_of_a_closed_one_is_left_for_the_end_of_the_interpreter(directory: Path):
    before = threads()
    checkpointer = Checkpointer(directory, linger=0.0)
    its_own = threads() - before
    assert its_own
    checkpointer.close()
    checkpointer.close()
    assert not its_own & threads()


def test_nor_of_a_forgotten_one(directory: Path):
    before = threads()
    checkpointer = Checkpointer(directory, linger=0.0)
    its_own = threads() - before
    client = checkpointer._client
    del checkpointer
    gc.collect()
    client.close()
    assert its_own
    assert not its_own & threads()


@pytest.mark.parametrize("again", [False, True])
def test_the_program_may_end_all_groups_first(directory: Path, tmp_path: Path, again: bool):
    with contextlib.closing(Checkpointer(directory, linger=0.0)):
        dist.destroy_process_group()
        if again:
            store = dist.FileStore(str(tmp_path / "again"), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def test_a_closed_one_tells_nobody():
    world = TorchWorld()
    world.size = 2
    world.close()
    with pytest.raises(InfrastructureError, match="was closed"):
        world.exchange([1])
