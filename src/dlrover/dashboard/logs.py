"""The log files of a job: their names, and the end of one, as it grows."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

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
"""Seconds after which a silent stream gets a comment."""
_OF_WORKERS = "**/std*.log"


def names(job_dir: JobDir) -> list[dict[str, Any]]:
    """Return the name, the size and the time of the last change of each log file, the latest first."""
    found: list[dict[str, Any]] = []
    for name, path in _files(job_dir):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append({"name": name, "size": status.st_size, "at": round(status.st_mtime)})
    return sorted(found, key=lambda file: (-file["at"], file["name"]))[:FILES]


def find(job_dir: JobDir, name: str) -> Path | None:
    """Return the log file with a name of the list; None for any other name."""
    return next((path for known, path in _files(job_dir) if known == name), None)


async def tail(path: Path) -> AsyncIterator[str]:
    """Yield the end of a file and what is added to it as server-sent events; begin anew if it is replaced."""
    identity, place, idle = None, 0, 0.0
    while True:
        now, begin, data = await asyncio.to_thread(_read, path, identity, place)
        if data or now != identity:
            fresh = now != identity
            text = data.decode(errors="replace")
            value = {"text": text, "fresh": fresh, "cut": begin > 0 and fresh}
            yield f"data: {msgspec.json.encode(value).decode()}\n\n"
            identity, place, idle = now, begin + len(data), 0.0
            continue
        await asyncio.sleep(PAUSE)
        idle += PAUSE
        if idle >= BEAT:
            idle = 0.0
            yield ": still here\n\n"


def _read(path: Path, identity: int | None, place: int) -> tuple[int | None, int, bytes]:
    """Return the file's identity, the position of the next bytes, and these bytes."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != identity or status.st_size < place:
                place = max(0, status.st_size - TAIL)
                identity = None
            file.seek(place)
            data = file.read(PIECE)
            # A character may be cut at the end of what is written so far; the next look has the rest.
            cut = next((n for n in (1, 2, 3) if data[-n : -n + 1 or None] >= b"\xc0"), 0)
            whole = data[:-cut] if cut and len(data) > cut and not _complete(data[-cut:]) else data
            return status.st_ino, place, whole
    except OSError:
        return identity, place, b""


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
        given = msgspec.json.decode(job_dir.agent.read_bytes(), type=AgentConfig).launch.log_dir
        if given and given != os.devnull:
            return Path(given)
    return job_dir.logs
