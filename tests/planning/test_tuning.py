"""Settings from measured numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ConfigurationError
from dlrover.planning.tuning import Memory, ReaderChoice, Window, micro_batch
from dlrover.training.batch import learning_rate_factor

MIB = 2**20


def window(count: int, reading: float, training: float, *, parallel: int = 1000) -> Window:
    """What a loader with ``count`` processes does on a machine that reads ``parallel`` batches at once."""
    if count == 0:
        return Window(20 * reading, 20 * (reading + training), 20)
    batch = max(training, reading / min(count, parallel))
    return Window(20 * (batch - training), 20 * batch, 20)


def test_as_many_processes_as_reading_needs() -> None:
    readers = ReaderChoice(0, most=32)
    choice = readers.handle(window(0, 0.08, 0.02))
    assert choice.value == 4
    assert choice.reason == (
        "the training waits for data in 80% of the time: a batch takes 80 ms to read, and 20 ms to train on"
    )
    choice = readers.handle(window(4, 0.08, 0.02))
    assert choice == (4, "the training waits for data in 0% of the time, and 5% is accepted")


def test_far_too_few_grow_in_steps() -> None:
    readers = ReaderChoice(1, most=64)
    found = [readers.handle(window(readers.count, 1.0, 0.03)).value for _ in range(4)]
    assert found == [4, 16, 34, 34]


def test_processes_that_are_no_help_are_taken_back() -> None:
    readers = ReaderChoice(1, most=32)
    assert readers.handle(window(1, 0.1, 0.05, parallel=1)).value == 2
    choice = readers.handle(window(2, 0.1, 0.05, parallel=1))
    assert choice == (1, "a batch takes 100 ms with 2, and took 100 ms with 1")
    choice = readers.handle(window(1, 0.1, 0.05, parallel=1))
    assert choice.value == 1
    assert choice.reason.endswith("more processes were no faster")


def test_no_more_than_there_may_be() -> None:
    readers = ReaderChoice(2, most=3)
    assert readers.handle(window(2, 1.0, 0.01)).value == 3
    choice = readers.handle(window(3, 1.0, 0.01))
    assert choice.value == 3
    assert choice.reason.endswith("3 processes is the most here")


@settings(max_examples=60)
@given(
    st.integers(0, 8),
    st.integers(1, 64),
    st.floats(1e-4, 2),
    st.floats(1e-4, 2),
    st.integers(1, 70),
)
def test_the_number_comes_to_rest_and_is_no_slower(
    first, most, reading, training, parallel
) -> None:
    most = max(most, first)
    readers = ReaderChoice(first, most)
    found = [
        readers.handle(window(readers.count, reading, training, parallel=parallel)).value
        for _ in range(12)
    ]
    assert all(0 <= count <= most for count in found)
    assert len(set(found[-4:])) == 1
    last, begun = (window(n, reading, training, parallel=parallel) for n in (found[-1], first))
    assert last.elapsed <= begun.elapsed * (1 + 1e-9)


def test_micro_batches_up_to_the_memory() -> None:
    first = Memory({8: 1800 * MIB}, 1000 * MIB, 10_000 * MIB)
    choice = micro_batch(8, 128, first, "cuda")
    assert choice == (16, "a sample takes 100.0 MiB, and 9,000.0 MiB can be used")
    # Two sizes tell that a sample takes 50 MiB, and what is there without any 1,400.
    second = Memory({8: 1800 * MIB, 16: 2200 * MIB}, 1000 * MIB, 4000 * MIB)
    assert micro_batch(16, 128, second, "cuda").value == 32
    assert micro_batch(16, 20, second, "cuda").value == 20
    third = Memory({16: 2200 * MIB, 32: 3000 * MIB}, 1000 * MIB, 4000 * MIB)
    assert micro_batch(32, 128, third, "cuda").value == 44
    assert (
        micro_batch(42, 128, Memory({16: 2200 * MIB, 42: 3500 * MIB}, 0, 4000 * MIB), "cuda").value
        == 42
    )


def test_micro_batches_that_are_too_large_shrink() -> None:
    memory = Memory({8: 1800 * MIB}, 1000 * MIB, 1600 * MIB)
    assert micro_batch(8, 64, memory, "cuda").value == 4
    assert micro_batch(8, 64, memory._replace(base=1790 * MIB), "cuda").value == 1


@pytest.mark.parametrize(
    ("now", "most", "memory", "reason"),
    [
        (8, 64, None, "the memory of activations cannot be measured on cpu"),
        (64, 64, Memory({64: 9}, 1, 99), "64 samples are all of this rank's part"),
        (8, 64, Memory({8: 100, 4: 100}, 1, 999), "does not grow with the micro-batch"),
    ],
)
def test_what_keeps_a_micro_batch_as_it_is(now, most, memory, reason) -> None:
    choice = micro_batch(now, most, memory, "cpu")
    assert choice.value == now
    assert reason in choice.reason


def test_rules_for_the_learning_rate() -> None:
    assert learning_rate_factor("none", 64, None) == 1
    assert learning_rate_factor("linear", 64, 16) == 4
    assert learning_rate_factor("sqrt", 64, 16) == 2
    for rule, reference, message in (
        ("cube", 1, "must be 'none', 'linear' or 'sqrt'"),
        ("linear", None, "needs reference_batch_size"),
        ("sqrt", 0, "reference_batch_size is 0"),
        ("none", 16, "has no effect without learning_rate_rule"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            learning_rate_factor(rule, 64, reference)
