"""The log files of a job: their names, and the end of one, as it grows."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dlrover._util import decoding
from dlrover.spec.jobdir import AgentConfig, JobDir

FILES = 400
"""Most files in the list: the latest ones."""
TAIL = 128 * 1024
"""Bytes of a file's end that are shown first."""
PIECE = 256 * 1024
"""Most bytes that are sent at once."""
PAUSE = 0.5
"""Seconds between two looks at a file."""
BEAT = 15.0
"""Seconds after which a silent stream gets a comment, so that both ends know that it is alive."""
ALIVE = ": still here\n\n"
"""That comment."""
_OF_WORKERS = "**/std*.log"


def names(job_dir: JobDir) -> list[dict[str, Any]]:
    """Return the name, the size and the time of the last change of each log file, the latest first."""
    found: list[dict[str, Any]] = []
    for name, path in _files(job_dir):
        with contextlib.suppress(OSError, UnicodeEncodeError):  # a name that is no text
            name.encode()
            status = path.stat()
            found.append({"name": name, "size": status.st_size, "at": round(status.st_mtime)})
    return sorted(found, key=lambda file: (-file["at"], file["name"]))[:FILES]


def find(job_dir: JobDir, name: str) -> Path | None:
    """Return the log file with a name of the list; None for any other name."""
    return next((path for known, path in _files(job_dir) if known == name), None)


async def tail(path: Path) -> AsyncIterator[str]:
    """Yield the end of a file and what is added to it as server-sent events; begin anew if it is replaced."""
    identity, place, idle = 0, 0, 0.0
    while True:
        piece = await asyncio.to_thread(_read, path, identity, place)
        if piece is not None and (piece.data or piece.fresh):
            text = piece.data.decode(errors="replace")
            value = {"text": text, "fresh": piece.fresh, "cut": piece.fresh and piece.begin > 0}
            yield event(value)
            identity, place, idle = piece.identity, piece.begin + len(piece.data), 0.0
            continue
        await asyncio.sleep(PAUSE)
        idle += PAUSE
        if idle >= BEAT:
            idle = 0.0
            yield ALIVE


def event(value: dict[str, Any]) -> str:
    """Return a part of a log as a server-sent event."""
    return f"data: {msgspec.json.encode(value).decode()}\n\n"


class _Piece(NamedTuple):
    identity: int
    begin: int
    data: bytes
    fresh: bool
    """True if this is the file's first piece: it was not read before, was replaced or cut."""


def _read(path: Path, identity: int, place: int) -> _Piece | None:
    """Return the next bytes of a file; None while it cannot be read."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            fresh = status.st_ino != identity or status.st_size < place
            begin = max(0, status.st_size - TAIL) if fresh else place
            file.seek(begin)
            data = file.read(PIECE)
    except OSError:
        return None
    # A character may be cut at the end of what is written so far; the next look has the rest.
    cut = next((n for n in (1, 2, 3) if data[-n : len(data) - n + 1] >= b"\xc0"), 0)
    whole = data[:-cut] if 0 < cut < len(data) and not _complete(data[-cut:]) else data
    return _Piece(status.st_ino, begin, whole, fresh)


def _complete(end: bytes) -> bool:
    try:
        end.decode()
    except UnicodeDecodeError:
        return False
    return True


def _files(job_dir: JobDir) -> Iterator[tuple[str, Path]]:
    root = job_dir.path
    for path in sorted(root.glob("*.log")):
        yield path.name, path
    for path in sorted(job_dir.evidence.glob("*.txt")):
        yield str(path.relative_to(root)), path
    workers = _workers_logs(job_dir)
    for path in workers.glob(_OF_WORKERS):
        yield f"logs/{path.relative_to(workers)}", path


def _workers_logs(job_dir: JobDir) -> Path:
    """Return the directory of the workers' logs, which ``--log-dir`` moves."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        given = decoding.json(job_dir.agent.read_bytes(), AgentConfig).launch.log_dir
        if given and given != os.devnull:
            return Path(given)
    return job_dir.logs
