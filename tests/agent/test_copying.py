"""Copying of growing files: lines, prefixes, filters, and consoles that are slow, blocked or gone."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.agent.workers import copying
from dlrover.agent.workers.copying import (
    READ_SIZE,
    GrowingFile,
    LineFormatter,
    LineSplitter,
    OutputCopier,
    Pump,
    Sink,
)


def lines_of(chunks: list[bytes], limit: int) -> list[bytes]:
    splitter = LineSplitter(limit)
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.flush()


def copy(*pumps: Pump) -> OutputCopier:
    return OutputCopier(pumps, contextlib.ExitStack())


@contextlib.contextmanager
def pipe():
    """A pipe's reading descriptor and its writing end as a console."""
    reader, writer = os.pipe()
    try:
        with open(writer, "wb", buffering=0) as console:
            yield reader, console
    finally:
        with contextlib.suppress(OSError):
            os.close(reader)


class Recorder(io.RawIOBase):
    """A console in memory that remembers each write."""

    def __init__(self):
        self.writes: list[bytes] = []

    def write(self, data):
        self.writes.append(bytes(data))
        return len(data)


class TestLineSplitter:
    @given(st.text("ab\r\n", max_size=40), st.data(), st.integers(1, 5))
    @settings(deadline=None)
    def test_chunks_do_not_change_the_lines(self, text, data, limit):
        stream = text.encode()
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
        chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        whole = [
            line[start : start + limit]
            for line in stream.splitlines()
            for start in range(0, max(len(line), 1), limit)
        ]
        assert lines_of(chunks, limit) == whole

    def test_a_line_end_cut_in_two_is_one_line_end(self):
        assert lines_of([b"one\r", b"\ntwo\r", b"three"], 100) == [b"one", b"two", b"three"]

    def test_a_progress_bar_is_shown_as_it_moves(self):
        splitter = LineSplitter()
        assert splitter.feed(b"10%\r20%\r30%") == [b"10%", b"20%"]
        assert splitter.flush() == [b"30%"]
        assert splitter.flush() == []

    def test_a_line_without_end_is_not_held_beyond_the_limit(self):
        splitter = LineSplitter(limit=4)
        assert splitter.feed(b"x" * 9) == [b"xxxx", b"xxxx"]
        assert splitter.feed(b"\n") == [b"x"]


class TestLineFormatter:
    def test_prefix_goes_before_each_line_and_bytes_stay(self):
        assert LineFormatter("[a0]:").feed(b"caf\xe9\n\nx\n") == b"[a0]:caf\xe9\n[a0]:\n[a0]:x\n"

    def test_a_last_line_gets_an_end(self):
        formatter = LineFormatter("> ")
        assert formatter.feed(b"half") == b""
        assert formatter.flush() == b"> half\n"
        assert formatter.flush() == b""

    def test_lines_with_any_needle_pass(self):
        formatter = LineFormatter("", ["loss", "é"])
        assert formatter.feed("loss 1\nstep\né\nlos\ns\n".encode()) == "loss 1\né\n".encode()
        assert formatter.feed(b"no loss") == b""
        assert formatter.flush() == b"no loss\n"

    def test_the_prefix_is_not_searched(self):
        assert LineFormatter("[loss0]:", ["loss"]).feed(b"step\n") == b""


class TestCopier:
    def test_a_raw_stream_is_shown_before_its_line_ends(self, tmp_path: Path):
        log = tmp_path / "log"
        with pipe() as (reader, console):
            copier = copy(Pump("console", Sink(console), [GrowingFile(log)]))
            with log.open("wb", buffering=0) as file:  # made after the copying began
                for state in (b"10%\r", b"\xff20%\r\n"):
                    file.write(state)
                    assert os.read(reader, 100) == state  # nothing else: no prefix, no line end
            assert copier.stop(5)

    def test_a_teed_line_is_shown_when_it_ends(self, tmp_path: Path):
        log = tmp_path / "log"
        with pipe() as (reader, console), log.open("wb", buffering=0) as file:
            copier = copy(Pump("console", Sink(console), [GrowingFile(log, LineFormatter("> "))]))
            file.write(b"one")
            file.write(b" line\nhalf")
            assert os.read(reader, 100) == b"> one line\n"
            assert copier.stop(5)
            assert os.read(reader, 100) == b"> half\n"

    def test_what_was_there_before_the_stop_is_copied(self, tmp_path: Path):
        log = tmp_path / "log"
        console = io.BytesIO()
        content = os.urandom(3 * READ_SIZE + 1)
        log.write_bytes(content)
        assert copy(Pump("console", Sink(console), [GrowingFile(log)])).stop(5)
        assert console.getvalue() == content

    def test_a_file_that_never_came_does_not_delay_the_stop(self, tmp_path: Path):
        assert copy(Pump("console", Sink(io.BytesIO()), [GrowingFile(tmp_path / "log")])).stop(5)

    def test_a_file_that_cannot_be_read_is_left_out_and_said(self, tmp_path: Path, caplog):
        (tmp_path / "log").write_bytes(b"text\n")
        console = io.BytesIO()
        sources = [GrowingFile(tmp_path), GrowingFile(tmp_path / "log")]
        assert copy(Pump("console", Sink(console), sources)).stop(5)
        assert console.getvalue() == b"text\n"
        assert [record.message for record in caplog.records] == [
            f"Stopped reading {tmp_path}: [Errno 21] Is a directory"
        ]

    def test_a_write_ends_with_a_line_and_fits_a_pipe(self, tmp_path: Path):
        sources = []
        for name in "ab":
            (tmp_path / name).write_bytes(b"".join(b"%d\n" % n for n in range(20_000)))
            sources.append(GrowingFile(tmp_path / name, LineFormatter(f"[{name}]:")))
        console = Recorder()
        assert copy(Pump("console", Sink(console), sources)).stop(5)
        assert all(len(data) <= select.PIPE_BUF for data in console.writes)
        assert all(data.endswith(b"\n") for data in console.writes)
        assert len(console.writes) < 200

    def test_reading_one_file_in_parts_does_not_cut_its_lines(self, tmp_path: Path):
        content = b"x" * 99 + b"\n"
        for name in "ab":
            (tmp_path / name).write_bytes(content * 2000)
        console = io.BytesIO()
        assert copy(Pump("c", Sink(console), [GrowingFile(tmp_path / name) for name in "ab"])).stop(
            5
        )
        assert console.getvalue() == content * 4000

    def test_a_line_longer_than_a_read_comes_whole(self, tmp_path: Path):
        (tmp_path / "log").write_bytes(b"x" * (3 * READ_SIZE) + b"\ny")
        console = io.BytesIO()
        assert copy(
            Pump("console", Sink(console), [GrowingFile(tmp_path / "log", LineFormatter("> "))])
        ).stop(5)
        assert console.getvalue() == b"> " + b"x" * (3 * READ_SIZE) + b"\n> y\n"

    @pytest.mark.slow
    def test_no_line_is_lost_while_several_write(self, tmp_path: Path):
        def write(name: str) -> None:
            with (tmp_path / name).open("wb", buffering=0) as file:
                for number in range(5000):
                    file.write(b"%d " % number)
                    file.write(b"x" * (number % 50) + b"\n")

        names = ["a", "b", "c"]
        writers = [threading.Thread(target=write, args=(name,)) for name in names]
        sources = [GrowingFile(tmp_path / name, LineFormatter(f"{name} ")) for name in names]
        with (tmp_path / "console").open("wb") as console:
            copier = copy(Pump("console", Sink(console), sources))
            for writer in writers:
                writer.start()
            for writer in writers:
                writer.join()
            assert copier.stop(20)
        lines = (tmp_path / "console").read_text().splitlines()
        for name in names:
            assert [line for line in lines if line.startswith(name)] == [
                f"{name} {number} {'x' * (number % 50)}" for number in range(5000)
            ]


class TestConsoleThatDoesNotRead:
    @pytest.mark.slow
    def test_stop_does_not_wait_for_it_and_the_other_console_gets_all(self, tmp_path: Path):
        log = tmp_path / "log"
        log.write_bytes(b"0123456789\n" * 100_000)
        other = io.BytesIO()
        with pipe() as (reader, console):
            copier = copy(
                Pump("blocked", Sink(console), [GrowingFile(log)]),
                Pump("other", Sink(other), [GrowingFile(log)]),
            )
            begin = time.monotonic()
            assert not copier.stop(0.5)
            assert time.monotonic() - begin < 3
            assert not copier._thread.is_alive()
            assert os.read(reader, 22) == b"0123456789\n" * 2
        assert other.getvalue() == log.read_bytes()

    def test_nothing_is_lost_if_it_reads_later(self, tmp_path: Path):
        log = tmp_path / "log"
        log.write_bytes(os.urandom(1_000_000))
        with pipe() as (reader, console):
            copier = copy(Pump("console", Sink(console), [GrowingFile(log)]))
            received = bytearray()
            while len(received) < 1_000_000:
                received += os.read(reader, 50_000)
            assert copier.stop(5)
        assert bytes(received) == log.read_bytes()

    def test_a_non_blocking_descriptor_is_no_error(self, tmp_path: Path, caplog):
        log = tmp_path / "log"
        log.write_bytes(b"x" * 200_000)
        with pipe() as (reader, console):
            os.set_blocking(console.fileno(), False)
            copier = copy(Pump("console", Sink(console), [GrowingFile(log)]))
            received = 0
            while received < 200_000:
                received += len(os.read(reader, 50_000))
            assert copier.stop(5)
        assert not caplog.records

    def test_room_that_another_process_took_is_no_error(self, monkeypatch):
        monkeypatch.setattr(copying, "_await_room", lambda *_: True)
        with pipe() as (_, console):
            os.set_blocking(console.fileno(), False)
            sink = Sink(console)
            while sink.write(b"x" * select.PIPE_BUF):
                pass
            assert sink.write(b"x") == 0


class TestConsoleThatIsGone:
    def test_a_broken_pipe_is_said_once_and_ends_only_that_copy(self, tmp_path: Path, caplog):
        log = tmp_path / "log"
        log.write_bytes(b"text\n" * 100_000)
        other = io.BytesIO()
        with pipe() as (reader, console), caplog.at_level(logging.WARNING):
            os.close(reader)
            copier = copy(
                Pump("stdout", Sink(console), [GrowingFile(log)]),
                Pump("stderr", Sink(other), [GrowingFile(log)]),
            )
            assert copier.stop(5)
        assert other.getvalue() == log.read_bytes()
        assert [record.message for record in caplog.records] == [
            "Stopped copying worker output to stdout: [Errno 32] Broken pipe"
        ]

    @pytest.mark.parametrize("opened", [io.BytesIO, lambda: io.FileIO(os.devnull, "wb")])
    def test_a_file_closed_in_this_process_is_said_once(self, opened, tmp_path: Path, caplog):
        log = tmp_path / "log"
        console = opened()
        copier = copy(Pump("stdout", Sink(console), [GrowingFile(log)]))
        console.close()
        log.write_bytes(b"text\n")
        assert copier.stop(5)
        assert len(caplog.records) == 1
        assert "closed file" in caplog.text or "file is closed" in caplog.text

    def test_a_full_disk_is_said_once(self, tmp_path: Path, caplog):
        log = tmp_path / "log"
        log.write_bytes(b"text\n")
        with Path("/dev/full").open("wb", buffering=0) as console:
            assert copy(Pump("stdout", Sink(console), [GrowingFile(log)])).stop(5)
        assert [record.message for record in caplog.records] == [
            "Stopped copying worker output to stdout: [Errno 28] No space left on device"
        ]
