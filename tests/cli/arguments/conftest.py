"""Where the command lines are read, and torchrun, which they are compared with."""

from __future__ import annotations

import os

import pytest

from tests.cli.arguments.lines import actions


@pytest.fixture(autouse=True)
def _script(tmp_path, monkeypatch):
    """A directory with a training script and a package, and no option set by the environment."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "pkg").mkdir()


@pytest.fixture(scope="module")
def torchrun():
    run = pytest.importorskip("torch.distributed.run")
    if "shutdown_timeout" not in actions(run.get_args_parser()):
        pytest.skip("this torchrun is older than 2.13 and has fewer options")
    return run
