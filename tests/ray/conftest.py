"""A real Ray cluster on this machine: ``ray start --block`` in processes of its own, with a home and a token of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.process.conftest import Launch, Runner
from tests.services import free_port
from tests.waiting import POLL, until

STARTS = 3
"""Attempts to start a Ray node: Ray gives one 30 s, which a busy machine may take."""
START = 45.0
END = 60.0
"""Seconds for what a job leaves in the cluster to go away."""
HEAD = ("--head", "--include-dashboard=false", "--ray-client-server-port={}", "--num-cpus=0")

OF_RAY_DATA = ("AutoscalingCoordinator", "_dataset_stats_actor")
"""Namespaces of the actors that Ray Data leaves in each cluster."""


class Cluster:
    """A head without CPUs, on which masters run, and nodes with one CPU each, or more."""

    def __init__(self, nodes: int, cpus: int = 1) -> None:
        self._cpus = cpus
        self.directory = Path(
            tempfile.mkdtemp(prefix="ray", dir="/tmp")
        )  # sockets need short paths
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("DLROVER_")},
            "HOME": str(self.directory),
            "RAY_USAGE_STATS_ENABLED": "0",
            "DLROVER_STATE_DIR": str(self.directory / "state"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.address = f"{_own_address()}:{free_port()}"
        port, client = self.address.rpartition(":")[2], str(free_port())
        head = [f"--port={port}", f"--temp-dir={self.directory / 't'}"]
        self._start([*head, *(word.format(client) for word in HEAD)])
        self.client_address = f"ray://{self.address.rpartition(':')[0]}:{client}"
        self.add_nodes(nodes)

    def add_nodes(self, count: int) -> None:
        """Start more nodes."""
        self._start([f"--address={self.address}", f"--num-cpus={self._cpus}"], count)

    def _start(self, options: list[str], count: int = 1) -> None:
        missing = count
        for _ in range(STARTS):
            for _ in range(missing):  # one after the other: the time of each start is limited
                node, log = self._begin(options)
                end = time.monotonic() + START
                while not _decided(node, log) and time.monotonic() < end:
                    time.sleep(POLL)
                if node.poll() is None and "Ray runtime started" in log.read_text():
                    self._nodes.append(node)
                    missing -= 1
                else:
                    _end(node)
            if not missing:
                return
        pytest.fail(f"not all Ray nodes could be started:\n{log.read_text()}")

    def _begin(self, options: list[str]) -> tuple[subprocess.Popen[bytes], Path]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        command += ["--object-store-memory=80000000"]
        log = self.directory / f"start-{secrets.token_hex(2)}"
        with log.open("wb") as out:
            node = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                env=self.env, stdout=out, stderr=out, cwd=self.directory, start_new_session=True,
            )  # fmt: skip
        return node, log

    def options(self, nodes: int, **options: object) -> list[str]:
        """Options of ``dlrover-run`` for this cluster."""
        own = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return ["--platform=ray", f"--ray-address={self.address}", f"--nnodes={nodes}", *own]

    # ---- processes of jobs

    def agents(self) -> list[psutil.Process]:
        """The agents of all jobs, in the order of their start."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "dlrover.agent" in words and str(self.directory) in " ".join(words):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def workers(self) -> list[psutil.Process]:
        """The training processes of all jobs."""
        return [w for agent in self.agents() for z in _children(agent) for w in _children(z)]

    def masters(self) -> list[psutil.Process]:
        """The processes of the master actors."""
        return self.titled("MasterA")

    def titled(self, title: str) -> list[psutil.Process]:
        """The processes of actors and tasks whose names begin so, up to 10 characters."""
        found = []
        for node in self._nodes:
            with contextlib.suppress(psutil.Error):
                below = psutil.Process(node.pid).children(recursive=True)
                found += [one for one in below if one.name().startswith(f"ray::{title}")]
        return found

    def left(self) -> list[object]:
        """Actors, placement groups and agents that are still there."""
        import ray

        groups = ray.util.placement_group_table().values()
        rest: list[object] = [g["name"] for g in groups if g["state"] != "REMOVED"]
        actors = ray.util.list_named_actors(all_namespaces=True)
        ours = [actor for actor in actors if actor["namespace"] not in OF_RAY_DATA]
        return [*rest, *ours, *self.agents()]

    def is_empty(self) -> None:
        """Fail unless everything that jobs made goes away."""
        until(lambda: not self.left(), END, "an empty cluster", lambda: f": {self.left()}")

    def close(self) -> None:
        """End all processes of the cluster, by their groups."""
        for node in reversed(self._nodes):
            _end(node)
        shutil.rmtree(self.directory, ignore_errors=True)


def _decided(node: subprocess.Popen[bytes], log: Path) -> bool:
    return node.poll() is not None or "Ray runtime started" in log.read_text()


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children()
    return []


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("192.0.2.1", 9))  # sends nothing
        return str(sock.getsockname()[0])


def _end(node: subprocess.Popen[bytes]) -> None:
    below = []
    with contextlib.suppress(psutil.Error):
        below = psutil.Process(node.pid).children(recursive=True)
    node.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(20)
    for process in below:
        with contextlib.suppress(psutil.Error):
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; scripts/test-engines installs it")
    with connected(nodes=3) as cluster:
        yield cluster


@contextlib.contextmanager
def connected(nodes: int, cpus: int = 1) -> Iterator[Cluster]:
    """A cluster to which this process is connected."""
    before = dict(os.environ)
    # Before Ray is imported, which reads them once.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    cluster = Cluster(nodes, cpus)
    import ray

    try:
        ray.init(cluster.address, log_to_driver=False, configure_logging=False, logging_level=40)
        yield cluster
        ray.shutdown()
    finally:
        cluster.close()
        os.environ.clear()
        os.environ |= before


@pytest.fixture
def run(tmp_path: Path, ray_cluster: Cluster) -> Iterator[Runner]:
    """Starts launches that reach the cluster; afterwards nothing of them may be left in it."""
    runner = Runner(tmp_path)
    runner.scripts = Path(__file__).parents[1] / "process" / "scripts"
    mine = {k: v for k, v in ray_cluster.env.items() if k.startswith("RAY_") or k == "HOME"}
    runner.env |= mine
    try:
        yield runner
    finally:
        runner.close()
        ray_cluster.is_empty()


__all__ = ["Cluster", "Launch", "connected", "ray_cluster", "run"]
