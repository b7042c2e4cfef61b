"""A log file on a full disk loses lines; it does not fail, and says so afterwards."""

import logging
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover._util.logs import LogFile


@pytest.fixture
def log(tmp_path: Path):
    handler = LogFile(tmp_path / "log")
    logger = logging.getLogger("dlrover.test.full_disk")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    yield logger.info
    logger.removeHandler(handler)
    handler.close()


def test_a_full_disk_costs_lines_and_prints_nothing(
    tmp_path: Path, log: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    log("first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        for number in range(1000):
            log("lost %d of very many lines that a full disk does not take", number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log("with room again")
    log("last")
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("first", "last")
    assert "with room again" in lines[-3]
    assert lines[-2] == "The disk was full: lines before this one may be missing."
    assert capsys.readouterr().err == ""
