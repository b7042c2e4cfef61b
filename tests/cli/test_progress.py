"""The status line stays below the job's output and never mixes with it."""

import fcntl
import functools
import io
import os
import pty
import struct
import termios

import msgspec
import pytest
from hypothesis import given, strategies as st
from rich.text import Text

from dlrover.cli.run import progress
from dlrover.rpc import messages

STATUS = messages.Status(
    name="job", phase="running", round=1, world_size=4, restarts=2, steps=17, total_steps=40,
    step=412,
    waiting_for="", nodes=(messages.NodeState(0, 0, "running", "host", True, 17),),
)  # fmt: skip


def test_the_line_names_what_a_user_asks_for():
    line = progress.status_line(STATUS).plain
    assert line == "running · 1 node, 4 workers · step 412 · 2 restarts"


def test_a_program_that_does_not_number_its_steps_has_their_count():
    status = msgspec.structs.replace(STATUS, step=-1)
    assert "40 steps" in progress.status_line(status).plain


def test_an_ended_job_has_no_nodes_on_its_line():
    ended = msgspec.structs.replace(STATUS, phase="succeeded", nodes=())
    assert progress.status_line(ended).plain == "succeeded · step 412 · 2 restarts"


def test_servers_are_counted_apart():
    status = msgspec.structs.replace(STATUS, world_size=5, servers=1)
    assert "1 node, 4 workers and 1 server" in progress.status_line(status).plain


def test_what_is_waited_for_is_part_of_the_line():
    status = msgspec.structs.replace(STATUS, waiting_for="waiting for node 3: 42 s of 600 s")
    assert progress.status_line(status).plain.endswith("waiting for node 3: 42 s of 600 s")


def shown(writes: list[bytes]) -> tuple[bytes, bytes]:
    """What a terminal's screen holds after the writes: lines above, and the status line."""
    out = io.BytesIO()
    screen = progress.Screen(out, width=lambda: 40)
    screen.set_status(Text("STATUS"))
    for data in writes:
        screen.write(data)
    raw = out.getvalue()
    # Whatever stands before an erasure on its line is gone.
    kept = b"\n".join(line.rpartition(progress.ERASE_LINE)[2] for line in raw.split(b"\n"))
    head, _, last = kept.rpartition(b"\n")
    return head, last


def test_output_scrolls_above_the_status_line():
    assert shown([b"one\n", b"two\n"]) == (b"one\ntwo", b"STATUS")


def test_a_line_that_is_not_finished_is_left_alone():
    assert shown([b"one\n", b"10%"]) == (b"one", b"10%")
    assert shown([b"one\n", b"10%", b"\r20%\n"]) == (b"one\n10%\r20%", b"STATUS")


@given(st.lists(st.binary(min_size=1).filter(lambda data: b"\x1b" not in data)))
def test_output_is_never_lost(writes: list[bytes]):
    out = io.BytesIO()
    screen = progress.Screen(out, width=lambda: 40)
    for number, data in enumerate(writes):
        screen.set_status(Text(f"status {number}"))
        screen.write(data)
    screen.close()
    rest = out.getvalue()
    for number in range(len(writes)):
        rest = rest.replace(f"status {number}".encode() + progress.ERASE_LINE, b"")
    assert rest == b"".join(writes)


@pytest.mark.parametrize("width", [1, 10, 200])
def test_the_line_fits_the_terminal(width: int):
    out = io.BytesIO()
    progress.Screen(out, width=lambda: width).set_status(Text("x" * 300))
    assert len(out.getvalue().decode()) <= width


def test_a_message_does_not_continue_an_unfinished_line():
    out = io.BytesIO()
    screen = progress.Screen(out, width=lambda: 40)
    screen.write(b"10%")
    progress.say("rank 0 was killed.", screen)
    progress.say("Restart 1.", screen)
    screen.write(b"20%")
    assert out.getvalue() == b"10%\ndlrover: rank 0 was killed.\ndlrover: Restart 1.\n20%"


def test_the_line_follows_the_terminals_width():
    own, theirs = pty.openpty()
    out = io.BytesIO()
    screen = progress.Screen(out, width=functools.partial(progress.columns, theirs))
    for columns in (100, 20, 0):
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        out.seek(0)
        out.truncate()
        screen.set_status(Text(f"{columns}" + "x" * 300))
        shown = out.getvalue().replace(progress.ERASE_LINE, b"").decode()
        assert len(shown) == (columns or 80) - 1
    os.close(own)
    os.close(theirs)
    assert progress.columns(theirs) == 80


def test_a_wait_is_shown_once_it_takes_long(capsys: pytest.CaptureFixture[str]):
    viewer = progress.Viewer(None)
    for seconds, wait in [
        (30, ""),
        (35, "node 0"),
        (39, ""),
        (45, "node 1"),
        (50, "node 1"),
        (59, "x"),
    ]:
        status = msgspec.structs.replace(STATUS, seconds=float(seconds), waiting_for=wait)
        viewer._show(messages.Notice((), status))
    assert capsys.readouterr().err == "dlrover: node 1\n"
