"""Sets of positions do what sets of integers do."""

import time

import pytest
from hypothesis import given, strategies as st

from dlrover.data.machine.spans import Ranges, Spans
from dlrover.errors import ProtocolError
from dlrover.spec.requests.shards import Span

edges = st.tuples(st.integers(0, 30), st.integers(0, 30))
changes = st.lists(st.tuples(st.booleans(), edges), max_size=30)


def made(changes) -> tuple[Ranges, set[int]]:
    ranges, plain = Ranges(), set()
    for adds, (start, stop) in changes:
        if adds:
            ranges.add(start, stop)
            plain |= set(range(start, stop))
        else:
            ranges.remove(start, stop)
            plain -= set(range(start, stop))
    return ranges, plain


@pytest.mark.slow
@given(changes)
def test_adding_and_removing_are_those_of_sets(changes) -> None:
    ranges, plain = made(changes)
    assert {n for start, stop in ranges for n in range(start, stop)} == plain
    assert ranges.count == len(plain)
    flat = [edge for pair in ranges for edge in pair]
    assert flat == sorted(set(flat)), "ranges do not touch"


@given(changes, edges)
def test_questions_are_answered_as_by_sets(changes, asked) -> None:
    ranges, plain = made(changes)
    start, stop = asked
    assert ranges.covers(start, stop) == (set(range(start, stop)) <= plain)
    assert ranges.meets(start, stop) == bool(set(range(start, stop)) & plain)
    gap_start, gap_stop = ranges.gap(start)
    assert gap_start == next(n for n in range(start, 100) if n not in plain)
    assert gap_stop == next((n for n in range(gap_start, 100) if n in plain), None)


@pytest.mark.slow
@given(changes.filter(lambda c: made(c)[0]), st.integers(1, 5))
def test_the_first_ones_are_taken_out(changes, most) -> None:
    ranges, plain = made(changes)
    start, stop = ranges.pop_first(most)
    assert start == min(plain)
    assert 1 <= stop - start <= most
    assert ranges.count == len(plain) - (stop - start)
    assert not ranges.meets(start, stop)


def test_the_number_of_integers_takes_no_time() -> None:
    """A master answers with it, whatever holes a set has."""
    ranges = Ranges((2 * n, 2 * n + 1) for n in range(20_000))
    before = time.process_time()
    assert {ranges.count for _ in range(1000)} == {20_000}
    assert time.process_time() - before < 0.1


@given(st.lists(st.builds(Span, st.integers(0, 3), st.integers(0, 2**40), st.integers(0, 2**40))))
def test_what_is_packed_is_unpacked(spans) -> None:
    known = Spans(spans)
    assert Spans.unpacked(known.packed()) == known


def test_epochs_that_are_over_take_no_room_in_a_packed_set() -> None:
    many = Spans([Span(number, 0, 10) for number in range(1, 3_000)])
    ends = [Span(0, 3, 5), Span(3_000, 0, 4), Span(3_002, 0, 4)]
    for span in ends:
        many.add(span)
    assert len(many.packed()) < 40
    assert Spans.unpacked(many.packed()) == many


@pytest.mark.parametrize(
    "data",
    [
        b"\x00",
        b"\x81\x00\x91\x01",
        b"\x81\x00\x92\xff\x01",
        b"\x81\x00\x93\x00\x00\x01",
        b"\x81\x00\x93\xce\xff\xff\xff\xff\x00\x01",
        b"\xc1",
    ],
)
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Spans.unpacked(data)
