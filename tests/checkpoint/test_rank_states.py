"""Objects with ``load_rank_states`` get what all ranks have saved; see also tests/process/test_sharding.py."""

import contextlib
from pathlib import Path

import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.loading.plan import LoadRequest, RankState, restoring
from dlrover.checkpoint.loading.restore import in_place
from dlrover.checkpoint.machine.layout import encode, pack
from dlrover.errors import ConfigurationError

pytestmark = pytest.mark.torch


class Collecting:
    """Remembers what it is restored from."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.states: list[object] = []

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_rank_states(self, states: list[object]) -> None:
        self.states = states


def skeleton(value: int) -> RankState:
    tree = {"nested": [{"one": {"value": value}}], "step": 3}
    return RankState((), encode(pack(tree, (), lambda item, _: item)), ())


@pytest.mark.slow
@pytest.mark.parametrize("source", ["memory", "storage"])
def test_from_memory_and_from_storage(directory: Path, source: str) -> None:
    kept = torch.arange(5)
    with contextlib.closing(Checkpointer(directory, linger=60.0)) as checkpointer:
        checkpointer.save(7, {"one": Collecting(3), "kept": kept}, to="storage")
        checkpointer.wait()
    if source == "storage":
        directory.stop_saver()
    one, tensor = Collecting(), torch.zeros(5, dtype=torch.int64)
    with contextlib.closing(Checkpointer(directory, linger=0.0)) as checkpointer:
        record = checkpointer.load({"one": one, "kept": tensor})
    assert record is not None
    assert (record.step, record.source) == (7, source)
    assert one.states == [{"value": 3}]
    assert torch.equal(tensor, kept)


@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_must_be_known(size: int) -> None:
    """By whichever number of ranks it was saved, and however many load."""
    one = Collecting()
    prepare = in_place({"nested": [{"one": one}], "step": 0}, ())
    ranks = {rank: skeleton(rank + 10) for rank in range(size)}
    some = LoadRequest({0: ranks[0]}, base=0, moved=size != 1, complete=False, size=size)
    assert (restoring(prepare, some) is None) == (size > 1)
    planned = restoring(
        prepare, LoadRequest(ranks, base=0, moved=size != 1, complete=True, size=size)
    )
    assert planned is not None
    planned.restoration.run([])
    assert one.states == [{"value": rank + 10} for rank in range(size)]


def test_equal_tensors_do_not_make_one_rank_enough() -> None:
    """A step whose tensors all ranks have equally is planned from one rank's part, as far as tensors go."""
    prepare = in_place({"nested": [{"one": Collecting()}], "step": 0}, ())
    request = LoadRequest({0: skeleton(10)}, base=0, moved=True, complete=True, size=2)
    assert restoring(prepare, request) is None


def normalization(**values: float) -> RankState:
    module = torch.nn.BatchNorm1d(2)
    with torch.no_grad():
        for key, value in values.items():
            module.state_dict()[key].fill_(value)
    flat = tree.flatten({"norm": module})
    sums = [hash(str(tensor.tolist())) for tensor in flat.tensors]
    return RankState(tree.specs(flat), encode(flat.packed), sums)


@pytest.mark.parametrize("base", [0, 1])
def test_buffers_may_differ_between_ranks_when_another_number_of_ranks_loads(base: int) -> None:
    prepare = in_place({"norm": torch.nn.BatchNorm1d(2)}, ())
    ranks = {rank: normalization(running_mean=rank) for rank in range(2)}
    planned = restoring(prepare, LoadRequest(ranks, base, moved=True, complete=True, size=2))
    assert planned is not None
    pieces = {planned.tensors[piece.entry].path[-1]: piece.rank for piece in planned.pieces}
    assert pieces["running_mean"] == base
    assert set(pieces) == set(torch.nn.BatchNorm1d(2).state_dict())


@pytest.mark.parametrize("name", ["weight", "num_batches_tracked"])
def test_other_tensors_may_not_differ_between_ranks_when_another_number_of_ranks_loads(
    name: str,
) -> None:
    prepare = in_place({"norm": torch.nn.BatchNorm1d(2)}, ())
    ranks = {rank: normalization(**{name: rank}) for rank in range(2)}
    with pytest.raises(ConfigurationError, match=rf"Each rank saved another tensor norm\.{name}"):
        restoring(prepare, LoadRequest(ranks, 0, moved=True, complete=True, size=2))
