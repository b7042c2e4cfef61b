"""For all tests: no writing to the user's own state directory, no limit on one hypothesis example.

Examples are the same in every run: what fails, fails again. How long one takes says how busy the machine is.
A test process that stands still writes its stacks and ends, so that its test is named and the others go on.
"""

import faulthandler
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
SLACK = 60.0
"""Seconds that a test may take longer than its limit, which pytest-timeout may be unable to enforce."""
BETWEEN = 300.0
"""Seconds without a test until a process of pytest-xdist counts as stuck."""
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Heavy tests run only where ``-m`` names them, whatever else it says. Programs of tests end by Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[STDERR] = os.dup(2)  # which is captured later
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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Before the first test there is no limit: processes of pytest-xdist wait for the slowest import."""
    try:
        return (yield)
    finally:
        _end_after(BETWEEN, item.config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _end_after(_limit(item), item.config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that has failed has no limit any more: pytest and pytest-timeout have taken theirs away."""
    _end_after(_limit(item), item.config)


def pytest_unconfigure() -> None:
    faulthandler.cancel_dump_traceback_later()


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    given = item.config.getoption("timeout") or item.config.getini("timeout")
    return float(marker.args[0] if marker else given) + SLACK


def _end_after(seconds: float, config: pytest.Config) -> None:
    """Write all stacks then; pytest-xdist puts another process in place of one that ends."""
    ends = "PYTEST_XDIST_WORKER" in os.environ
    faulthandler.dump_traceback_later(seconds, file=config.stash[STDERR], exit=ends)


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
