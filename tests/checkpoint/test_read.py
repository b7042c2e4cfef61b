"""The newest step as new tensors, without a state to restore."""

import pytest
import torch

from dlrover.checkpoint import Checkpointer, Shard
from dlrover.errors import ConfigurationError

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(60)]

STATE = {
    "model": {"w": torch.arange(6.0).view(2, 3), "tied": torch.ones(2)},
    "rows": Shard(torch.ones(1, 2), (4, 2), (3, 0)),
    "pair": (1, torch.zeros(0)),
    "step": 7,
}


@pytest.fixture(params=["memory", "storage"])
def checkpointer(request, directory):
    saves = Checkpointer(directory, linger=0.0)
    assert saves.read() is None
    saves.save(7, STATE, to=request.param)
    saves.wait()
    if request.param == "storage":
        saves.close()
        directory.until_no_saver()
        saves = Checkpointer(directory, linger=0.0)
    yield saves
    saves.close()


def test_a_step_is_read_as_it_was_saved(checkpointer):
    record, state = checkpointer.read()
    assert (record.step, state["step"], list(state)) == (7, 7, list(STATE))
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])
    assert (state["rows"].whole, state["rows"].at) == ((4, 2), (3, 0))
    assert torch.equal(state["rows"].tensor, torch.ones(1, 2))
    assert state["pair"][0] == 1
    state["model"]["w"].zero_()
    assert torch.equal(checkpointer.read()[1]["model"]["w"], STATE["model"]["w"])


def test_below_other_keys_there_are_zeros_that_take_no_memory(checkpointer):
    _, state = checkpointer.read(["step", "rows"])
    assert torch.equal(state["rows"].tensor, torch.ones(1, 2))
    assert state["model"]["w"].shape == (2, 3)
    assert not state["model"]["w"].any()
    assert state["model"]["w"].untyped_storage().nbytes() == 4


def test_a_stored_step_is_read_by_its_number_and_memory_stays(directory):
    saves = Checkpointer(directory, linger=0.0)
    for step in (1, 2, 3):
        saves.save(step, {"step": step}, to="memory" if step == 3 else "storage")
    saves.wait()
    record, state = saves.read(step=1)
    assert (record.step, record.source, state["step"]) == (1, "storage", 1)
    assert saves.read()[0].source == "memory"
    with pytest.raises(ConfigurationError, match=r"step is 3, which is not stored .* is: 2, 1\."):
        saves.read(step=3)
    state = {"step": 0}
    assert saves.load(state, step=1).step == state["step"] == 1
    assert saves.load(state).source == "storage", "what was in memory is not gone on with"
    saves.close()


def test_another_number_of_ranks_cannot_read_parts(checkpointer):
    checkpointer._world.size = 2
    checkpointer._world.exchange = lambda values: [list(values)] * 2
    checkpointer._world.gather = lambda data: [data] * 2
    with pytest.raises(ConfigurationError, match="was not saved by 2 ranks"):
        checkpointer.read()
    checkpointer._world.size = 1


def test_a_tensor_without_its_memory_is_refused_and_not_written_to(checkpointer):
    memory = torch.zeros(2, 3)
    memory.untyped_storage().resize_(8)
    model = {"w": memory, "tied": torch.zeros(2)}
    rows = Shard(torch.zeros(1, 2), (4, 2), (3, 0))
    state = {"model": model, "rows": rows, "pair": (0, torch.zeros(0)), "step": 0}
    needs = r"model\.w needs 24 bytes, and its storage has only 8"
    with pytest.raises(ConfigurationError, match=needs):
        checkpointer.load(state)
