"""Which nodes form a world, and when."""

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.master.machine.rendezvous import Rendezvous
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.node import Size
from dlrover.spec.world import Offer, World

LIMITS = Limits(join_timeout=600.0, last_call_timeout=30.0)


def rendezvous(minimum: int, maximum: int, unit: int = 1) -> Rendezvous:
    spec = JobSpec(
        name="job",
        min_nodes=minimum,
        max_nodes=maximum,
        node_unit=unit,
        shutdown_timeout=20.0,
        limits=LIMITS,
    )
    return Rendezvous(spec)


def opened(
    minimum: int, maximum: int, *awaited: int, fixed: bool = False, unit: int = 1
) -> Rendezvous:
    """A round that was opened at time 0."""
    rdzv = rendezvous(minimum, maximum, unit)
    rdzv.open(awaited, fixed=fixed, now=0.0)
    return rdzv


def offer(nproc: int = 2, port: int = 29400) -> Offer:
    return Offer(nproc, "10.0.0.1", port)


def join(rdzv: Rendezvous, *nodes: int, now: float = 0.0) -> None:
    for node in nodes:
        rdzv.join(node, offer(), now)
        rdzv.validate()


# ---- when a round completes


def test_it_completes_at_once_when_the_maximum_has_joined():
    rdzv = opened(2, 3, 7, 8, 9, 10, fixed=True)
    join(rdzv, 7, 8)
    assert not rdzv.ready(1.0)
    join(rdzv, 9)
    assert rdzv.ready(1.0)
    assert rdzv.missing == {10}
    rdzv.complete({}, 0)
    rdzv.validate()
    assert rdzv.missing == set()


def test_a_fixed_set_completes_at_once_when_all_of_it_has_joined():
    rdzv = opened(1, 9, 1, 2, 3, fixed=True)
    join(rdzv, 1, 2)
    assert not rdzv.ready(1.0)
    join(rdzv, 3)
    assert rdzv.ready(1.0)


def test_a_fixed_set_completes_without_the_ones_that_are_dropped():
    rdzv = opened(1, 9, 1, 2, fixed=True)
    join(rdzv, 1)
    rdzv.drop(2)
    assert rdzv.ready(1.0)


def test_unknown_arrivals_get_a_quiet_time_after_the_latest_one():
    rdzv = opened(1, 9)
    assert rdzv.deadline() == 600.0
    join(rdzv, 1, now=10.0)
    assert rdzv.deadline() == 40.0
    join(rdzv, 2, now=35.0)
    assert (rdzv.ready(64.9), rdzv.deadline()) == (False, 65.0)
    assert rdzv.ready(65.0)


def test_survivors_may_take_their_shutdown_time_on_top_of_the_quiet_time():
    rdzv = opened(1, 9, 1, 2, fixed=True)
    join(rdzv, 1, now=10.0)
    assert rdzv.deadline() == 10.0 + 30.0 + 20.0
    assert rdzv.ready(60.0)


def test_saying_it_again_does_not_prolong_the_quiet_time():
    rdzv = opened(1, 9)
    assert rdzv.join(1, offer(), 10.0)
    assert not rdzv.join(1, offer(port=29401), 35.0)
    assert rdzv.deadline() == 40.0
    assert rdzv.offers[1].store_port == 29401


def test_below_the_minimum_it_expires_after_the_join_timeout():
    rdzv = opened(2, 3)
    join(rdzv, 1, now=599.0)
    assert (rdzv.expired(599.9), rdzv.deadline()) == (False, 600.0)
    assert rdzv.expired(600.0)
    assert not rdzv.ready(600.0)
    join(rdzv, 2, now=599.9)
    assert not rdzv.expired(600.0)


def test_a_world_takes_a_multiple_of_the_unit():
    rdzv = rendezvous(2, 7, unit=2)
    usable = [rdzv.usable(Size(count)).workers for count in range(9)]
    assert usable == [0, 0, 2, 2, 4, 4, 6, 6, 6]
    assert rendezvous(3, 4, unit=2).usable(Size(3)) == Size(0)


def test_the_masters_absence_counts_against_no_time_limit():
    rdzv = opened(2, 3)
    join(rdzv, 1, now=1.0)
    rdzv.resume(1000.0)
    assert not rdzv.expired(1000.0)
    assert rdzv.deadline() == 1600.0
    join(rdzv, 2, now=2.0)
    assert (rdzv.ready(1000.0), rdzv.deadline()) == (False, 1030.0)


def test_time_limits_begin_when_the_round_opens():
    rdzv = rendezvous(1, 3)
    join(rdzv, 1, now=10.0)
    rdzv.open([], fixed=False, now=100.0)
    assert (rdzv.ready(129.9), rdzv.deadline()) == (False, 130.0)
    rdzv.drop(1)
    assert rdzv.deadline() == 700.0


def test_a_set_that_is_complete_and_too_small_waits_for_others():
    rdzv = opened(2, 9, 1, fixed=True)
    join(rdzv, 1)
    assert not rdzv.ready(599.0)


def test_between_rounds_nothing_is_due():
    rdzv = opened(1, 1, 1, 2, fixed=True)
    join(rdzv, 1)
    rdzv.complete({}, 0)
    join(rdzv, 2)
    assert rdzv.missing == set()
    assert (rdzv.ready(9e9), rdzv.expired(9e9), rdzv.deadline()) == (False, False, None)
    rdzv.drop(2)
    assert not rdzv.expired(9e9)


# ---- who is in, and where


def test_an_offer_whose_node_lost_its_connection_is_awaited_again():
    rdzv = opened(1, 3, 1, 2, fixed=True)
    join(rdzv, 1)
    rdzv.withdraw(1)
    rdzv.validate()
    assert (rdzv.offers, rdzv.missing) == ({}, {1, 2})
    join(rdzv, 1, 2)
    assert rdzv.ready(0.0)


def test_between_rounds_a_withdrawn_offer_is_awaited_by_nobody():
    rdzv = rendezvous(1, 3)
    join(rdzv, 1)
    rdzv.withdraw(1)
    assert (rdzv.offers, rdzv.missing) == ({}, set())


def test_offers_made_before_a_round_opens_are_in():
    rdzv = rendezvous(1, 3)
    join(rdzv, 5)
    assert rdzv.next_round == 1
    rdzv.open([4, 5], fixed=True, now=0.0)
    assert (rdzv.round, rdzv.next_round, rdzv.last_round) == (1, 1, 0)
    assert rdzv.missing == {4}


def test_nodes_that_are_expected_later_are_waited_for():
    rdzv = opened(1, 9, 1, fixed=True)
    rdzv.expect(2)
    join(rdzv, 1)
    assert not rdzv.ready(1.0)
    rdzv.expect(1)
    assert rdzv.missing == {2}


def test_ranks_are_blocks_in_the_order_of_wanted_ranks_then_of_age():
    rdzv = opened(1, 4)
    for node, nproc in [(4, 1), (3, 2), (2, 3), (1, 4)]:
        rdzv.join(node, Offer(nproc, f"host{node}", 29400 + node), 0.0)
    worlds = rdzv.complete({1: -1, 2: -1, 3: 5, 4: 0}, restart_count=7)

    def world(node_rank: int, first_rank: int) -> World:
        return World(1, 7, node_rank, 4, first_rank, 10, "host4", 29404)

    assert rdzv.members == (4, 3, 1, 2)
    assert worlds == {4: world(0, 0), 3: world(1, 1), 1: world(2, 3), 2: world(3, 7)}
    assert (rdzv.collecting, rdzv.offers, rdzv.last_round, rdzv.next_round) == (False, {}, 1, 2)


def test_nodes_beyond_the_usable_number_keep_their_offers():
    rdzv = opened(2, 4, unit=2)
    join(rdzv, 1, 2, 3)
    assert sorted(rdzv.complete({}, 0)) == [1, 2]
    rdzv.validate()
    assert list(rdzv.offers) == [3]


# ---- any order

STEPS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 6), st.integers(0, 6)), min_size=5, max_size=50
)


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 3), STEPS)
def test_any_order_keeps_the_invariants_and_every_wait_ends_at_its_deadline(
    minimum, extra, unit, steps
):
    rdzv, now = rendezvous(minimum, minimum + extra, unit), 0.0
    for kind, node, amount in steps:
        now += amount * amount
        act(rdzv, kind, node, amount, now)
        rdzv.validate()
        deadline = rdzv.deadline()
        assert (deadline is not None) == rdzv.collecting
        for time in [] if deadline is None else [deadline, max(deadline, now)]:
            assert rdzv.ready(time) or rdzv.expired(time)
        if rdzv.ready(now):
            check_worlds(rdzv, rdzv.complete({node: amount}, 0))


def act(rdzv: Rendezvous, kind: int, node: int, amount: int, now: float) -> None:
    if kind <= 2:
        rdzv.join(node, offer(nproc=1 + amount), now)
    elif kind == 7 and not rdzv.collecting:
        rdzv.open(range(amount), fixed=node % 2 == 0, now=now)
    else:
        {
            3: lambda: rdzv.drop(node),
            4: lambda: rdzv.withdraw(node),
            5: lambda: rdzv.expect(node),
            6: lambda: rdzv.resume(now),
        }.get(kind, lambda: None)()


def check_worlds(rdzv: Rendezvous, worlds: dict[int, World]) -> None:
    rdzv.validate()
    assert tuple(worlds) == rdzv.members
    assert len(worlds) == rdzv.usable(Size(len(worlds) + len(rdzv.offers))).workers > 0
    firsts = [world.first_rank for world in worlds.values()]
    assert firsts[0] == 0
    assert firsts == sorted(set(firsts))
    assert {(w.round, w.node_count, w.world_size) for w in worlds.values()} == {
        (rdzv.round, len(worlds), next(iter(worlds.values())).world_size)
    }
    assert [world.node_rank for world in worlds.values()] == list(range(len(worlds)))
