"""Where copies lie, and how fast they get there."""

import itertools
import math

import pytest
from hypothesis import given, strategies as st

from dlrover.checkpoint.bucket import TokenBucket
from dlrover.checkpoint.placement import holders, ring


def survival(placement, nodes, copies, lost):
    """The share of all sets of lost nodes after which each node's memory is somewhere."""
    places = [{node, *placement(node, nodes, copies)} for node in range(nodes)]
    sets = [set(some) for some in itertools.combinations(range(nodes), lost)]
    return sum(all(place - some for place in places) for some in sets) / math.comb(nodes, lost)


@pytest.mark.parametrize(
    ("nodes", "copies", "lost", "groups", "in_a_ring"),
    [
        (16, 2, 1, 1.0, 1.0),
        (16, 2, 2, 0.9333, 0.8667),
        (16, 2, 3, 0.8000, 0.6286),
        (16, 2, 4, 0.6154, 0.3626),
        (12, 3, 2, 1.0, 1.0),
        (12, 3, 3, 0.9818, 0.9455),
    ],
)
def test_the_published_probabilities(nodes, copies, lost, groups, in_a_ring):
    assert survival(holders, nodes, copies, lost) == pytest.approx(groups, abs=5e-5)
    assert survival(ring, nodes, copies, lost) == pytest.approx(in_a_ring, abs=5e-5)


def test_the_rest_is_a_ring_with_the_last_group():
    assert [holders(node, 7, 2) for node in range(7)] == [(1,), (0,), (3,), (2,), (5,), (6,), (4,)]


@given(st.integers(1, 40), st.integers(0, 6))
def test_every_node_has_as_many_copies_and_holds_as_many(nodes, copies):
    wanted = max(0, min(copies, nodes) - 1)
    placed = [holders(node, nodes, copies) for node in range(nodes)]
    for node, others in enumerate(placed):
        assert len(set(others)) == len(others) == wanted
        assert node not in others
    held = [sum(node in others for others in placed) for node in range(nodes)]
    assert held == [wanted] * nodes
    assert all(0 <= other < nodes for others in placed for other in others)


@given(
    st.floats(1.0, 1e10),
    st.floats(0.0, 1e8),
    st.lists(st.tuples(st.integers(1, 10**7), st.floats(0.0, 10.0)), max_size=30),
)
def test_no_more_is_sent_than_the_rate_allows(rate, burst, takes):
    bucket = TokenBucket(rate, burst)
    now, sent = 100.0, 0
    for nbytes, idle in takes:
        now += idle
        now += bucket.take(nbytes, now)
        sent += nbytes
        assert sent <= (burst + rate * (now - 100.0)) * (1 + 1e-6) + 1


def test_a_bucket_lets_a_burst_pass_and_fills_again():
    bucket = TokenBucket(100.0, 50.0)
    assert bucket.take(50, 0.0) == 0.0
    assert bucket.take(100, 0.0) == 1.0
    assert bucket.take(50, 1.0) == 0.5
    assert bucket.take(50, 100.0) == 0.0, "no more than the burst is saved up"
    assert bucket.take(50, 100.0) == 0.5
