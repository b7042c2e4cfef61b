"""Tracebacks on the console: each one once, and none of those who only lost a peer."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dlrover.agent.workers.folding import KNOWN, LONGEST, FoldingFormatter, Tracebacks

MINE = b"""Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    f()
KeyError: 'missing'
"""
ECHO = b"""[rank2]: Traceback (most recent call last):
[rank2]:   File "/home/me/train.py", line 9, in <module>
[rank2]:     dist.all_reduce(x)
[rank2]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:14551.

[rank2]: The above exception was the direct cause of the following exception:

[rank2]: Traceback (most recent call last):
[rank2]:   File "/home/me/train.py", line 11, in <module>
[rank2]:     raise SystemError("wrapped") from e
[rank2]: SystemError: wrapped
"""


def shown(*streams: tuple[int, bytes], size: int = 1 << 16) -> list[bytes]:
    seen, found = Tracebacks(), []
    for rank, data in streams:
        formatter = FoldingFormatter(rank, f"/logs/{rank}/stderr.log", seen)
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        found.append(b"".join(map(formatter.feed, pieces)) + formatter.flush())
    return found


def test_a_taken_port_is_no_lost_peer() -> None:
    taken = MINE.replace(b"KeyError: 'missing'", b"DistNetworkError: failed to listen: EADDRINUSE")
    assert shown((0, taken)) == [taken]


def test_a_service_that_refuses_the_programs_connection_is_no_lost_peer() -> None:
    refused = MINE.replace(b"KeyError: 'missing'", b"ConnectionRefusedError: Connection refused")
    assert shown((0, refused)) == [refused]
    store = refused.replace(
        b"/home/me/train.py", b"/x/site-packages/torch/distributed/rendezvous.py"
    )
    assert shown((0, store))[0].startswith(b"dlrover: rank 0 lost a peer")


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_a_traceback_is_shown_once(size: int) -> None:
    later = MINE.replace(b"\n", b"\n[rank1]: ").join([b"[rank1]: ", b""]).removesuffix(b"[rank1]: ")
    first, second = shown((0, b"before\n" + MINE + b"after\n"), (1, later + b"after\n"), size=size)
    assert first == b"before\n" + MINE + b"after\n"
    assert second == (
        b"dlrover: rank 1 has the same traceback as rank 0: KeyError: 'missing' (its traceback: /logs/1/stderr.log)\n"
        b"after\n"
    )


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_a_peers_end_is_one_line_with_all_that_follows_from_it(size: int) -> None:
    (found,) = shown((2, ECHO + b"goodbye\n"), size=size)
    line, rest = found.split(b"\n", 1)
    assert line.startswith(
        b"dlrover: rank 2 lost a peer: RuntimeError: [pair.cc:553] Connection closed"
    )
    assert line.endswith(b"(its traceback: /logs/2/stderr.log)")
    assert rest == b"goodbye\n"


def test_an_interrupt_is_shown_once_at_whatever_lines_the_ranks_are() -> None:
    interrupted = b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\nKeyboardInterrupt\n'
    elsewhere = interrupted.replace(b"step()", b"save()")
    assert shown((0, interrupted), (1, elsewhere)) == [
        interrupted,
        b"dlrover: rank 1 was interrupted like rank 0: KeyboardInterrupt (its traceback: /logs/1/stderr.log)\n",
    ]


def test_a_long_line_of_an_exception_is_cut_visibly() -> None:
    (found,) = shown((2, ECHO.replace(b"Connection closed", b"x" * 200 + b" Connection closed")))
    assert "x… (its traceback: " in found.decode()


def test_another_traceback_and_ones_own_again_are_shown() -> None:
    other = MINE.replace(b"KeyError", b"ValueError")
    assert shown((0, MINE + MINE), (1, other)) == [MINE + MINE, other]


def test_an_unfinished_traceback_comes_at_the_end() -> None:
    cut = MINE[:60]
    assert shown((0, cut)) == [cut]


@given(st.binary(max_size=200), st.integers(1, 20))
def test_other_bytes_pass_unchanged(data: bytes, size: int) -> None:
    assert shown((0, data), size=size) == [data]


def test_what_is_no_traceback_does_not_wait() -> None:
    formatter = FoldingFormatter(0, "", Tracebacks())
    assert formatter.feed(b"50 %|####") == b"50 %|####"
    assert formatter.feed(b"\r60 %|#####") == b"\r60 %|#####"


@pytest.mark.parametrize("before", [ECHO, ECHO[: ECHO.index(b"[rank2]: RuntimeError")]])
def test_a_progress_bar_is_shown_after_a_traceback_too(before: bytes) -> None:
    formatter = FoldingFormatter(2, "", Tracebacks())
    formatter.feed(before)
    assert formatter.feed(b"\r60 %|#####").endswith(b"\r60 %|#####")
    assert formatter.feed(b"\r70 %|######") == b"\r70 %|######"


def test_what_goes_on_without_an_end_is_not_kept() -> None:
    formatter = FoldingFormatter(2, "", Tracebacks())
    begin, frame = b"Traceback (most recent call last):\n", b"  File x\n"
    assert formatter.feed(begin + frame) == b""
    long = b"y" * (LONGEST + 1)
    assert formatter.feed(long) == begin + frame + long
    assert formatter.feed(b"\n" + begin) == b"\n"
    frames = LONGEST // len(frame) * frame
    assert formatter.feed(frames + frame) + formatter.feed(frame) == begin + frames + 2 * frame


def test_of_many_different_tracebacks_a_bounded_number_is_known() -> None:
    seen = Tracebacks()
    for number in range(KNOWN + 1):
        text = "".join(chr(ord("a") + int(digit)) for digit in str(number)).encode()
        assert not seen.meaning(0, text, text)
    assert seen.meaning(1, b"b", b"") == "has the same traceback as rank 0"
    assert not seen.meaning(1, text, b"")
