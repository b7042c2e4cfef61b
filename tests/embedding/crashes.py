"""Labelled points of what tables write, at any of which a process can be made to end at once."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrover._util import files as atomic
from dlrover.checkpoint.storage import local
from dlrover.embedding import files
from dlrover.embedding.tiers.cold import ColdRows

THINGS = {
    "segment": r"segment-\d+",
    "lock": r"table-.*\.lock",
    "table": r"table-\d+-\w+",
    "checkpoint": r"embedding-\w+",
    "begun": r"\.?begun.*",
    "part": r"part-\d+\.rows",
    "manifest": r"\.?manifest\.json.*",
    "saved": r"\.?saved.*",
}
"""What a file or directory of a name is."""
CALLS = {
    "pwrite": os, "posix_fallocate": os, "unlink": os, "mkdir": os, "rmdir": os, "fsync": os, "replace": os,
    "flock": fcntl,
}  # fmt: skip


def _points(calls: dict[str, str]) -> list[str]:
    return [
        f"{call} {thing} {when}"
        for call, things in calls.items()
        for thing in things.split()
        for when in ("before", "half", "after")
        if when != "half" or call in ("pwrite", "write")
    ]


TIER = _points(
    {
        "pwrite": "segment compacted",
        "posix_fallocate": "segment",
        "unlink": "segment compacted",
        "mkdir": "table",
        "flock": "lock",
    }
)
FILE = TIER + _points({"write": "saved", "fsync": "saved", "replace": "saved"})
"""Points of a table in one process."""
SERVERS = TIER + _points(
    {
        "write": "begun part manifest",
        "fsync": "begun part checkpoint manifest",
        "replace": "begun manifest",
        "mkdir": "checkpoint",
        "unlink": "manifest begun part",
        "rmdir": "checkpoint",
    }
)
"""Points of tables on servers, and of their checkpoints."""


class Crash:
    """Ends this process by SIGKILL when it is at a point for the n-th time; from its beginning, not before.

    Args:
        point: One of the lists above; empty: never.
        nth: Which time.
    """

    def __init__(self, point: str, nth: int) -> None:
        self._wanted, self._left = point, nth
        self._own = threading.local()

    def aside(self, call: Callable[[], Any]) -> Any:
        """Call something whose files are not the table's."""
        self._own.aside = True
        try:
            return call()
        finally:
            self._own.aside = False

    def begin(self) -> None:
        """Watch all calls of this process."""
        for name, owner in CALLS.items():
            self._watch(owner, name)
        self._watch(local._Eager, "write", lambda file: file._file.fileno())
        self._watch(files, "_write", lambda file: file.fileno())
        self._watch(atomic, "_fill")
        compact = ColdRows._compact

        def marked(cold: ColdRows, victim: int) -> bool:
            before, self._own.compacting = getattr(self._own, "compacting", False), True
            try:
                return compact(cold, victim)
            finally:
                self._own.compacting = before

        ColdRows._compact = marked  # type: ignore[method-assign]

    def _watch(self, owner: Any, name: str, file_of: Callable[[Any], Any] | None = None) -> None:
        called = getattr(owner, name)
        call = {"_write": "write", "_fill": "write"}.get(name, name)

        def watched(where: Any, *args: Any, **options: Any) -> Any:
            thing = self._thing(file_of(where) if file_of else where)
            self._reach(f"{call} {thing} before")
            if self._wanted == f"{call} {thing} half":
                self._left -= 1
                if not self._left:
                    called(where, _half(args[0]), *args[1:], **options)
                    if name == "write":
                        where._file.flush()
                    self._end()
            result = called(where, *args, **options)
            self._reach(f"{call} {thing} after")
            return result

        setattr(owner, name, watched)

    def _thing(self, where: Any) -> str:
        if getattr(self._own, "aside", False):
            return ""
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else where
        name = Path(os.fsdecode(path)).name
        thing = next((t for t, pattern in THINGS.items() if re.fullmatch(pattern, name)), "")
        compacting = thing == "segment" and getattr(self._own, "compacting", False)
        return "compacted" if compacting else thing

    def _reach(self, point: str) -> None:
        if point == self._wanted:
            self._left -= 1
            if not self._left:
                self._end()

    def _end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


def _half(data: Any) -> Any:
    """Return about half of bytes, of records, or of a list of bytes."""
    if isinstance(data, list):
        return [*data[: len(data) // 2], *(piece[: len(piece) // 2] for piece in data[len(data) // 2 :][:1])]  # fmt: skip
    return data[: len(data) // 2 + (len(data) > 1)] if len(data) else data
