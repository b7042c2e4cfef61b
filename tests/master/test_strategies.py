"""The strategy of each round, chosen from what the program has offered."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, strategies as st

from dlrover.errors import ProtocolError
from dlrover.master.machine.strategies import Strategies, pick
from dlrover.spec.requests.strategies import (
    ChooseStrategy,
    OfferLadder,
    SizedStrategy,
    StrategyReply,
)

DP, TP = (1, 1, 1, 1), (2, 1, 1, 1)
GB = 10**9


def rung(ranks: int, degrees: tuple[int, ...], seconds: float) -> SizedStrategy:
    layout = "tp" if degrees == TP else "dp"
    return SizedStrategy(ranks, degrees, f'{{"{layout}": {ranks}}}', f"{layout} {ranks}", seconds)


def offer(*rungs: SizedStrategy, of_round: int = 1, state: int = GB, key: str = "k") -> OfferLadder:
    return OfferLadder(key, of_round, rungs[0], rungs, state)


def ask(machine: Strategies, of_round: int, ranks: int, left: float | None = None) -> StrategyReply:
    reply, _ = machine.handle(ChooseStrategy("k", of_round, ranks, left))
    machine.validate()
    return reply


def test_the_first_round_is_planned_by_the_program() -> None:
    machine = Strategies()
    assert ask(machine, 1, 4).strategy == ""
    four = rung(4, DP, 1.0)
    _, event = machine.handle(offer(four, rung(2, DP, 2.0)))
    assert event is not None
    assert "Round 1 trains with dp 4 on 4 ranks" in event.sentence()
    assert ask(machine, 1, 4).strategy == four.strategy, "a rank that asks late"
    assert ask(machine, 2, 2).strategy == '{"dp": 2}'
    assert ask(machine, 3, 3).strategy == "", "of a size that nothing is known of"
    assert ask(machine, 3, 4).strategy == four.strategy, "the program may offer later"


def test_all_ranks_of_a_round_get_the_same_and_one_event() -> None:
    machine = Strategies()
    machine.handle(offer(rung(4, DP, 1.0), rung(2, DP, 2.0), rung(2, TP, 1.0)))
    asked = [machine.handle(ChooseStrategy("k", 2, 2, left)) for left in (1e6, 0.0, None)]
    assert len({reply.strategy for reply, _ in asked}) == 1
    assert [event is not None for _, event in asked] == [True, False, False]
    assert machine.has_chosen(ChooseStrategy("k", 2, 2))
    with pytest.raises(ProtocolError, match="Round 1 is over"):
        ask(machine, 1, 4)
    with pytest.raises(ProtocolError, match="a strategy for 2 ranks, not 3"):
        ask(machine, 2, 3)


@pytest.mark.parametrize(
    ("left", "seconds", "state", "chosen"),
    [
        (3600.0, 0.9, GB, TP),
        (3600.0, 0.97, GB, DP),  # too little: predictions err
        (10.0, 0.5, 100 * GB, DP),  # too late: moving takes 50 s
        (None, 0.5, 100 * GB, TP),
    ],
)
def test_another_layout_must_pay(left, seconds, state, chosen) -> None:
    same, other = rung(2, DP, 1.0), rung(2, TP, seconds)
    found, why = pick(
        offer(rung(4, DP, 1.0), same, other, state=state), rung(4, DP, 1.0), ChooseStrategy("k", 2, 2, left)
    )  # fmt: skip
    assert found is not None
    assert found.degrees == chosen
    assert why


def test_a_layout_that_does_not_fit_is_left() -> None:
    found, why = pick(offer(rung(3, DP, 9.0)), rung(4, TP, 1.0), ChooseStrategy("k", 2, 3))
    assert found == rung(3, DP, 9.0)
    assert why == "tp 4 does not fit 3 ranks"


def test_a_late_offer_changes_no_later_round() -> None:
    machine = Strategies()
    machine.handle(offer(rung(4, DP, 1.0), rung(2, DP, 2.0)))
    before = ask(machine, 3, 2)
    machine.handle(offer(rung(2, TP, 0.1), of_round=2))
    assert ask(machine, 3, 2) == before


_requests = st.one_of(
    st.builds(
        offer,
        st.builds(rung, st.integers(1, 4), st.sampled_from([DP, TP]), st.floats(0, 10)),
        of_round=st.integers(0, 9), key=st.sampled_from([*"kabcdefghijklmnopqrs"]),
    ),
    st.builds(
        ChooseStrategy, st.sampled_from([*"kab"]), st.integers(0, 9), st.integers(1, 4),
        st.none() | st.floats(0, 1e6),
    ),
)  # fmt: skip


@given(st.lists(_requests, max_size=40))
def test_any_requests_keep_the_invariants_and_replay_alike(requests) -> None:
    machines = Strategies(), Strategies()
    for machine in machines:
        for request in requests:
            again = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request))
            with contextlib.suppress(ProtocolError):
                machine.handle(again)
            machine.validate()
    assert machines[0] == machines[1]
