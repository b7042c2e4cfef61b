"""Directories of a job on the machines of its cluster."""

from __future__ import annotations

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
        ConfigurationError: there is none.
    """

    def in_state(state: Path) -> Path:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = JobDir(state / "jobs" / place)
        made.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in content.items():
            _put(made.path / Path(name).name, data)
        return made.path

    return JobDir(config.in_state_dir(config.environ(), in_state)[1])


def _put(path: Path, data: bytes) -> None:
    """Write a file, unless it has this content: an actor that comes back to its directory must not need room on the disk."""
    if not (path.exists() and path.read_bytes() == data):
        files.write_atomically(path, data, mode=0o600)
