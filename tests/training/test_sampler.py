"""The order of the samples, and where in it the training is, on any number of ranks."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings, strategies as st  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

from dlrover.checkpoint import Checkpointer  # noqa: E402
from dlrover.errors import ConfigurationError  # noqa: E402
from dlrover.training.sampler import ElasticDistributedSampler, MicroBatches  # noqa: E402

pytestmark = pytest.mark.torch


def samplers(samples: int, replicas: int, state=None, **options) -> list[ElasticDistributedSampler]:
    """Those of all ranks, at a saved position."""
    made = [
        ElasticDistributedSampler(range(samples), replicas, rank, **options)
        for rank in range(replicas)
    ]
    if state is not None:
        for sampler in made:
            sampler.load_state_dict(state)
    return made


@given(st.integers(1, 50), st.integers(1, 6), st.booleans(), st.booleans(), st.integers(0, 3))
def test_a_whole_epoch_is_that_of_pytorch(samples, replicas, shuffle, drop_last, epoch) -> None:
    for rank in range(replicas):
        theirs = DistributedSampler(range(samples), replicas, rank, shuffle, 7, drop_last)
        ours = ElasticDistributedSampler(range(samples), replicas, rank, shuffle, 7, drop_last)
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


phases = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=8
)
"""World size, steps, and how many micro-batches a loader has fetched ahead when the job ends."""


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(5, 16), st.none() | st.integers(1, 5), phases)
def test_every_sample_is_trained_on_once_per_epoch_whatever_the_worlds(
    samples, global_batch_size, micro_batch_size, phases
) -> None:
    seen: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    state = None
    for replicas, steps, ahead in [*phases, (2, 1000, 0)]:
        ranks, left = samplers(samples, replicas, state), steps
        for epoch in range(ranks[0].epoch, 2):
            for sampler in ranks:
                sampler.set_epoch(epoch)
            all_batches = [MicroBatches(r, global_batch_size, micro_batch_size) for r in ranks]
            iterators = [iter(batches) for batches in all_batches]
            while left and (size := all_batches[0].size_at(ranks[0].consumed)):
                for batches, iterator, sampler in zip(all_batches, iterators, ranks, strict=True):
                    for positions, weight in batches.deal(size):
                        indices = next(iterator)
                        assert len(indices) == len(positions)
                        seen[epoch].update(indices if weight else ())
                    sampler.record(size)
                left -= 1
            for iterator in iterators:
                for _ in range(ahead):
                    next(iterator, None)
            if not left:
                break
        states = [sampler.state_dict() for sampler in ranks]
        assert states.count(states[0]) == replicas
        state = states[0]
    assert seen[0] == seen[1] == Counter(range(samples))


@given(st.integers(12, 60), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.booleans())
def test_plain_batches_resume_too(samples, worlds, drop_last) -> None:
    seen: list[int] = []
    state, batch_size = None, 2
    for replicas in worlds:
        ranks = samplers(samples, replicas, state, drop_last=drop_last)
        parts = [[index for index, _ in zip(r, range(batch_size))] for r in ranks]  # noqa: B905
        seen += [index for one in zip(*parts, strict=True) for index in one]
        for sampler in ranks:
            sampler.record(replicas * batch_size)
        state = ranks[0].state_dict()
    whole = ElasticDistributedSampler(range(samples)).order().tolist()
    exact = min(len(seen), samples)
    assert seen[:exact] == whole[:exact]
    assert len(seen) - exact < max(worlds)
    assert not drop_last or len(seen) == exact
    assert state["consumed"] <= samples


def test_the_end_of_an_epoch_is_a_position_too() -> None:
    (sampler,) = samplers(10, 1)
    list(sampler)
    sampler.record(10)
    (resumed,) = samplers(10, 1, sampler.state_dict())
    assert (resumed.epoch, list(resumed)) == (0, [])
    resumed.set_epoch(1)
    assert sorted(resumed) == list(range(10))


def test_a_forgotten_set_epoch_is_an_error() -> None:
    (sampler,) = samplers(10, 1)
    assert len(list(sampler)) == 10
    sampler.record(10)
    with pytest.raises(ConfigurationError, match=r"^Epoch 0 is over; call set_epoch\(1\)"):
        list(sampler)


def test_a_position_that_nobody_counted_is_not_saved() -> None:
    (sampler,) = samplers(10, 1)
    assert sampler.state_dict()["consumed"] == 0
    next(iter(sampler))
    with pytest.raises(ConfigurationError, match=r"call sampler\.record\(samples\) after"):
        sampler.state_dict()
    sampler.record(1)
    assert sampler.state_dict()["consumed"] == 1


@pytest.mark.parametrize(
    ("samples", "options", "key"),
    [
        (11, {}, "samples 11"),
        (10, {"seed": 1}, "seed 1"),
        (10, {"shuffle": False}, "shuffle False"),
    ],
)
def test_a_position_in_other_data_is_refused(samples, options, key) -> None:
    state = samplers(10, 1)[0].state_dict()
    with pytest.raises(ConfigurationError, match=f"^The sampler has {key}, but the checkpoint has"):
        samplers(samples, 1, state, **options)


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^rank is 2; it must be from 0 to 1"):
        ElasticDistributedSampler(range(4), 2, 2)
    with pytest.raises(ConfigurationError, match=r"^dataset is a generator without a length"):
        ElasticDistributedSampler(i for i in range(4))
    with pytest.raises(ConfigurationError, match=r"^samples is -1; it must be 0 or more"):
        samplers(4, 1)[0].record(-1)


def test_the_length_of_micro_batches_is_that_of_an_epoch() -> None:
    for drop_last in (False, True):
        batches = MicroBatches(samplers(50, 3, drop_last=drop_last)[1], 16, 4)
        assert len(list(batches)) == len(batches)
        assert batches.steps == (3 if drop_last else 4)


@pytest.mark.slow
def test_a_position_in_a_flash_checkpoint(tmp_path) -> None:
    (sampler,) = samplers(100, 1)
    sampler.set_epoch(3)
    sampler.record(40)
    with contextlib.closing(Checkpointer(tmp_path / "out", linger=0)) as checkpointer:
        checkpointer.save(5, {"sampler": sampler}, to="storage")
        checkpointer.wait()
        other = samplers(100, 4)[2]
        assert checkpointer.load({"sampler": other}).step == 5
    assert other.state_dict() == sampler.state_dict()
    assert (other.epoch, other.consumed) == (3, 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "no state of a sampler here: .*missing required field `epoch`"),
        ({"epoch": -1}, r">= 0 - at `\$.epoch`"),
        ({"consumed": "7"}, r"got `str` - at `\$.consumed`"),
        ({"consumed": 11}, "consumed 11; it must be at most the 10 samples"),
        ({"seed": 8}, "has seed 0, but the checkpoint has 8"),
    ],
)
def test_a_position_that_is_none_is_refused(change, message) -> None:
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    state = {} if change is None else {**sampler.state_dict(), **change}
    with pytest.raises(ConfigurationError, match=message):
        sampler.load_state_dict(state)
    with pytest.raises(ConfigurationError, match="no state of a sampler"):
        sampler.load_state_dict(None)
    assert (sampler.epoch, sampler.consumed) == (0, 0)
