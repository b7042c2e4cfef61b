"""The implementations of the compiled functions: the twin, and the library with each set of instructions."""

from collections.abc import Iterator

import pytest

from dlrover._native import library

VARIANTS = ["avx512", "avx2", "plain"]


@pytest.fixture(params=["twin", *VARIANTS])
def implementation(request: pytest.FixtureRequest) -> Iterator[library.Loaded]:
    """One implementation. After the test the library uses the machine's best instructions again."""
    if request.param == "twin":
        yield library.load("off")
        return
    loaded = library.load("auto")
    if loaded.library is None:
        pytest.skip(loaded.reason)
    if not loaded.library.dlrover_use_variant(request.param.encode()):
        pytest.skip(f"this machine lacks {request.param}")
    yield loaded
    assert any(loaded.library.dlrover_use_variant(name.encode()) for name in VARIANTS)
