"""A cluster of machines for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes import machines


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[machines.Cluster]:
    """Machines that are gone after the test."""
    (tmp_path / "machines").mkdir()
    with machines.cluster(tmp_path / "machines") as made:
        yield made
