"""How micro-batches are dealt to replicas, and what a program without the right launcher is told."""

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ConfigurationError

torch = pytest.importorskip("torch")

from dlrover.training.replicas.replicas import BUCKET_BYTES, Replicas, _buckets, _Modes, deal  # noqa: E402

pytestmark = [pytest.mark.torch]


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(st.integers(0, 50), unique=True), st.sets(st.integers(0, 20), min_size=1))
def test_each_micro_batch_goes_to_one_rank_and_ranks_differ_by_one(numbers, ranks):
    parts = [deal(numbers, sorted(ranks), rank) for rank in sorted(ranks)]
    assert sorted(number for part in parts for number in part) == sorted(numbers)
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1


def test_gradients_are_added_up_in_buckets_of_one_type():
    half = torch.zeros(BUCKET_BYTES // 4, dtype=torch.bfloat16)
    whole = torch.zeros(BUCKET_BYTES // 8)
    found = _buckets([half, whole, half, whole, half])
    assert [[one.dtype for one in bucket] for bucket in found] == [
        [torch.bfloat16] * 2,
        [torch.float32] * 2,
        [torch.bfloat16],
    ]


def test_a_program_that_was_started_otherwise_is_told_how():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigurationError, match="dlrover-run --survive"):
        Replicas(model, optimizer, global_batch_size=8, micro_batch_size=2)
    with pytest.raises(ConfigurationError, match="micro_batch_size is 0"):
        Replicas(model, optimizer, global_batch_size=8, micro_batch_size=0)
    other = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    with pytest.raises(ConfigurationError, match="parameters that the model has not"):
        Replicas(model, optimizer, other, global_batch_size=8, micro_batch_size=2)


def test_a_rank_that_joins_takes_the_modes_of_modules():
    one, other = (torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)) for _ in "12")
    one[1].eval()
    one[0].bias.requires_grad_(False)
    _Modes(other).load_state_dict(_Modes(one).state_dict())
    assert [module.training for module in other.modules()] == [True, True, False]
    assert [p.requires_grad for p in other.parameters()] == [True, False, True, True]
