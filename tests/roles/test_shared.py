"""Members, queues and weights of a job as one state machine: examples of each rule, and any order of inputs."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ProtocolError
from dlrover.roles.machine.members import RoleMembers
from dlrover.roles.machine.shared import SharedState
from dlrover.roles.messages import (
    HOLDER,
    AckItems,
    Agreed,
    CallAddress,
    CursorIs,
    GetItems,
    JoinRole,
    LeasedItems,
    LookCursor,
    MemberEnded,
    MemberPlace,
    MemberStarted,
    OpenQueue,
    PublishedAs,
    PublishPart,
    PutItems,
    Resumed,
    RoleInput,
    SetCursor,
    UseVersion,
    Version,
)

AT = CallAddress("127.0.0.1", 1)
KEEPER = MemberPlace(HOLDER, 0, 1)


def job(*places: MemberPlace, worlds: tuple[str, ...] = ()) -> SharedState:
    shared = SharedState(RoleMembers(frozenset(worlds)))
    for place in (KEEPER, *places):
        shared.handle(JoinRole(place, AT))
    return shared


def rollout(index: int = 0, attempt: int = 1) -> MemberPlace:
    return MemberPlace("rollout", index, attempt)


TRAINER = MemberPlace("trainer", 0, 1)


def publish(
    shared: SharedState,
    step: int,
    place: MemberPlace = TRAINER,
    part: int = 0,
    parts: int = 1,
    holder: MemberPlace = KEEPER,
    name: str = "w",
) -> Version:
    key = f"{place.life}-{step}-{part}"
    reply = shared.handle(PublishPart(place, name, step, part, parts, holder, key, 10))
    shared.validate()
    assert isinstance(reply, PublishedAs)
    return reply.version


def current(shared: SharedState) -> Version | None:
    return shared.weights["w"].current if "w" in shared.weights else None


def serving(shared: SharedState, role: str = "rollout") -> set[int]:
    shared.validate()
    return {m.place.index for m in shared.view(0).roles[role].members if m.serving}


def lease(
    shared: SharedState, place: MemberPlace, sequence: int, count: int = 1
) -> dict[int, bytes]:
    reply = shared.handle(GetItems(place, "q", place.index, sequence, count))
    shared.validate()
    assert isinstance(reply, LeasedItems)
    return {item.number: item.body for item in reply.items}


@pytest.mark.parametrize("step", [-1, 7])
def test_an_item_that_another_has_learned_is_not_acknowledged_again(step: int) -> None:
    """A consumer that was stopped comes back after its item was leased to another one and acknowledged."""
    shared = job(rollout(), rollout(1))
    shared.handle(OpenQueue(rollout(), "q", 2))
    shared.handle(PutItems(rollout(), "q", 9, 0, (b"a",)))
    assert lease(shared, rollout(), 0) == {0: b"a"}
    shared.handle(MemberEnded(rollout(), "its connection has ended", final=False))
    shared.handle(JoinRole(rollout(), AT))
    shared.queues.get("q").release(rollout())
    assert lease(shared, rollout(1), 0) == {0: b"a"}
    learned = AckItems(rollout(1), "q", (0,), step=step)
    shared.handle(learned)
    shared.handle(learned)  # again: the first reply was lost
    with pytest.raises(ProtocolError, match="is not leased to rollout 0"):
        shared.handle(AckItems(rollout(), "q", (0,), step=step))
    shared.validate()
    assert shared.queues.get("q").done == 1


# ---- members


def test_what_comes_from_a_life_that_is_over_is_refused() -> None:
    shared = job(rollout())
    shared.handle(MemberEnded(rollout(), "killed"))
    for place in (rollout(), rollout(1)):
        with pytest.raises(ProtocolError, match=r"is over: it has ended .killed|has not joined"):
            shared.handle(SetCursor(place, b"x"))
    shared.handle(MemberStarted(rollout(attempt=2)))
    with pytest.raises(ProtocolError, match="attempt 2 has taken its place"):
        shared.handle(JoinRole(rollout(), AT))
    shared.handle(JoinRole(rollout(attempt=2), AT))
    assert serving(shared) == {0}


def test_a_second_end_of_an_instance_counts_as_the_first() -> None:
    shared = job(rollout())
    for attempt in (1, 2, 3):
        before = shared.members.epochs["rollout"]
        shared.handle(MemberEnded(rollout(attempt=attempt), f"end {attempt}"))
        assert serving(shared) == set()
        shared.handle(MemberStarted(rollout(attempt=attempt + 1)))
        shared.handle(JoinRole(rollout(attempt=attempt + 1), AT))
        assert serving(shared) == {0}
        assert shared.members.epochs["rollout"] >= before + 3


def test_an_end_that_is_told_late_ends_no_later_life() -> None:
    shared = job(rollout(attempt=2))
    shared.handle(MemberEnded(rollout(), "late"))
    shared.handle(MemberEnded(MemberPlace("rollout", 0, 1, 7), "late"))
    assert serving(shared) == {0}


def test_a_process_that_lost_its_connection_comes_back_unless_it_was_seen_to_end() -> None:
    shared = job(rollout())
    shared.handle(MemberEnded(rollout(), "no connection", final=False))
    shared.handle(JoinRole(rollout(), AT))
    assert serving(shared) == {0}
    shared.handle(MemberEnded(rollout(), "no connection", final=False))
    shared.handle(MemberEnded(rollout(), "killed by SIGKILL"))
    assert shared.view(0).roles["rollout"].members[0].reason == "killed by SIGKILL"
    with pytest.raises(ProtocolError, match="killed by SIGKILL"):
        shared.handle(JoinRole(rollout(), AT))


def test_a_cursor_is_that_of_the_instance_in_whatever_life() -> None:
    shared = job(rollout(), rollout(1))
    shared.handle(SetCursor(rollout(), b"here"))
    shared.handle(JoinRole(rollout(attempt=2), AT))
    assert shared.handle(LookCursor(rollout(attempt=2))) == CursorIs(b"here")
    assert shared.handle(LookCursor(rollout(1))) == CursorIs(None)


# ---- queues


def queue(size: int = 4, worlds: tuple[str, ...] = ()) -> SharedState:
    shared = job(TRAINER, rollout(), rollout(1), worlds=worlds)
    shared.handle(OpenQueue(TRAINER, "q", size, "prompts"))
    return shared


def put(shared: SharedState, sequence: int, *bodies: bytes, cursor: bytes | None = None) -> None:
    assert shared.handle(PutItems(TRAINER, "q", 1, sequence, bodies, cursor)) == Agreed()
    shared.validate()


def test_items_of_a_dead_consumer_are_leased_again_and_none_after_its_acknowledgement() -> None:
    shared = queue()
    put(shared, 1, b"a", b"b", b"c")
    assert lease(shared, rollout(), 1, 3) == {0: b"a", 1: b"b", 2: b"c"}
    shared.handle(AckItems(rollout(), "q", (0,)))
    shared.handle(MemberEnded(rollout(), "killed"))
    put(shared, 2, b"d")
    assert lease(shared, rollout(1), 1, 4) == {1: b"b", 2: b"c", 3: b"d"}
    shared.handle(AckItems(rollout(1), "q", (1, 2, 3)))
    shared.handle(AckItems(rollout(1), "q", (1,)))  # again: the first reply was lost
    assert lease(shared, rollout(1), 2) == {}
    status = shared.queues.get("q").status()
    assert (status.added, status.done, status.redelivered) == (4, 4, 2)


def test_a_repeated_put_counts_once_and_a_repeated_get_gets_the_same() -> None:
    shared = queue()
    for _ in range(2):
        put(shared, 1, b"a", b"b")
    assert lease(shared, rollout(), 1) == lease(shared, rollout(), 1) == {0: b"a"}
    assert lease(shared, rollout(), 2) == {1: b"b"}
    with pytest.raises(ProtocolError, match="it is late"):
        lease(shared, rollout(), 1)


def test_puts_wait_for_room_and_gets_for_as_many_as_they_want() -> None:
    shared = queue(2)
    full = PutItems(TRAINER, "q", 1, 2, (b"c",))
    put(shared, 1, b"a", b"b")
    assert not shared.ready(full)
    assert not shared.ready(GetItems(rollout(), "q", 0, 1, 3, 3))
    assert shared.ready(PutItems(TRAINER, "q", 1, 1, (b"a", b"b"))), "it was handled before"
    lease(shared, rollout(), 1)
    assert shared.ready(full)
    with pytest.raises(
        ProtocolError, match="3 items were put at once into the queue q; its size is 2"
    ):
        shared.handle(PutItems(TRAINER, "q", 1, 2, (b"c", b"d", b"e")))


def test_a_queue_that_two_roles_use_in_different_ways_is_refused() -> None:
    shared = queue(4)
    shared.handle(OpenQueue(rollout(), "q", 4, "prompts"))
    with pytest.raises(
        ProtocolError,
        match="used in two ways: trainer opened it with size 4 and kind prompts, rollout wants size 8",
    ):
        shared.handle(OpenQueue(rollout(), "q", 8))


def test_an_acknowledgement_and_a_cursor_are_one() -> None:
    shared = queue()
    put(shared, 1, b"a", cursor=b"put")
    assert shared.cursors["trainer", 0] == b"put"
    lease(shared, rollout(), 1)
    with pytest.raises(ProtocolError, match="not leased to rollout 1: rollout 0"):
        shared.handle(AckItems(rollout(1), "q", (0,), cursor=b"x"))
    assert ("rollout", 1) not in shared.cursors
    shared.handle(AckItems(rollout(), "q", (0,), cursor=b"acked"))
    assert shared.cursors["rollout", 0] == b"acked"


def test_what_a_role_learned_after_the_step_it_goes_back_to_is_leased_again() -> None:
    shared = queue(8, worlds=("trainer",))
    put(shared, 1, *(bytes([n]) for n in range(6)))
    for step in range(3):
        for number in lease(shared, TRAINER, step + 1, 2):
            shared.handle(AckItems(TRAINER, "q", (number,), step))
    again = MemberPlace("trainer", 0, 1, 2)
    for rank in (0, 1):  # both ranks of the role say so
        shared.handle(JoinRole(MemberPlace("trainer", rank, 1, 2), AT))
    shared.handle(Resumed(again, 0))
    assert lease(shared, again, 1, 8).keys() == {2, 3, 4, 5}
    shared.handle(AckItems(again, "q", (2, 3), 1))
    shared.handle(Resumed(MemberPlace("trainer", 1, 1, 2), 0))
    assert lease(shared, again, 2, 8) == {}
    shared.handle(Resumed(again, 0, 2))  # it went back once more, in the same process
    assert lease(shared, again, 3, 8).keys() == {2, 3}


def test_acknowledged_items_that_are_kept_no_longer_are_counted_as_lost() -> None:
    shared = queue(1)
    for n in range(4):
        put(shared, n + 1, b"x")
        lease(shared, TRAINER, n + 1)
        shared.handle(AckItems(TRAINER, "q", (n,), n))
    shared.handle(Resumed(TRAINER, 0))
    shared.validate()
    status = shared.queues.get("q").status()
    assert (status.waiting, status.lost, status.done) == (2, 1, 1), "step 0 is not undone"


def test_a_source_that_learns_fast_costs_another_none_of_its_items() -> None:
    fast, slow = rollout(), rollout(1)
    shared = job(fast, slow)
    shared.handle(OpenQueue(fast, "q", 2))
    for n in range(12):
        shared.handle(PutItems(fast, "q", 9, n, (bytes([n]),)))
        learner = slow if n in (1, 2) else fast
        lease(shared, learner, n)
        shared.handle(AckItems(learner, "q", (n,), n))
        shared.validate()
    with pytest.raises(
        ProtocolError, match="Item 2 of the queue q is not leased to rollout 0: rollout 1"
    ):
        shared.handle(AckItems(fast, "q", (2,), 20))
    shared = msgspec.msgpack.decode(msgspec.msgpack.encode(shared), type=SharedState)
    shared.validate()
    again = rollout(1, 2)
    shared.handle(JoinRole(again, AT))
    shared.handle(Resumed(again, 0))
    status = shared.queues.get("q").status()
    assert (status.waiting, status.lost) == (2, 0)
    assert lease(shared, again, 1, 2).keys() == {1, 2}
    assert lease(shared, again, 2, 2) == {}


# ---- weights


def test_a_version_is_there_once_all_parts_are() -> None:
    second = MemberPlace("trainer", 1, 1)
    shared = job(TRAINER, second)
    publish(shared, 1, parts=2)
    assert current(shared) is None
    publish(shared, 1, second, part=1, parts=2)
    assert current(shared) == Version(0, 1)
    publish(shared, 2, parts=2)
    shared.handle(MemberEnded(TRAINER, "killed while it published"))
    publish(shared, 2, second, part=1, parts=2)
    assert current(shared) == Version(0, 1), "a part of the dead one counts no more"


def test_a_version_that_was_lost_with_its_keeper_can_be_published_again() -> None:
    """Readers may wait for it, and its publisher for them."""
    shared = job(TRAINER)
    publish(shared, 1)
    publish(shared, 2)
    for step in (1, 2):
        with pytest.raises(ProtocolError):
            shared.handle(PublishPart(TRAINER, "w", step, 0, 1, KEEPER, "again", 10))
    shared.handle(MemberEnded(KEEPER, "killed"))
    assert (current(shared), shared.weights["w"].lost) == (None, Version(0, 2))
    other = msgspec.structs.replace(KEEPER, attempt=2)
    shared.handle(JoinRole(other, AT))
    with pytest.raises(ProtocolError, match="is older"):
        publish(shared, 1, holder=other)
    publish(shared, 2, holder=other)
    assert (current(shared), shared.weights["w"].lost) == (Version(0, 2), None)


def test_a_version_published_twice_or_by_another_role_is_refused() -> None:
    shared = job(TRAINER, rollout())
    publish(shared, 2)
    publish(shared, 2)  # the same request again: its reply was lost
    other = PublishPart(TRAINER, "w", 2, 0, 1, KEEPER, "other", 10)
    with pytest.raises(ProtocolError, match="Version 2 of the weights w was published before"):
        shared.handle(other)
    with pytest.raises(
        ProtocolError, match=r"Version 1 of the weights w is older.*resumed\(step\)"
    ):
        publish(shared, 1)
    with pytest.raises(
        ProtocolError, match="belong to the role trainer; rollout must publish its own"
    ):
        publish(shared, 3, rollout())


def test_what_a_rolled_back_trainer_published_never_counts_as_newer() -> None:
    shared = job(TRAINER)
    for step in (9, 10, 11):
        publish(shared, step)
    again = MemberPlace("trainer", 0, 2)
    shared.handle(JoinRole(again, AT))
    shared.handle(Resumed(again, 10))
    assert current(shared) == Version(0, 10)
    view = shared.weights["w"].view()
    assert [view.valid(Version(0, step)) for step in (9, 10, 11)] == [True, True, False]
    assert publish(shared, 11, again) == Version(1, 11) > Version(0, 11)
    assert current(shared) == Version(1, 11)
    assert shared.weights["w"].view().valid(Version(1, 11))


def again(shared: SharedState, index: int, round_: int) -> MemberPlace:
    place = MemberPlace("trainer", index, 1, round_)
    shared.handle(JoinRole(place, AT))
    return place


def test_an_instance_that_goes_back_undoes_only_its_own_weights() -> None:
    """Two trainers that are no world: the one has been restarted twice, the other once."""
    second = MemberPlace("trainer", 1, 1)
    shared = job(TRAINER, second)
    for step in (8, 10):
        publish(shared, step, name="policy0")
        publish(shared, step, second, name="policy1")
    for round_ in (1, 2):
        first = again(shared, 0, round_)
        shared.handle(Resumed(first, 8))
    assert shared.weights["policy0"].current == Version(0, 8)
    assert publish(shared, 11, second, name="policy1") == Version(0, 11)
    second = again(shared, 1, 1)
    shared.handle(Resumed(second, 10))  # its life has a lower number than that of the other
    assert shared.weights["policy1"].current == Version(0, 10)
    assert publish(shared, 11, second, name="policy1") == Version(1, 11)
    assert publish(shared, 9, first, name="policy0") == Version(2, 9)


def test_an_instance_that_goes_back_gets_only_its_own_items_again() -> None:
    shared = queue(8)
    put(shared, 1, *(bytes([n]) for n in range(4)))
    for index, numbers in enumerate(((0, 1), (2, 3))):
        assert lease(shared, rollout(index), 1, 2).keys() == set(numbers)
        for step, number in enumerate(numbers, 1):
            shared.handle(AckItems(rollout(index), "q", (number,), step))
    shared.handle(JoinRole(rollout(attempt=3), AT))
    shared.handle(Resumed(rollout(attempt=3), 1))
    assert lease(shared, rollout(attempt=3), 2, 8).keys() == {1}
    shared.handle(JoinRole(rollout(1, attempt=2), AT))
    shared.handle(Resumed(rollout(1, attempt=2), 0))
    assert lease(shared, rollout(1, attempt=2), 2, 8).keys() == {2, 3}


def test_instances_that_publish_together_go_back_together() -> None:
    """Both say so: what the first has begun since stays."""
    shared = job(TRAINER, MemberPlace("trainer", 1, 1))
    for step in (8, 9):
        for part in (0, 1):
            publish(shared, step, MemberPlace("trainer", part, 1), part, 2)
    ranks = [again(shared, index, 1) for index in (0, 1)]
    shared.handle(Resumed(ranks[0], 8))
    publish(shared, 9, ranks[0], 0, 2)
    shared.handle(Resumed(ranks[1], 8))
    assert publish(shared, 9, ranks[1], 1, 2) == current(shared) == Version(1, 9)
    publish(shared, 11, ranks[0], 0, 2)
    shared.handle(Resumed(ranks[0], 9, 2))  # it goes back in the same process
    publish(shared, 11, ranks[0], 0, 2)
    shared.handle(Resumed(ranks[0], 9, 3))  # and again
    publish(shared, 10, ranks[0], 0, 2)
    assert publish(shared, 10, ranks[1], 1, 2) == current(shared)


def test_a_new_round_of_a_world_ends_the_earlier_lives_of_all_its_ranks() -> None:
    """Rank 1 says where the role goes on before rank 0's last messages of the dead round arrive."""
    ranks = [MemberPlace("trainer", rank, 1, 1) for rank in range(3)]
    again = [MemberPlace("trainer", rank, 1, 2) for rank in range(2)]
    shared = job(*ranks, worlds=("trainer",))
    shared.handle(OpenQueue(ranks[0], "q", 4))
    for step in (10, 11):
        publish(shared, step, ranks[0])
    shared.handle(PutItems(ranks[1], "q", 1, 1, (b"a",)))
    assert lease(shared, ranks[0], 1) == {0: b"a"}
    shared.handle(JoinRole(again[1], AT))
    shared.handle(Resumed(again[1], 10))
    for late in (
        PublishPart(ranks[0], "w", 12, 0, 1, KEEPER, "late", 10),
        AckItems(ranks[0], "q", (0,), step=12),
    ):
        with pytest.raises(ProtocolError, match="of trainer 0 is over: round 2 of the attempt has"):
            shared.handle(late)
    for late in (JoinRole(ranks[0], AT), JoinRole(MemberPlace("trainer", 3, 1, 1), AT)):
        with pytest.raises(ProtocolError, match="round 2 of the attempt has begun"):
            shared.handle(late)
    shared.handle(MemberStarted(ranks[2]))  # the coordinator reads of the first round only now
    shared.handle(MemberEnded(ranks[2], "killed by SIGKILL"))
    assert [one.state for one in shared.view(0).roles["trainer"].members] == [
        "ended",
        "live",
        "ended",
    ]
    assert shared.members.roles["trainer"][2].reason == "killed by SIGKILL"
    assert current(shared) == Version(0, 10)
    assert lease(shared, again[1], 1) == {0: b"a"}
    shared.handle(JoinRole(again[0], AT))
    assert publish(shared, 11, again[0]) == current(shared) == Version(1, 11)


def test_instances_that_are_no_world_live_on_when_another_starts_anew() -> None:
    shared = job(rollout(), rollout(1))
    shared.handle(JoinRole(MemberPlace("rollout", 1, 1, 2), AT))
    assert serving(shared) == {0, 1}


def test_a_recovered_member_serves_once_it_has_the_current_version() -> None:
    shared = job(TRAINER, rollout(), rollout(1))
    for index in range(2):
        shared.handle(UseVersion(rollout(index), "w", None))
    assert serving(shared) == {0, 1}, "nothing is published yet"
    first = publish(shared, 1)
    assert serving(shared) == set()
    for index in range(2):
        shared.handle(UseVersion(rollout(index), "w", first))
    second = publish(shared, 2)
    assert serving(shared) == {0, 1}, "those that have served go on while they load the next one"
    shared.handle(MemberEnded(rollout(), "killed"))
    shared.handle(JoinRole(rollout(attempt=2), AT))
    assert serving(shared) == {1}
    shared.handle(UseVersion(rollout(attempt=2), "w", first))
    assert serving(shared) == {1}, "an older version is not enough"
    shared.handle(UseVersion(rollout(attempt=2), "w", second))
    assert serving(shared) == {0, 1}


def test_a_member_with_a_version_that_was_rolled_back_serves_no_more() -> None:
    shared = job(TRAINER, rollout())
    shared.handle(UseVersion(rollout(), "w", None))
    publish(shared, 1)
    shared.handle(UseVersion(rollout(), "w", publish(shared, 2)))
    shared.handle(Resumed(TRAINER, 1))
    assert serving(shared) == set()
    shared.handle(UseVersion(rollout(), "w", Version(0, 1)))
    assert serving(shared) == {0}


def test_the_end_of_a_trainer_ends_no_version_and_that_of_a_keeper_only_its_own() -> None:
    shared = job(TRAINER, rollout())
    shared.handle(UseVersion(rollout(), "w", publish(shared, 1)))
    shared.handle(MemberEnded(TRAINER, "killed"))
    assert current(shared) == Version(0, 1)
    assert serving(shared) == {0}
    shared.handle(MemberEnded(KEEPER, "killed"))
    assert current(shared) is None
    assert shared.weights["w"].lost == Version(0, 1)
    assert serving(shared) == {0}, "it has its copy"


# ---- a connection that was lost


def test_a_process_that_comes_back_puts_nothing_twice_and_serves_with_the_weights_that_it_has() -> (
    None
):
    shared = queue()
    version = publish(shared, 1)
    shared.handle(UseVersion(rollout(), "w", version))
    put(shared, 1, b"a")
    assert lease(shared, rollout(), 1) == {0: b"a"}
    for place in (TRAINER, rollout(), KEEPER):
        shared.handle(MemberEnded(place, "no connection", final=False))
        shared.validate()
        with pytest.raises(ProtocolError, match=r"it has ended .no connection"):
            shared.handle(LookCursor(place))
        shared.handle(JoinRole(place, AT))
    put(shared, 1, b"a")  # again: the first reply was lost with the connection
    assert shared.queues.get("q").status().added == 1
    assert lease(shared, rollout(1), 1) == {0: b"a"}, "others got it meanwhile"
    assert lease(shared, rollout(), 1) == {}
    assert current(shared) == version
    assert serving(shared) == {0}
    shared.handle(MemberEnded(rollout(), "no connection", final=False))
    shared.handle(Resumed(TRAINER, 0))
    shared.handle(JoinRole(rollout(), AT))
    assert serving(shared) == set(), "what it has was rolled back meanwhile"
    shared.handle(MemberEnded(KEEPER, "no connection", final=False))
    assert publish(shared, 2, holder=rollout(1)) == current(shared)
    shared.handle(MemberEnded(rollout(1), "no connection", final=False))
    shared.handle(MemberEnded(rollout(1), "killed by SIGKILL"))
    assert current(shared) is None, "now it is known to be dead"


# ---- any order

_places = st.builds(
    MemberPlace,
    st.sampled_from(["a", "b"]),
    st.integers(0, 1),
    st.integers(1, 2),
    st.integers(0, 1),
)
_inputs: st.SearchStrategy[RoleInput] = st.one_of(
    st.builds(MemberStarted, _places),
    st.builds(MemberEnded, _places, st.just("why"), st.booleans()),
    st.builds(JoinRole, _places, st.just(AT), ready=st.booleans()),
    st.builds(JoinRole, _places, st.just(AT)),
    st.builds(Resumed, _places, st.integers(0, 3), st.integers(1, 2)),
    st.builds(OpenQueue, _places, st.just("q"), st.sampled_from([2, 2, 2, 3])),
    st.builds(PutItems, _places, st.just("q"), st.integers(0, 1), st.integers(0, 9), st.sampled_from([(b"x",), (b"x", b"y")])),
    st.builds(GetItems, _places, st.just("q"), st.integers(0, 1), st.integers(0, 9), st.integers(1, 3)),
    st.builds(AckItems, _places, st.just("q"), st.tuples(st.integers(0, 5)), st.integers(-1, 3)),
    st.builds(PublishPart, _places, st.just("w"), st.integers(0, 4), st.integers(0, 1), st.integers(1, 2), _places, st.just("k")),
    st.builds(UseVersion, _places, st.just("w"), st.none() | st.builds(Version, st.integers(0, 1), st.integers(0, 4))),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(_inputs, max_size=60))
def test_the_invariants_hold_after_any_inputs_and_a_replay_has_the_same_state(
    inputs: list[RoleInput],
) -> None:
    shared, delivered = SharedState(RoleMembers(frozenset("a"))), Counter[int]()
    done: set[int] = set()
    for event in [
        JoinRole(MemberPlace("a", 0, 1), AT),
        OpenQueue(MemberPlace("a", 0, 1), "q", 2),
        *inputs,
    ]:
        before = msgspec.msgpack.encode(shared.status())
        if isinstance(event, PutItems | GetItems) and not shared.ready(event):
            continue
        try:
            reply = shared.handle(event)
        except ProtocolError:
            assert msgspec.msgpack.encode(shared.status()) == before, (
                "a refused input changes nothing"
            )
            continue
        finally:
            shared.validate()
        if isinstance(event, Resumed):
            done.clear()
        if isinstance(reply, LeasedItems):
            assert not done & {item.number for item in reply.items}, "acknowledged for ever"
            delivered.update(item.number for item in reply.items)
        if isinstance(event, AckItems) and event.step < 0:
            done.update(event.numbers)
    journal = msgspec.msgpack.Decoder(RoleInput)
    again = SharedState(RoleMembers(frozenset("a")))
    for event in [
        JoinRole(MemberPlace("a", 0, 1), AT),
        OpenQueue(MemberPlace("a", 0, 1), "q", 2),
        *inputs,
    ]:
        if isinstance(event, PutItems | GetItems) and not again.ready(event):
            continue
        try:
            again.handle(journal.decode(msgspec.msgpack.encode(event)))
        except ProtocolError:
            continue
    assert again == shared
