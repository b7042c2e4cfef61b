"""Processes of DLRover's own start whatever modules the user's directories have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover._util import start

MODULES = ["dlrover.agent", "dlrover.master", "dlrover.checkpoint.saver.saver", "dlrover.cli.main"]


@pytest.mark.slow
@pytest.mark.parametrize("safe", ["", "1"])
@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_run_as_by_python_m(tmp_path: Path, module: str, safe: str) -> None:
    for name in ("secrets", "pathlib", "asyncio", "json", "sqlite3"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": safe}
    command = [*start.command(module), "--help"]
    shown = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "usage" in shown.stdout.lower()


@pytest.mark.slow
def test_the_package_of_the_parent_is_run(tmp_path: Path) -> None:
    """Another one may be in the search path, or none."""
    (tmp_path / "dlrover").mkdir()
    (tmp_path / "dlrover/__init__.py").write_text("raise SystemExit('another package')")
    path = [entry for entry in sys.path if entry != start.ROOT]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *path])}
    command = [*start.command("dlrover.agent"), "--help"]
    subprocess.run(command, env=env, cwd=tmp_path, check=True, timeout=60, stdout=subprocess.PIPE)


IGNORES = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
ASKS = "import subprocess; raise SystemExit(subprocess.call(['false']))"


@pytest.mark.slow
def test_how_children_end_is_known_where_the_parent_ignores_it(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", IGNORES, *start.command("asks")]
    assert subprocess.run(command, env=env, check=False, timeout=60).returncode == 1


@pytest.mark.slow
def test_the_search_path(tmp_path: Path) -> None:
    """A relative directory in PYTHONPATH is another one where a saver runs."""
    env = {**os.environ, "PYTHONPATH": "modules"}
    shown = subprocess.run(
        start.command("site"),
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = [line.strip(" ,'") for line in shown.stdout.splitlines() if line.startswith("    ")]
    assert found[0] == str(Path(os.__file__).parent)
    assert str(tmp_path / "modules") in found
    assert start.ROOT in found
    assert str(Path(start.__file__).parent) not in found
