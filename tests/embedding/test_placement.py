"""Slots have one server each, whatever starts, ends and moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from dlrover._native import tables
from dlrover.embedding.machine.placement import Placement
from dlrover.errors import ProtocolError
from dlrover.spec.requests.placement import (
    SLOTS,
    Abandon,
    Announce,
    Distribute,
    Leave,
    LoadTables,
    LookPlacement,
    MoveSlots,
    OpenTable,
    PlacementRequest,
    SlotsFetched,
    SlotsRecovered,
    SlotsRefused,
    TablesStored,
)


def announce(server: int, start: int = 1, servers: int = 2) -> Announce:
    return Announce(server, start, "127.0.0.1", 1000 + 10 * server + start, servers)


def started(count: int) -> Placement:
    placement = Placement()
    for index in range(count):
        placement.handle(announce(index, servers=count))
        placement.validate()
    return placement


def fetch_all(placement: Placement) -> None:
    for index in sorted(set(placement.moves.values())):
        slots = tuple(slot for slot, target in placement.moves.items() if target == index)
        placement.handle(SlotsFetched(index, placement.servers[index].start, slots))
        placement.validate()


def counts(placement: Placement) -> Counter[int]:
    return Counter(placement.owners)


def test_a_placement_has_the_slots_of_a_table() -> None:
    assert tables.SLOTS == SLOTS


def test_slots_are_divided_once_all_servers_have_started() -> None:
    placement = Placement()
    assert placement.handle(announce(1)).owners == ()
    reply = placement.handle(announce(0))
    assert Counter(reply.owners) == {0: SLOTS // 2, 1: SLOTS // 2}
    assert all(server.ready for server in reply.servers.values())
    assert placement.handle(LookPlacement(reply.version)).owners == ()


def test_another_server_takes_as_few_slots_as_possible() -> None:
    placement = started(2)
    placement.handle(announce(2, servers=3))
    placement.validate()
    assert set(placement.moves.values()) == {2}
    assert len(placement.moves) == SLOTS // 3
    assert 2 not in placement.owners, "a slot stays with its server until the other has its rows"
    fetch_all(placement)
    assert sorted(counts(placement).values()) == [341, 341, 342]


def test_a_leaving_server_is_there_until_its_slots_have_moved() -> None:
    placement = started(3)
    placement.handle(Leave(1, 1))
    placement.validate()
    assert placement.servers[1].leaving
    fetch_all(placement)
    assert placement.servers.keys() == {0, 2}
    assert counts(placement) == {0: 512, 2: 512}
    placement.handle(Leave(2, 1))
    fetch_all(placement)
    with pytest.raises(ProtocolError, match="is the last one"):
        placement.handle(Leave(0, 1))


def test_a_server_whose_next_start_comes_while_it_leaves_keeps_its_slots() -> None:
    placement = started(3)
    placement.handle(Leave(1, 1))
    some = [slot for slot, target in placement.moves.items() if target == 0][:20]
    placement.handle(SlotsFetched(0, 1, tuple(some)))
    placement.handle(announce(1, start=2))
    placement.validate()
    assert set(placement.moves.values()) == {1}
    assert len(placement.moves) == 20
    fetch_all(placement)
    assert sorted(counts(placement).values()) == [341, 341, 342]


def test_a_server_that_comes_back_is_not_ready_before_it_has_its_rows() -> None:
    placement = started(2)
    reply = placement.handle(announce(1, start=2))
    assert not reply.servers[1].ready
    assert reply.servers[1].previous == ("127.0.0.1", 1011)
    assert reply.servers[0].ready
    placement.handle(announce(1, start=3))
    assert placement.servers[1].previous == ("127.0.0.1", 1011), (
        "the second start has never held rows"
    )
    with pytest.raises(ProtocolError, match="Start 2 of embedding server 1 is over"):
        placement.handle(SlotsRecovered(1, 2))
    with pytest.raises(ProtocolError, match="has start 3; start 2 is over"):
        placement.handle(announce(1, start=2))
    reply = placement.handle(SlotsRecovered(1, 3))
    assert reply.servers[1].ready
    assert reply.servers[1].previous is None


def test_repeated_requests_change_nothing() -> None:
    placement = started(2)
    placement.handle(OpenTable("users", '{"dim": 8}'))
    placement.handle(TablesStored(7, "a", "/out"))
    version = placement.version
    for request in (
        announce(0),
        SlotsRecovered(0, 1),
        OpenTable("users", '{"dim": 8}'),
        TablesStored(7, "a", "/out"),
    ):
        assert placement.handle(request).version == version
    with pytest.raises(
        ProtocolError, match=r"users is open with the options .*8}, and .*9} are given"
    ):
        placement.handle(OpenTable("users", '{"dim": 9}'))


def test_slots_of_a_move_that_is_over_stay() -> None:
    placement = started(2)
    placement.handle(announce(2, servers=3))
    slots = tuple(placement.moves)
    placement.handle(Leave(2, 1))
    placement.validate()
    assert placement.moves == {}
    with pytest.raises(ProtocolError, match="is over"):
        placement.handle(SlotsFetched(2, 1, slots))
    assert counts(placement) == {0: 512, 1: 512}


@pytest.mark.parametrize("leaves", [False, True])
def test_the_slots_of_a_lost_server_go_to_those_that_stay(leaves: bool) -> None:
    placement = started(3)
    if leaves:
        placement.handle(Leave(1, 1))
    version = placement.version
    assert placement.handle(Abandon(1, 2)).version == version, "another start is there"
    placement.handle(Abandon(1, 1))
    placement.validate()
    assert placement.servers[1].lost
    assert placement.handle(Abandon(1, 1)).version == placement.version
    assert counts(placement)[1] == 341, "they wait for their rows"
    fetch_all(placement)
    assert placement.servers.keys() == {0, 2}
    assert counts(placement) == {0: 512, 2: 512}
    version = placement.version
    assert placement.handle(Abandon(1, 1)).version == version


def test_a_server_may_be_abandoned_before_all_have_started() -> None:
    placement = Placement()
    placement.handle(announce(2, servers=3))
    placement.handle(announce(0, servers=3))
    placement.handle(Abandon(2, 1))
    placement.validate()
    assert placement.servers.keys() == {0}
    placement.handle(announce(1, servers=2))
    assert counts(placement) == {0: 512, 1: 512}


def test_a_lost_server_does_not_come_back() -> None:
    placement = started(2)
    placement.handle(announce(1, start=2))
    placement.handle(Abandon(1, 2))
    with pytest.raises(ProtocolError, match="Start 2 of embedding server 1 is over"):
        placement.handle(SlotsRecovered(1, 2))
    assert not placement.servers[1].ready


def test_the_last_server_is_not_abandoned() -> None:
    placement = started(2)
    placement.handle(Leave(1, 1))
    placement.handle(Abandon(0, 1))
    placement.validate()
    assert not placement.servers[0].lost


def test_slots_without_room_stay_unless_their_server_leaves() -> None:
    placement = started(3)
    version = placement.handle(MoveSlots(0, 2.0, 1.0, {0: 1, 1: 1, 2: 2})).version
    placement.handle(SlotsRefused(1, 1, (0, 2), version - 1))
    assert placement.moves == {0: 1, 1: 1, 2: 2}, "it asked for an earlier move"
    placement.handle(SlotsRefused(1, 1, (0, 2), version))
    placement.validate()
    assert placement.moves == {1: 1, 2: 2}
    assert placement.version == version + 1
    placement.handle(Leave(0, 1))
    moves = dict(placement.moves)
    to = placement.moves[0]
    placement.handle(SlotsRefused(to, 1, (0,), placement.version))
    assert placement.moves == moves


def test_a_load_that_another_one_replaces_ends_nothing() -> None:
    placement = started(2)
    placement.handle(LoadTables("a", 1))
    version = placement.handle(LoadTables("b", 2)).version
    for phase in ("failed", "over"):
        assert placement.handle(LoadTables("a", 1, phase)).version == version
    with pytest.raises(ProtocolError, match=r"The load of step 1 .* is over: another one"):
        placement.handle(LoadTables("a", 1, "loading"))
    assert placement.handle(LoadTables("b", 2, "loading")).loading == LoadTables("b", 2, "loading")
    for _ in range(2):  # a repeated request changes nothing
        reply = placement.handle(LoadTables("b", 2, "over"))
        assert (reply.version, reply.loading) == (version + 2, None)


requests = st.one_of(
    st.builds(announce, st.integers(0, 4), st.integers(1, 4), st.integers(1, 3)),
    st.builds(SlotsRecovered, st.integers(0, 4), st.integers(1, 4)),
    st.builds(Leave, st.integers(0, 4), st.integers(1, 4)),
    st.builds(Abandon, st.integers(0, 4), st.integers(1, 4)),
    st.builds(Distribute, st.integers(1, 4)),
    st.builds(
        LoadTables, st.sampled_from("ab"), st.integers(0, 3),
        st.sampled_from(["settling", "loading", "failed", "over"]),
    ),
    st.builds(
        SlotsRefused, st.integers(0, 4), st.integers(1, 4),
        st.lists(st.integers(0, SLOTS - 1), max_size=400).map(tuple), st.integers(0, 40),
    ),
    st.builds(
        SlotsFetched, st.integers(0, 4), st.integers(1, 4),
        st.lists(st.integers(0, SLOTS - 1), max_size=400).map(tuple),
    ),
    st.builds(
        MoveSlots, st.just(0), st.just(2.0), st.just(1.0),
        st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, 4), max_size=20),
    ),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(requests, max_size=30))
def test_any_order_of_requests_keeps_the_invariants(events: list[PlacementRequest]) -> None:
    placement = Placement()
    for event in events:
        before = placement.version
        try:
            placement.handle(event)
        except ProtocolError:
            assert placement.version == before, "a refused request changes nothing"
        placement.validate()
    fetch_all(placement)
    if placement.owners:
        sizes = counts(placement)
        assert sum(sizes.values()) == SLOTS
        staying = [index for index, server in placement.servers.items() if not server.leaving]
        by_use = sum(len(event.moves) for event in events if isinstance(event, MoveSlots))
        spread = [sizes[index] for index in staying]
        assert not staying or max(spread) - min(spread) <= 1 + 2 * by_use
