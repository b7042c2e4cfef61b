"""Directories of a job on the machines of its cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from dlrover import config
from dlrover._util import files
from dlrover.spec.jobdir import JobDir


def make(place: str, content: Mapping[str, bytes]) -> JobDir:
    """Make a job directory of this name on this machine, below the first state directory that can be written.

    Args:
        place: The name.
        content: Files that only this user can read, by name.

    Raises:
        RuntimeError: there is none.
    """
    wanted, *others = config.state_dirs(config.environ())
    for state in (wanted, *others):
        made = JobDir(state / "jobs" / place)
        with contextlib.suppress(OSError):
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            if state is not wanted and state.stat().st_uid != os.getuid():
                continue  # another user made it, perhaps to read or to replace what is written there
            made.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, data in content.items():
                _put(made.path / Path(name).name, data)
            return made
    raise RuntimeError("no state directory of this machine can be written: set DLROVER_STATE_DIR")


def _put(path: Path, data: bytes) -> None:
    """Write a file, unless it has this content: an actor that comes back to its directory must not need room on the disk."""
    if not (path.exists() and path.read_bytes() == data):
        files.write_atomically(path, data, mode=0o600)
