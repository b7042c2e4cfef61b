"""The processes that execute what the chief sends them: TensorFlow's workers and parameter servers."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

import tensorflow as tf

from dlrover import launched
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.spec.node import CHIEF, SERVER, WORKER
from dlrover.spec.requests.cluster import ClusterTask, EnterCluster, LeaveCluster, LookCluster
from dlrover.tensorflow.machine.choice import TaskPlace
from dlrover.tensorflow.registry import FixedRegistry, JobRegistry, Registry, free_port, joined

logger = logging.getLogger(__name__)

LEAVE_POLL = 0.2
"""Seconds between two questions whether the chief still uses this task."""
NO_CHIEF = "The job has no chief, which resilient needs: start it with dlrover-run --chief."
MASTER_WAIT = 600.0
"""Seconds that a task that starts waits for a master."""


def start(task: ClusterTask, name: str = "") -> Any:
    """Start TensorFlow's server of a task.

    The server knows itself only. The chief tells it about the others, and which number it has among them, so that
    any server can take any place.

    Args:
        task: the task.
        name: how the server calls itself, if not by its role; in sessions with their own cluster, no task may have
            the name and number that a server began with.
    """
    spec = tf.train.ClusterSpec({name or task.role: [task.address]})
    return tf.distribute.Server(
        spec, job_name=name or task.role, task_index=0, protocol="grpc", start=True
    )


def serve(place: TaskPlace, name: str = "") -> None:
    """Serve until SIGTERM, and then until the chief does without this task.

    Args:
        place: what this process is.
        name: as for `start`.

    Raises:
        ConfigurationError: the job has no chief.
        InfrastructureError: no master was reached, or another start of this task is known.
    """
    ending = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        ending.set()

    signal.signal(signal.SIGTERM, end)
    registry = JobRegistry()
    address = joined(place.host, free_port(_last_port(registry, place)))
    task = ClusterTask(place.role, place.index, launched.given.round, address)
    server = start(task, name)
    if not registry.ask(EnterCluster(task), MASTER_WAIT).wanted.get(CHIEF):
        raise ConfigurationError(NO_CHIEF)
    launched.imported()  # the next start is a fork that has TensorFlow
    logger.info("Serving %s as %s %d", server.target, place.role, place.index)
    ending.wait()
    _leave(registry, task)


def _last_port(registry: Registry, place: TaskPlace) -> int:
    """Return the port of a worker's last start on this host; 0 if there was none.

    TensorFlow's coordinator finds a lost worker again at the same address. A parameter server must have another
    address: connections to the old one may still be in use and fail.
    """
    if place.role != WORKER:
        return 0
    for task in registry.ask(LookCluster(), MASTER_WAIT).tasks:
        host, _, port = task.address.rpartition(":")
        if (task.role, task.index, host.strip("[]")) == (place.role, place.index, place.host):
            return int(port)
    return 0


def _leave(registry: Registry, task: ClusterTask) -> None:
    """Wait until the chief does not use a task; the agent ends the process if that takes too long."""
    waiting = threading.Event()
    try:
        while task in registry.ask(LeaveCluster(task)).tasks:
            waiting.wait(LEAVE_POLL)
    except InfrastructureError as error:  # the job has ended
        logger.info("Not waiting for the chief: %s", error)


def alone() -> tuple[FixedRegistry, list[Any]]:
    """Return a worker and a parameter server within this process, and what keeps them alive."""
    tasks = [ClusterTask(role, 0, 0, joined("127.0.0.1", free_port())) for role in (WORKER, SERVER)]
    return FixedRegistry(tasks), [start(task) for task in tasks]
