"""The list of the modules that a program loads, which its next zygote imports."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from pathlib import Path

from dlrover import __version__
from dlrover._util.files import write_atomically
from dlrover.rpc.messages import MODULES_LIMIT
from dlrover.spec.job import Entry, LaunchSpec

logger = logging.getLogger(__name__)


def content(listed: Path) -> bytes:
    """Return a list that a worker has written, for other nodes; empty if it cannot be read or is too long."""
    try:
        data = listed.read_bytes()
    except OSError as error:
        logger.info("The list of modules is not passed on: %s", error)
        return b""
    return data if len(data) <= MODULES_LIMIT else b""


class ModuleList:
    """The list of one program, in the user's cache; nothing is kept without a cache, or for a command.

    A program is known by its entry, file, interpreter and search path, and by the version of DLRover.
    """

    def __init__(
        self, cache: Path | None, launch: LaunchSpec, python: str, search_path: str
    ) -> None:
        self._file: Path | None = None
        if cache is not None and launch.entry is not Entry.COMMAND:
            target = launch.target
            if launch.entry is not Entry.MODULE:
                target = os.path.abspath(target)
            key = json.dumps([launch.entry.value, target, python, search_path, __version__])
            name = hashlib.sha256(key.encode()).hexdigest()[:32]
            self._file = cache / "modules" / f"{name}.json"

    def find(self) -> str:
        """Return the path of the list; empty if there is none."""
        return str(self._file) if self._file is not None and self._file.is_file() else ""

    def keep(self, listed: Path) -> None:
        """Copy a list that a worker has written; a cache that cannot be written keeps nothing."""
        if self._file is None:
            return
        try:
            data = listed.read_bytes()
            with contextlib.suppress(FileNotFoundError):
                if self._file.read_bytes() == data:
                    return
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._file, data, 0o600)
        except OSError as error:
            logger.info("The list of modules is not kept for the next run: %s", error)

    def forget(self) -> None:
        """Delete the list: forks with these modules would differ from new processes."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
