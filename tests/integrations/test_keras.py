"""`HashEmbedding` in Keras, with each of its backends."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "keras_rows.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_rows_learn_with_any_backend(backend: str, tmp_path: Path) -> None:
    for name in ("keras", backend):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    environment = os.environ | {"KERAS_BACKEND": backend, "KERAS_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"keras {backend} learned" in done.stdout
