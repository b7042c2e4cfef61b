"""Hot servers, uneven servers, slow workers."""

import pytest
from hypothesis import given, strategies as st

from dlrover.errors import ConfigurationError
from dlrover.planning.balance import ServerLoad, advise_servers, split_batch


def load(name, used, cpu=8.0):
    return ServerLoad(name, cpu, [used] * 3)


def test_one_hot_server_moves_to_a_larger_node():
    advice = advise_servers([load("ps-0", 7.6), load("ps-1", 3.0)], most_cpu=32)
    assert advice.migrate == {"ps-0": 10}
    assert not advice.more
    assert "ps-0 (95% of its cores)" in advice.reason


def test_a_single_peak_is_not_heat():
    peak = ServerLoad("ps-0", 8.0, [3.0, 7.9, 3.1])
    assert not advise_servers([peak, load("ps-1", 3.0)], most_cpu=32).migrate


def test_all_hot_asks_for_more_servers():
    advice = advise_servers([load("ps-0", 7.6), load("ps-1", 7.0)], most_cpu=32)
    assert advice.more
    assert not advice.migrate


def test_a_hot_server_on_the_largest_node_asks_for_more_servers():
    advice = advise_servers([load("ps-0", 31.0, 32.0), load("ps-1", 3.0)], most_cpu=32)
    assert advice.more
    assert not advice.migrate


def test_few_samples_say_nothing():
    assert "enough samples" in advise_servers([ServerLoad("ps-0", 8.0, [8.0])], 32).reason


@given(
    st.integers(1, 4),
    st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    st.integers(0, 200),
)
def test_shares_are_whole_and_no_single_move_makes_the_step_shorter(least, seconds, extra):
    times = {f"w{i}": s for i, s in enumerate(seconds)}
    batch = least * len(times) + extra
    split = split_batch(batch, times, least)
    assert sum(split.shares.values()) == batch
    assert min(split.shares.values()) >= least
    if split.gain == 0:
        return
    step = max(split.shares[n] * times[n] for n in times)
    slowest = max(times, key=lambda n: split.shares[n] * times[n])
    for other, each in times.items():
        if other != slowest and split.shares[slowest] > least:
            assert (split.shares[other] + 1) * each >= step * (1 - 1e-9)


def test_the_slow_worker_takes_less():
    split = split_batch(400, {"w0": 1.0, "w1": 1.0, "w2": 1.0, "w3": 2.0})
    assert split.shares["w3"] == 57
    assert sorted(split.shares.values()) == [57, 114, 114, 115]
    assert split.gain == pytest.approx(1 - 115 / 200, abs=0.01)
    assert "w3 is the slowest and takes 57 of 400 samples instead of 100" in split.reason


def test_even_workers_are_left_alone():
    split = split_batch(400, {"w0": 1.0, "w1": 1.02})
    assert split.shares == {"w0": 200, "w1": 200}
    assert split.gain == 0


def test_what_cannot_be_split():
    with pytest.raises(ConfigurationError, match="batch is 1"):
        split_batch(1, {"a": 1.0, "b": 1.0})
    with pytest.raises(ConfigurationError, match="seconds_per_sample of a is 0"):
        split_batch(4, {"a": 0.0})
    with pytest.raises(ConfigurationError, match="seconds_per_sample is empty"):
        split_batch(4, {})
