"""Files are replaced whole."""

import os
import stat
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
