"""Where copies lie, and how fast they get there."""

import itertools
import math

import pytest
from hypothesis import given, strategies as st

from dlrover.checkpoint.engine import joining
from dlrover.checkpoint.engine.joining import holders, ring
from dlrover.checkpoint.machine.saves import Newest
from dlrover.checkpoint.saver.protocol import Peer, Replication
from dlrover.checkpoint.saver.replicas import TokenBucket
from dlrover.checkpoint.storage.formats import FORMAT
from dlrover.errors import ConfigurationError

HOST = "127.0.0.1"


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


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"replicas": -1}, "replicas is -1; it must be 0 or more"),
        ({"bandwidth": 0.0}, "replica_bandwidth is 0.0; it must be more than 0 bytes per second"),
        ({"bandwidth": float("nan")}, "replica_bandwidth is nan"),
    ],
)
def test_wrong_wishes_are_refused_with_a_sentence(wishes, words):
    with pytest.raises(ConfigurationError, match=words):
        joining.Wishes(**wishes)


def facts(saver: int, session: int, token: bytes, peer: Peer | None) -> joining._Facts:
    return joining._Facts(FORMAT, saver, session, token, Newest(), peer, b"")


def test_nodes_are_numbered_by_their_lowest_rank_and_get_the_token_of_the_first():
    peers = {saver: Peer(HOST, 1000 + saver) for saver in (5, 3, 4)}
    every = [
        facts(saver, rank, bytes([rank]), peers[saver])
        for rank, saver in enumerate([5, 5, 3, 3, 4, 4])
    ]
    wishes = joining.Wishes(replicas=1, bandwidth=7.0)
    found = {saver: joining._replication(every, wishes, saver, "", "") for saver in peers}
    assert {saver: plan.peers for saver, plan in found.items()} == {
        5: (peers[3],), 3: (peers[4],), 4: (peers[5],)
    }  # fmt: skip
    assert found[3] == Replication(b"\0", peers[3], (peers[4],), 7.0)
    assert joining._replication(every[:2], wishes, 5, "", "") is None, "there is no other node"


def test_a_node_that_cannot_be_reached_gets_no_replicas():
    every = [
        facts(1, 0, b"", Peer(HOST, 1)),
        facts(2, 0, b"", None),
    ]
    assert joining._replication(every, joining.Wishes(replicas=1), 1, "", "").peers == ()
    assert joining._replication(every, joining.Wishes(replicas=1), 2, "", "") is None


def test_the_own_address_is_of_the_loopback_only_where_the_others_are():
    assert joining._own_address("127.0.0.1") == "127.0.0.1"
    assert joining._own_address("localhost") in ("127.0.0.1", "::1")
    assert joining._own_address("no such host.") != ""
