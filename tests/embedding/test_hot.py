"""A server that gets more than its share gives slots away: few, and not again and again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dlrover._native.tables import slots_of
from dlrover.embedding.machine.hot import GAIN, LEAST, HotServers, loads, relief
from dlrover.embedding.machine.placement import Placement
from dlrover.embedding.remote.holding import HeldSlots
from dlrover.spec.requests.placement import SLOTS, Leave, MoveSlots, OpenTable, SlotsUsed
from tests.embedding.servers import OPTIONS, LocalDirectory
from tests.embedding.test_placement import announce, fetch_all, started

RATIO, WINDOW = 1.3, 30.0
GOAL = 1.2


@st.composite
def measured(draw: st.DrawFn) -> tuple[list[int], list[float], int]:
    """Owners and rates of some slots, some of them much hotter than the others, and the number of servers."""
    count, servers = draw(st.integers(1, 30)), draw(st.integers(1, 5))
    rate = st.one_of(st.just(0), st.integers(1, 100), st.integers(1, 10_000))
    owners = draw(st.lists(st.integers(0, servers - 1), min_size=count, max_size=count))
    rates = draw(st.lists(rate.map(float), min_size=count, max_size=count))
    return owners, rates, servers


@settings(max_examples=60, deadline=None)
@given(measured())
def test_hot_servers_give_slots_until_they_are_not_or_none_fits(
    found: tuple[list[int], list[float], int],
) -> None:
    owners, rates, servers = found
    before = loads(owners, rates, range(servers))
    mean = sum(rates) / servers
    moves = relief(owners, rates, range(servers), RATIO)
    holders = [moves.get(slot, owner) for slot, owner in enumerate(owners)]
    after = loads(holders, rates, range(servers))
    room = GOAL * mean + 1e-6
    assert all(before[owners[slot]] > RATIO * mean for slot in moves), "others keep what they have"
    assert all(after[taker] <= room for taker in moves.values()), "who takes does not become hot"
    for server in range(servers):
        if before[server] <= RATIO * mean:
            assert after[server] >= before[server]
            continue
        left = [rates[slot] for slot, holder in enumerate(holders) if holder == server]
        gives = [slot for slot in moves if owners[slot] == server]
        assert not gives or before[server] - after[server] >= GAIN * mean - 1e-6
        assert (
            after[server] <= room
            or not gives
            or not any(0 < rate < room - min(after.values()) - 1e-5 for rate in left)
        ), "another one fits"
        assert max(after.values()) <= max(before.values())
        if server == max(before, key=before.__getitem__) and len(gives) > 1:
            needed, fits = before[server] - room, room - min(before.values()) - 1e-5
            own = [rates[slot] for slot, owner in enumerate(owners) if owner == server]
            assert not any(needed <= rate < fits for rate in own), "one slot would have done"


def test_the_fewest_slots_move() -> None:
    owners = [slot * 2 // SLOTS for slot in range(SLOTS)]
    rates = [1000.0 if slot in (5, 50, 300, 400, 500) else 1.0 for slot in range(SLOTS)]
    moves = relief(owners, rates, (0, 1), RATIO)
    assert len(moves) == 2
    assert set(moves) < {5, 50, 300, 400, 500}
    assert set(moves.values()) == {1}
    even = [2.0 if owner == 0 else 1.0 for owner in owners]
    assert len(relief(owners, even, (0, 1), RATIO)) == -((1.2 * 768 - 1024) // 2)


def test_a_slot_that_is_hotter_than_a_server_is_left_alone_on_one() -> None:
    owners = [slot * 2 // SLOTS for slot in range(SLOTS)]
    rates = [10_000.0 if slot == 7 else 1.0 for slot in range(SLOTS)]
    moves = relief(owners, rates, (0, 1), RATIO)
    assert 7 not in moves
    assert moves == {}, "the others of its server are not worth a move"
    rates = [900.0 if slot == 7 else 1.0 for slot in range(SLOTS)]
    moves = relief(owners, rates, (0, 1), RATIO)
    assert 7 not in moves
    assert len(moves) == -((1.2 * 961.5 - 1411) // 1)


class Measured:
    """A placement that reports come to, each server's every 5 seconds."""

    def __init__(self, servers: int, hot: dict[int, int]) -> None:
        self.placement, self.hot, self.now = started(servers), hot, 100.0
        self.machine = HotServers()
        self.moved: list[MoveSlots] = []

    def report(self, seconds: float, ratio: float = RATIO) -> None:
        for _ in range(int(seconds / 5)):
            self.now += 5
            for index, server in list(self.placement.servers.items()):
                keys = {
                    slot: 5 * self.hot.get(slot, 10)
                    for slot, owner in enumerate(self.placement.owners)
                    if owner == index
                }
                used = SlotsUsed(index, server.start, 5.0, keys)
                moves = self.machine.handle(used, self.placement, self.now, ratio, WINDOW)
                if moves is not None:
                    self.moved.append(moves)
                    self.placement.handle(moves)
                    self.placement.validate()


HOT = dict.fromkeys(range(0, 120, 12), 1000)
"""Ten hot slots, all of the first server."""


def test_slots_move_once_and_stay() -> None:
    job = Measured(2, HOT)
    job.report(WINDOW - 5)
    assert not job.moved, "a window has not gone by"
    job.report(100)
    (moves,) = job.moved
    assert moves.server == 0
    assert moves.ratio == pytest.approx((512 * 10 + 9900) / (512 * 10 + 4950), rel=0.02)
    assert moves.expected <= GOAL
    assert len(moves.moves) <= 5
    assert not job.placement.moves.keys() & {1, 2, 3}
    fetch_all(job.placement)
    job.report(100)
    assert len(job.moved) == 1


def test_no_slot_moves_before_all_are_heard_and_steady() -> None:
    quiet, off = Measured(2, HOT), Measured(2, HOT)
    quiet.hot = {slot: int(slot < 512) for slot in range(SLOTS)}
    quiet.report(100)
    assert not quiet.moved, f"fewer than {LEAST} keys a second are asked of a server"
    off.report(100, ratio=0)
    assert not off.moved
    job = Measured(2, HOT)
    job.report(20)
    job.placement.handle(announce(2, servers=3))
    job.report(2 * WINDOW)
    assert not job.moved, "slots move to the new server"
    fetch_all(job.placement)
    job.report(WINDOW - 5)
    assert not job.moved, "the window begins when they have"
    job.placement.handle(Leave(2, 1))
    fetch_all(job.placement)
    job.report(WINDOW - 5)
    assert not job.moved
    job.report(15)
    assert len(job.moved) == 1


def test_a_burst_of_which_one_server_has_reported_more_moves_nothing() -> None:
    """Reports do not come at once, so after each pause of the training some servers seem to be hot."""
    job = Measured(2, {})
    for _ in range(10):
        job.hot = dict.fromkeys(range(SLOTS // 2), 100)
        job.report(5)
        job.hot = dict.fromkeys(range(SLOTS), 100)
        job.report(15)
        job.hot = dict.fromkeys(range(SLOTS), 0)
        job.report(30)
    assert not job.moved


def test_a_restart_moves_nothing_back() -> None:
    job = Measured(2, HOT)
    job.report(2 * WINDOW)
    fetch_all(job.placement)
    owners = list(job.placement.owners)
    job.placement.handle(announce(1, start=2))
    assert job.placement.moves == {}
    assert job.placement.owners == owners


def test_moves_that_no_longer_fit_are_left_out() -> None:
    placement: Placement = started(3)
    first, last = placement.owners.index(0), placement.owners.index(2)
    placement.handle(Leave(2, 1))
    leaving = placement.moves[last]
    version = placement.version
    stale = MoveSlots(0, 2.0, 1.0, {first: 2, first + 1: 7, last: 1 - leaving})
    assert placement.handle(stale).version == version
    placement.validate()
    assert placement.moves[last] == leaving
    assert Placement().handle(stale).version == 0


def test_a_server_counts_the_keys_of_each_slot_once() -> None:
    directory, holding = LocalDirectory(), HeldSlots()
    directory.ask(announce(0, servers=1))
    holding.follow(directory.look(-1), 0)
    directory.ask(OpenTable("users", OPTIONS))
    holding.follow(directory.look(-1), 0)
    keys = np.arange(100, dtype=np.int64)
    for insert in (True, False):
        assert holding.rows(0, keys, insert=insert) is not None
    assert holding.push(0, 1, 1, keys[:40], np.ones((40, 4), np.float32))
    expected = np.bincount(slots_of(np.concatenate([keys, keys, keys[:40]])), minlength=SLOTS)
    used = holding.used()
    assert [used.get(slot, 0) for slot in range(SLOTS)] == expected.tolist()
    assert holding.used() == {}
