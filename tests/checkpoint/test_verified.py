"""Copies out of memory that are checked meanwhile."""

import os

import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.engine import buffers, copying, tree
from dlrover.checkpoint.loading.memory_step import VerifiedTensors
from dlrover.checkpoint.loading.replay import Replayer
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import memory
from dlrover.checkpoint.saver.memory import Generation
from dlrover.errors import ConfigurationError, InfrastructureError

LARGE = 1 << 20
"""Bytes."""
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(60)]

STATE = {
    "large": torch.randn(LARGE // 2),
    "turned": torch.randn(700, 600).t(),
    "half": torch.randn(LARGE).to(torch.bfloat16),
    "small": torch.arange(5),
}


@pytest.fixture
def generation() -> tuple[Generation, list, list[torch.Tensor]]:
    """One that holds `STATE`: itself, its entries, and its tensors."""
    copier = copying.Copier()
    packed = copier.layout(tree.flatten(STATE))
    fd = os.memfd_create("test")
    os.ftruncate(fd, memory.capacity_for(packed))
    found = Generation(fd)
    os.close(fd)
    buffer = torch.frombuffer(found.data, dtype=torch.uint8)
    copier.copy(buffer)
    found.seal(packed, rank=0, world_size=1, save=SaveId(0, 1, 1, 7))
    layout = found.layout(found.header())
    return found, layout.entries, buffers.views(buffer, layout.entries)


@pytest.mark.parametrize("share", [1, 1000])
def test_targets_of_all_kinds_get_their_content(generation, share: int):
    found, entries, tensors = generation
    sums = memory.compute_sums(found, entries)
    copy = VerifiedTensors(found, entries, sums, share)
    targets = [torch.zeros_like(tensor) for tensor in STATE.values()]
    targets[2] = targets[2].float()  # of another type
    pending = [(target, index) for index, target in enumerate(targets)]
    left = copy.fill(pending[:1]) + copy.fill(pending[1:])
    assert [index for _, index in left] == [1, 2], "a turned one and one of another type"
    for target, index in left:
        target.copy_(copy[index])
    assert copy.problem() == ""
    assert all(map(torch.equal, map(torch.Tensor.double, targets), [t.double() for t in tensors]))
    assert all(map(torch.equal, tensors, STATE.values()))


@pytest.mark.parametrize("copied", [True, False])
def test_damage_is_found_whether_it_was_copied_or_not(generation, copied: bool):
    found, entries, tensors = generation
    sums = memory.compute_sums(found, entries)
    at = next(entry for entry in entries if entry.path == ("half",))
    found.tensor_bytes(at)[at.nbytes - 1] ^= 1
    copy = VerifiedTensors(found, entries, sums, 1)
    if copied:
        copy.fill([(torch.zeros_like(tensor), index) for index, tensor in enumerate(tensors)])
    assert copy.problem() == "The tensor half in memory is damaged."


@pytest.mark.parametrize("damaged", ["", "half", "turned"])
def test_a_replay_reaches_tensors_of_all_kinds_and_is_checked(generation, damaged: str):
    found, entries, _ = generation
    sums = memory.compute_sums(found, entries)
    for entry in entries:
        if entry.path == (damaged,):
            found.tensor_bytes(entry)[entry.nbytes - 1] ^= 1
    live = {key: torch.zeros_like(tensor) for key, tensor in STATE.items()}
    replay = Replayer(live, copying.Copier()).plan(found.index(found.header()))
    targets = replay.targets
    assert targets.direct.tolist() == [True, False, True, True], "one is turned"
    copy = VerifiedTensors(found, targets.entries, sums, 1, targets.places)
    replay.run(copy)
    assert copy.problem() == (damaged and f"The tensor {damaged} in memory is damaged.")
    assert damaged or all(map(torch.equal, live.values(), STATE.values()))


def test_a_load_refuses_a_large_tensor_that_changed_in_memory(directory):
    state = {key: tensor.clone() for key, tensor in STATE.items()}
    checkpointer = Checkpointer(directory, linger=0.0)
    checkpointer.save(1, state)
    assert checkpointer.load(state).source == "memory"  # now there are checksums
    held = next(held for held in checkpointer._client.look().held if held.save.step == 1)
    generation = checkpointer._client.generation(held.slot)
    generation.data[LARGE] ^= 1
    with pytest.raises(InfrastructureError, match=r"The tensor large .*in memory is damaged"):
        checkpointer.load(state)
    checkpointer.close()


def test_targets_that_share_memory_get_the_last_content():
    copier, state = copying.Copier(), {"a": torch.randn(1 << 20), "b": torch.randn(1 << 20)}
    packed = copier.layout_of(state)
    fd = os.memfd_create("test")
    os.ftruncate(fd, memory.capacity_for(packed))
    found = Generation(fd)
    os.close(fd)
    copier.copy(torch.frombuffer(found.data, dtype=torch.uint8))
    found.seal(packed, rank=0, world_size=1, save=SaveId(0, 1, 1, 7), sums=copier.sums)
    header = found.header()
    entries = found.layout(header).entries
    sums = memory.compute_sums(found, entries)
    assert found.sums(header) == (sums if memory.kernels().native else None)
    tensors = VerifiedTensors(found, entries, sums, 1)
    shared = torch.zeros(1 << 20)
    assert tensors.fill([(shared, 0), (shared, 1)]) == []
    assert torch.equal(shared, state["b"])
    assert tensors.problem() == ""


def test_a_wrong_choice_of_the_library_is_said_before_anything_is_trained(directory, monkeypatch):
    monkeypatch.setenv("DLROVER_NATIVE", "on")
    with pytest.raises(ConfigurationError, match="DLROVER_NATIVE=on"):
        Checkpointer(directory, linger=0.0)
