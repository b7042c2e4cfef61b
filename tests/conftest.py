"""For all tests: no writing to the user's own state directory, no limit on one hypothesis example.

Examples are the same in every run: what fails, fails again. How long one takes says how busy the machine is.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.directories import Directory
from tests.support.forks import Forks

os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait for work take no CPU from other tests
settings.register_profile("project", deadline=None, derandomize=True)
settings.register_profile("few", deadline=None, derandomize=True, max_examples=10)
settings.load_profile("project")


def pytest_configure(config: pytest.Config) -> None:
    """Heavy tests run only where ``-m`` names them, whatever else it says. Programs of tests end by Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = config.option.markexpr
    if "heavy" not in chosen:
        config.option.markexpr = f"({chosen}) and not heavy" if chosen else "not heavy"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage among modules and tests, which stay, nor look at them ever after."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first: at the end, no test process waits long for the last test of another one."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name what fails at once: a run that is cut off, or whose pytest fails itself, prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        why = report.longreprtext.strip().splitlines()[-1:]
        sys.stderr.write(" ".join([f"\n{report.when.upper()} FAILED", report.nodeid, *why]) + "\n")


@pytest.fixture(autouse=True, scope="session")
def _shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for all test processes: a program's modules are imported once for all workers of a job."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLROVER_CACHE_DIR", str(cache))
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("DLROVER_STATE_DIR")
    os.environ["DLROVER_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["DLROVER_STATE_DIR"]
    else:
        os.environ["DLROVER_STATE_DIR"] = before


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    """A directory for checkpoints, with none in it; its savers are gone after the test."""
    path = Directory(tmp_path / "checkpoints")
    yield path
    path.kill_savers()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts programs that need PyTorch without importing it again."""
    found = Forks(tmp_path_factory.mktemp("forks"))
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _no_simulation_left() -> Iterator[None]:
    yield
    if "tests.simulation.cluster" in sys.modules:
        sys.modules["tests.simulation.cluster"].close_all()
