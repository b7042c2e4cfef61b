"""Strategies for worlds of any size, and the place in the data that all of them share."""

import itertools
from types import SimpleNamespace

import msgspec
import pytest
import torch

from dlrover.accelerate import auto_accelerate, choosing, elastic, strategies, world
from dlrover.accelerate.anatomy import analyse
from dlrover.accelerate.loading import dataloader
from dlrover.errors import InfrastructureError
from tests.accelerate.scripts.models import HEADS, HIDDEN, LAYERS, SEQUENCE, VOCAB, Plain


def anatomy():
    model = Plain()
    model.config = SimpleNamespace(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_hidden_layers=LAYERS, vocab_size=VOCAB,
        intermediate_size=3 * HIDDEN,
    )  # fmt: skip
    return analyse(model)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8, 11, 16])
def test_each_size_has_a_strategy(ranks):
    """Also sizes that divide neither the batch nor the model, and those with more ranks than samples."""
    task = choosing.StrategyTask(anatomy(), SEQUENCE, 8)
    found = list(choosing.candidates(task, choosing.cluster_of("h100-80", ranks, 4)))
    assert found
    assert {one.size for one, _ in found} == {ranks}
    degrees = [(one.tp, one.pp, one.cp, one.ep) for one, _ in found]
    assert len(degrees) == len(set(degrees)), "one for each choice of degrees"


def test_without_a_job_each_rank_plans(monkeypatch):
    plan = {2: [(choosing.Strategy(dp_shard=2), 1.0)], 3: []}
    assert elastic.agreed("k", lambda n: iter(plan[n]), 2, 1, 0) == choosing.Strategy(dp_shard=2)
    assert elastic.agreed("k", lambda n: iter(plan[n]), 3, 1, 0) is None


def test_ranks_with_different_strategies_do_not_wait_for_each_other(monkeypatch):
    task = choosing.StrategyTask(anatomy(), SEQUENCE, 8)
    (one, _), (other, _) = itertools.islice(
        choosing.candidates(task, choosing.cluster_of("h100-80", 8, 4)), 2
    )
    said = []

    def all_reduce(tensor, _op):
        said.append(tensor.clone())
        tensor.copy_(torch.stack(said).max(0).values)

    monkeypatch.setattr(world, "size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    world.check_same(one, torch.device("cpu"))
    world.check_same(strategies.load(msgspec.json.encode(one), 8), torch.device("cpu"))
    with pytest.raises(InfrastructureError, match="different strategies"):
        world.check_same(other, torch.device("cpu"))


def samples(loader):
    return [sample for batch in loader for sample in batch.tolist()]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_continues_where_the_training_was_on_any_number_of_ranks(shuffle):
    arguments = {"batch_size": 6, "shuffle": shuffle}
    data = torch.arange(24)
    before = [dataloader(data, arguments, rank=rank, ranks=2) for rank in range(2)]
    whole = [samples(loader) for loader in before]
    assert [loader.state_dict() for loader in before] == [{"epoch": 1, "batches": 0}] * 2
    first = [dataloader(data, arguments, rank=rank, ranks=2) for rank in range(2)]
    taken = [list(itertools.islice(loader, 2)) for loader in first]
    state = first[0].state_dict()
    assert state == first[1].state_dict() == {"epoch": 0, "batches": 2}
    rest = [dataloader(data, arguments, rank=rank, ranks=3) for rank in range(3)]
    for loader in rest:
        loader.load_state_dict(state)
    had = {sample for part in taken for batch in part for sample in batch.tolist()}
    left = [sample for loader in rest for sample in samples(loader)]
    assert sorted([*had, *left]) == list(range(24))
    assert len(had) == 12
    again = [dataloader(data, arguments, rank=rank, ranks=2) for rank in range(2)]
    assert [samples(loader) for loader in again] == whole, "the same order in each run"
    second = [samples(loader) for loader in again]
    continued = dataloader(data, arguments, rank=0, ranks=2)
    continued.load_state_dict({"epoch": 1, "batches": 0})
    assert samples(continued) == second[0]


def test_the_order_of_excluded_methods_makes_no_other_ladder(monkeypatch) -> None:
    """That of a set differs from process to process; each rank would ask the master for a ladder of its own."""
    keys = []

    def agreed(key, plan, *_):
        keys.append(key)
        return next(plan(1))[0]

    monkeypatch.setattr(elastic, "agreed", agreed)
    for excluded in (["fsdp", "native_dynamo"], ["native_dynamo", "fsdp"]):
        for included in (None, ["zero1", "amp_native"], ["amp_native", "zero1"]):
            auto_accelerate(
                Plain(), sample_batch=torch.zeros(1, SEQUENCE), batch_size=8, excluded=excluded,
                included=included,
            )  # fmt: skip
    assert len(set(keys)) == 2
