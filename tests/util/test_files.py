"""Files are replaced whole."""

import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover._util import files


def test_replaces_content_and_sets_mode(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text("old")
    files.write_atomically(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["token"]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path):
    target = tmp_path / "directory"
    target.mkdir()
    (target / "file").touch()
    with pytest.raises(OSError, match="directory"):
        files.write_atomically(target, b"new")
    assert os.listdir(tmp_path) == ["directory"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; `fill` fills it."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


def test_reserved_room_serves_where_the_disk_is_full(full_disk: Path) -> None:
    path = full_disk / "outcome"
    files.reserve(path, 8192)
    fill(full_disk)
    for other in (full_disk / "other", path):
        with pytest.raises(OSError, match="No space left"):
            files.write_atomically(other, bytes(8193))
    files.write_atomically(path, b"x" * 8192)
    assert path.read_bytes() == b"x" * 8192
    assert sorted(os.listdir(full_disk)) == ["filler", "outcome"]


def test_reserved_room_is_given_back(tmp_path: Path) -> None:
    for end in (files.release, lambda path: files.write_atomically(path, b"")):
        files.reserve(tmp_path / "outcome", 8192)
        assert os.listdir(tmp_path) == [".outcome.reserved"]
        end(tmp_path / "outcome")
    assert os.listdir(tmp_path) == ["outcome"]
