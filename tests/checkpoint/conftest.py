"""Directories for checkpoints whose savers are gone when the test is over."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py", "adapters/test_*.py"]  # they need the extra "torch"


class Directory(type(Path())):
    """A checkpoint directory that knows its savers."""

    def savers(self) -> list[psutil.Process]:
        """The savers that serve it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "--identity" in words and str(self) in words:
                    found.append(process)
        return found

    def stop_saver(self) -> None:
        """Ask the saver to leave, and wait until it has."""
        for process in self.savers():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        self.until_no_saver()

    def until_no_saver(self, timeout: float = 15.0) -> None:
        """Wait until the saver has left by itself."""
        end = time.monotonic() + timeout
        while self.savers():
            assert time.monotonic() < end, "the saver stays"
            time.sleep(0.02)

    def kill_savers(self) -> None:
        """End the savers, of directories in this one too, at once."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "--identity" in words and any(str(self) in word for word in words):
                    process.kill()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    path = Directory(tmp_path / "checkpoints")
    yield path
    path.kill_savers()


@pytest.fixture
def two_nodes(directory: Directory) -> list[Directory]:
    """The same directory twice: each of the two has a saver of its own, as nodes have."""
    directory.mkdir()
    for name in ("a", "b"):
        (directory / name).symlink_to(directory)
    return [Directory(directory / name) for name in ("a", "b")]
