"""Random sequences of operations equal those on a plain dict, whatever lies on disk and wherever a process ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dlrover._native import library
from tests.embedding.crashes import FILE, SERVERS
from tests.embedding.sequences import case, sequence

needs_library = pytest.mark.skipif(
    library.load("auto").library is None, reason="the compiled library is not there"
)
PART = 2500


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(12), 99])
def test_a_sequence_equals_a_dict(seed: int, tmp_path: Path) -> None:
    sequence(seed, tmp_path)


@needs_library
@pytest.mark.heavy
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_sequences_equal_a_dict(part: int, tmp_path: Path) -> None:
    """Each labelled point has ended a process."""
    reached = set()
    for seed in range(part * PART, (part + 1) * PART):
        directory = tmp_path / str(seed)
        directory.mkdir()
        ended = sequence(seed, directory)
        reached.add((case(seed).on_servers, ended))
        shutil.rmtree(directory)
    wanted = {(False, point) for point in FILE} | {(True, point) for point in SERVERS}
    assert not wanted - reached
