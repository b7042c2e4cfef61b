"""The actor of a job's master: runs the ordinary master, relays what reaches it only by Ray, ends what outlives the job."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import ray

from dlrover._util import decoding, files
from dlrover.errors import ExitCode
from dlrover.master import app
from dlrover.master.files import load_config
from dlrover.ray import cluster, places, platform
from dlrover.ray.machine import job as jobs
from dlrover.spec.jobdir import OUTCOME_ROOM, JobDir, MasterAddress

logger = logging.getLogger(__name__)

SILENCE = 30.0
"""Seconds without a sign of life of the command that started a job in the foreground, after which the job ends."""
POLL = 0.1
"""Seconds between looks at the files of the master."""
PATIENCE = 1.0
"""Seconds that a call for news waits before it answers that there are none."""
CALLS = 10_000
"""Calls that the actor serves at once: each node waits in one for news of the master."""
MOST_OUTPUT = 4 << 20
"""Bytes of output kept while the command does not take them; nodes wait meanwhile."""
FINISH_WAIT = 20.0
"""Seconds that a node gets to end and to send its last output when the job has ended."""
READ = 1 << 18


@ray.remote
class MasterActor:
    """The master of one job. Ray restarts it; what runs is adopted. Its methods never compute."""

    def __init__(self, data: bytes) -> None:
        self._data, self._job = data, jobs.decode(data)
        self._dir = self._prepare()
        self._output: collections.deque[tuple[int, bytes]] = collections.deque()
        self._size = 0
        self._heard, self._abandoned = True, False
        self._over = False
        self._taken = False
        self._streams: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._last_stream = 0
        threading.Thread(target=self._or_again, args=(self._run,), daemon=True).start()

    # ---- called by nodes

    async def moved(self, known: str) -> str:
        """Return the master's address as soon as it is another one than ``known``."""
        while (address := self._address()) in ("", known):  # noqa: ASYNC110 - another thread
            await asyncio.sleep(POLL)
        return address

    async def show(self, chunks: list[tuple[int, bytes]]) -> None:
        """Take output of a node; wait while the command takes none."""
        while self._size > MOST_OUTPUT and not self._taken:  # noqa: ASYNC110 - rare
            await asyncio.sleep(POLL)
        self._output.extend(chunks)
        self._size += sum(len(data) for _, data in chunks)

    # ---- called by commands

    async def token(self) -> str:
        """Return the job's token, by which a command knows its job."""
        return self._job.token

    async def news(
        self, of: bytes, position: int
    ) -> tuple[list[tuple[int, bytes]], bytes, bytes, bool]:
        """Return new output, events, and whether the job has ended.

        The events are their first line and those from a position in their file, or from its beginning unless its first
        line is ``of``.
        """
        until = time.monotonic() + PATIENCE
        while True:
            self._heard = True
            over, first = self._over, _first_line(self._dir.events)
            happened = _read_from(self._dir.events, position if of == first else 0)
            if self._output or happened or over or time.monotonic() > until:
                chunks = list(self._output)
                self._output.clear()
                self._size = 0
                return chunks, first, happened, over
            await asyncio.sleep(POLL)

    async def files(self) -> dict[str, bytes]:
        """Return the files of the job's directory that commands read."""
        return await asyncio.to_thread(_collect, self._dir)

    async def dismiss(self) -> None:
        """Leave: the command has everything."""
        self._taken = True

    async def abandon(self) -> None:
        """End the job at once: the command that it belongs to is gone."""
        self._abandoned = True

    async def open(self) -> int:
        """Open a connection to the master's port and return its number."""
        host, _, port = self._address().rpartition(":")
        number = self._last_stream = self._last_stream + 1
        self._streams[number] = await asyncio.open_connection(host.strip("[]"), int(port))
        return number

    async def send(self, number: int, data: bytes) -> None:
        """Send bytes over a connection; none ends its sending side."""
        writer = self._streams[number][1]
        if data:
            writer.write(data)
            await writer.drain()
        else:
            self._streams.pop(number)[1].close()

    async def receive(self, number: int) -> bytes:
        """Return the next bytes from a connection; none at its end."""
        pair = self._streams.get(number)
        with contextlib.suppress(OSError):
            return await pair[0].read(READ) if pair is not None else b""
        return b""

    # ---- the master's life

    def _prepare(self) -> JobDir:
        master = msgspec.structs.replace(self._job.master, host=ray.util.get_node_ip_address())
        names = JobDir(Path())
        content = {
            names.token.name: self._job.token.encode(),
            names.job.name: msgspec.json.encode(master),
            jobs.FILE: self._data,
        }
        ended = cluster.record(self._job.name) or {}  # what remains of the job if it has ended
        made = places.make(self._job.place, ended | content)
        if not made.outcome.exists():
            # A disk may be full on which an earlier life has reserved the room.
            with contextlib.suppress(OSError):
                files.reserve(made.outcome, OUTCOME_ROOM)
        return made

    def _address(self) -> str:
        """Return the address of this actor's master; empty until it listens."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            known = decoding.json(self._dir.master.read_bytes(), MasterAddress)
            return known.address if known.pid == os.getpid() else ""
        return ""

    def _or_again(self, work: Callable[[], None]) -> None:
        """Do what a thread does; whatever it raises, Ray starts this actor again, which goes on from the journal."""
        try:
            work()
        except BaseException:
            logger.exception("The master's actor fails and is started again")
            os._exit(1)

    def _run(self) -> None:
        """Run the master to the job's end, then end everything that the job started, and this actor."""
        if self._job.foreground:
            threading.Thread(target=self._or_again, args=(self._guard,), daemon=True).start()
        code = (
            ExitCode.SUCCESS
            if self._dir.outcome.exists()
            else app.main(["--job-dir", str(self._dir.path)])
        )
        if not self._dir.outcome.exists():
            logger.error("The master ended with exit code %d and is started again", code)
            os._exit(code or 1)  # Ray starts this actor again
        self._finish_nodes()
        self._reap()
        cluster.keep_record(self._job.name, _collect(self._dir))
        self._over = True
        self._leave()

    def _guard(self) -> None:
        """End the job once the command in the foreground is silent for too long."""
        looks = 0
        while looks < SILENCE / POLL and not self._abandoned:
            self._heard = False
            time.sleep(POLL)  # noqa: TID251 - a thread of its own
            # Not by a clock: a process that is stopped hears nothing.
            looks = 0 if self._heard else looks + 1
        logger.warning("The command that started the job is gone; so is the job")
        platform.request_no_more()  # the master runs on, and would replace what is ended
        self._reap()
        self._taken = True
        self._leave()

    def _finish_nodes(self) -> None:
        """Let nodes end in order, with their last output."""
        found = [
            cluster.actor(node.handle) for node in jobs.found_nodes(self._job.name, cluster.names())
        ]
        ends = [node.finish.remote() for node in found if node is not None]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=FINISH_WAIT)

    def _reap(self) -> None:
        """End all nodes and remove all placement groups of the job."""
        for node in jobs.found_nodes(self._job.name, cluster.names()):
            cluster.end_actor(node.handle)
        cluster.remove_groups(f"{self._job.name}/node/")

    def _leave(self) -> None:
        """Wait until the command has the outcome, if there is one, and end this actor for good."""
        until = time.monotonic() + SILENCE
        while self._job.foreground and not self._taken and time.monotonic() < until:
            time.sleep(POLL)  # noqa: TID251 - a thread of its own
        cluster.end_actor(jobs.master_name(self._job.name))


def _first_line(path: Path) -> bytes:
    """Return the first line of a file, which differs between the histories of a job's masters."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.readline()
    return b""


def _read_from(path: Path, position: int) -> bytes:
    """Return whole lines of a file from a position."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(position)
        data = file.read(READ)
        if b"\n" not in data:
            data += file.readline()
        return data[: data.rfind(b"\n") + 1]
    return b""


def _collect(job_dir: JobDir) -> dict[str, bytes]:
    """Return the files of a job directory that say what happened, by name; the journal is among them."""
    config_ = load_config(job_dir)
    paths = [job_dir.token, job_dir.events, job_dir.outcome, job_dir.master_log]
    found = {path.name: path.read_bytes() for path in paths if path.exists()}
    own = msgspec.structs.replace(config_, journal="file:")
    found[job_dir.job.name] = msgspec.json.encode(own)
    scheme, _, place = config_.journal.partition(":")
    journal = Path(place) if place else job_dir.journal
    if scheme == "file" and journal.exists():
        try:
            found[job_dir.journal.name] = _copy_of(journal)
        except (sqlite3.Error, OSError) as error:  # the outcome must not wait for room on a disk
            logger.warning("The journal is left out of the job's files: %s", error)
    return found


def _copy_of(journal: Path) -> bytes:
    """Return a consistent copy of a SQLite file that a master may be writing."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / journal.name
        with (
            contextlib.closing(sqlite3.connect(journal)) as source,
            contextlib.closing(sqlite3.connect(copy)) as to,
        ):
            source.backup(to)
        return copy.read_bytes()
