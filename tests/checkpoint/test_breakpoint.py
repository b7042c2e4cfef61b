"""How the savers of a world that ended agree on what is stored."""

import pytest

from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver.breakpoint import (
    Ballot,
    StoreDecision,
    Vote,
    complete,
    decide,
    remove_votes,
)
from dlrover.checkpoint.storage.stores import open_store


def saved(step):
    return SaveId(0, step, step, 7) if step >= 0 else None


def vote(saver, ranks, held, stored=-1):
    saves = {rank: tuple(map(saved, steps)) for rank, steps in held.items()}
    return Vote(saver, ranks, saves, saved(stored))


def test_the_newest_step_that_all_ranks_have_is_stored_by_their_own_nodes():
    votes = [
        vote(2, (0, 1), {0: (4, 5), 1: (4, 5)}),
        vote(1, (2, 3), {2: (5, 4), 3: (4, 3), 0: (4,)}),
    ]
    assert complete(votes, 4)
    assert decide(votes, 4) == StoreDecision(saved(4), {1: (2, 3), 2: (0, 1)})
    assert decide(votes[::-1], 4) == decide(votes, 4)


def test_a_lost_node_is_replaced_by_one_with_its_replicas():
    votes = [vote(1, (0,), {0: (5,), 1: (5,)}), vote(3, (2,), {2: (5,), 1: (5,)})]
    assert not complete(votes, 3)
    assert decide(votes, 3) == StoreDecision(saved(5), {1: (0, 1), 3: (2,)})


@pytest.mark.parametrize(
    ("votes", "step"),
    [
        ([], -1),
        ([vote(1, (0,), {0: ()}), vote(2, (1,), {1: (3,)})], -1),
        ([vote(1, (0,), {0: (3, 4)}), vote(2, (1,), {1: (5, 6)})], -1),
        ([vote(1, (0,), {0: (5,)}, stored=4), vote(2, (1,), {1: (5,)}, stored=5)], 5),
    ],
)
def test_nothing_is_stored_when_no_step_is_common_or_it_is_stored(votes, step):
    assert decide(votes, 2) == StoreDecision(saved(step), {})


def test_the_last_one_removes_the_votes_and_what_was_not_completed(tmp_path):
    ballots = [Ballot(open_store(tmp_path), 7) for _ in range(2)]
    (tmp_path / ".step-4.0000000000000007-4").mkdir()
    (tmp_path / ".step-4.0000000000000008-4").mkdir()
    for number, ballot in enumerate(ballots):
        ballot.cast(vote(number, (number,), {number: (4,)}))
    assert [v.saver for v in ballots[0].votes()] == [0, 1]
    ballots[0].close(0)
    assert [v.saver for v in ballots[1].votes()] == [0, 1], "a vote counts as long as it is needed"
    ballots[1].close(1)
    assert [path.name for path in tmp_path.iterdir()] == [".step-4.0000000000000008-4"]


def test_a_vote_that_cannot_be_read_does_not_count(tmp_path):
    ballot = Ballot(open_store(tmp_path), 7)
    ballot.cast(vote(1, (0,), {0: (4,)}))
    (tmp_path / ".breakpoint.0000000000000007" / "2.vote").write_bytes(b"{")
    assert [v.saver for v in ballot.votes()] == [1]


def test_votes_that_killed_savers_have_left_are_removed(tmp_path):
    for session in (7, 8):
        Ballot(open_store(tmp_path), session).cast(vote(1, (0,), {0: (4,)}))
    remove_votes(open_store(tmp_path), 8)
    assert [path.name for path in tmp_path.iterdir()] == [".breakpoint.0000000000000008"]
