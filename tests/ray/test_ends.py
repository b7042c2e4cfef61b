"""What ended a node: Ray, a machine that left or failed, or the node itself."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # Ray's own
]  # fmt: skip


class Waiting:
    """An actor in the place of a node's."""

    def wait(self) -> str:
        threading.Event().wait()
        raise AssertionError

    def pid(self) -> int:
        return os.getpid()


def ended(made: Any) -> tuple[str, bool]:
    from dlrover.ray import platform

    return asyncio.run(asyncio.wait_for(platform._end(made), 120))


def test_what_ray_takes_away_is_no_failure_of_the_node(ray_cluster) -> None:
    import ray

    def actor(**resources: int) -> tuple[Any, int]:
        options = {"max_concurrency": 2, "num_cpus": 0, "resources": resources}
        made = ray.remote(Waiting).options(**options).remote()
        return made, ray.get(made.pid.remote(), timeout=60)

    made, pid = actor()
    os.kill(pid, signal.SIGKILL)
    reason, removed = ended(made)
    assert reason.startswith("its actor died: ")
    assert not removed, "it may have used too much memory"

    made, _ = actor()
    ray.kill(made)
    assert ended(made)[1]

    options = [f"--address={ray_cluster.address}", '--resources={"spot": 1}']
    ray_cluster._start(options)
    made, _ = actor(spot=1)
    ray_cluster._nodes[-1].terminate()  # as the machine of a spot instance does
    reason, removed = ended(made)
    assert reason.startswith("its machine was preempted: ")
    assert removed
