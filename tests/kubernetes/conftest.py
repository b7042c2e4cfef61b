"""A real control plane for each process that runs tests, and a namespace for each test.

A test that asks for `control_plane` is marked ``slow`` and ``kubernetes``. Where no control plane can be
had it is skipped; with the variable CI set only where the machine is one that cannot build it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kubernetes import assets
from tests.kubernetes.controlplane import ControlPlane, available
from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet

TIMEOUT = 120
"""Seconds for a test that names no other limit: the first one starts the control plane."""
PROGRAMS = pytest.StashKey[Path | str]()
"""Where the programs are, or why there are none."""
PLANE = pytest.StashKey[ControlPlane | None]()
"""The control plane while it runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(_needs_control_plane, items):
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.kubernetes)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Find or build the programs here: no test's time limit is running."""
    if any(map(_needs_control_plane, session.items)) and not session.config.option.collectonly:
        session.config.stash[PROGRAMS] = _programs()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    plane = item.config.stash.get(PLANE, None)
    if plane is not None and _needs_control_plane(item):
        plane.wake()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let the control plane rest while the tests that follow do not need it."""
    plane = item.config.stash.get(PLANE, None)
    if plane is not None and not (nextitem is not None and _needs_control_plane(nextitem)):
        plane.rest()


def _needs_control_plane(item: pytest.Item) -> bool:
    return "control_plane" in getattr(item, "fixturenames", ())


def _programs() -> Path | str:
    missing = available()
    try:
        return missing or assets.find()
    except assets.UnavailableError as error:
        return str(error)
    except RuntimeError as error:
        if os.environ.get("CI"):
            raise pytest.UsageError(str(error)) from error
        return str(error)


@pytest.fixture(scope="session")
def control_plane(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """etcd, API server, controller manager and scheduler."""
    programs = request.config.stash[PROGRAMS]
    if isinstance(programs, str):
        pytest.skip(f"no Kubernetes control plane: {programs}")
    plane = ControlPlane(programs, tmp_path_factory.mktemp("kubernetes"))
    try:
        plane.start()
        request.config.stash[PLANE] = plane
        yield plane
    finally:
        request.config.stash[PLANE] = None
        plane.stop()


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own, with its default service account."""
    name = f"test-{secrets.token_hex(4)}"
    control_plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    control_plane.wait_for_account(name)
    yield name
    control_plane.call("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def cluster(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Cluster:
    """With what an operator needs; it is started by the test."""
    return Cluster(control_plane, namespace, tmp_path)


@pytest.fixture
def kubelet(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> Iterator[Callable[..., Kubelet]]:
    """Starts a kubelet with nodes of the test's own: ``kubelet(nodes=2, cpu="8", ...)``."""
    started: list[Kubelet] = []

    def start(nodes: int = 1, **capacity: str) -> Kubelet:
        folder = tmp_path / f"kubelet-{len(started)}"
        one = Kubelet(control_plane, folder, namespace, nodes, capacity)
        started.append(one)
        one.start()
        return one

    yield start
    for one in started:
        one.stop()
