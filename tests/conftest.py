"""For all tests: nothing is written to the user's own state directory."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("DLROVER_STATE_DIR")
    os.environ["DLROVER_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["DLROVER_STATE_DIR"]
    else:
        os.environ["DLROVER_STATE_DIR"] = before
