"""The chief's thread that notices changes of the job's tasks during an attempt, and ends waits that would not end."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Set as AbstractSet
from typing import TYPE_CHECKING, Any

from tensorflow.python.distribute.parameter_server_strategy_v2 import ParameterServerStrategyV2
from tensorflow.python.eager import context

from dlrover.errors import InfrastructureError
from dlrover.spec.node import SERVER
from dlrover.spec.requests.cluster import ClusterTask, LookCluster
from dlrover.tensorflow.machine.choice import ClusterChange, ClusterChoice, change
from dlrover.tensorflow.registry import Registry, answers

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

POLL = 0.5
"""Seconds between two looks."""
LOST_GRACE = 2.0
"""Seconds in which TensorFlow should itself report the loss of a task."""
STUCK_AFTER = 0.2
"""Seconds that a coordinator may take to apply a change."""
PLANNED_GRACE = 10.0
"""Seconds before a planned change interrupts a program that does not count its steps."""

Strategies = list["weakref.ref[ParameterServerStrategyV2]"]


class ClusterChangedError(InfrastructureError):
    """The job's tasks are others than those of the cluster in use, which is to be built again."""


@contextlib.contextmanager
def connecting(*, same_server: bool) -> Iterator[None]:
    """Change how a strategy made meanwhile connects to its tasks.

    A parameter server gets the new address of another one only if it sees it, which TensorFlow's strategy does not
    want: what servers send each other, as the steps of a Keras optimizer do, would go to the address of a lost one.

    Args:
        same_server: change the cluster of TensorFlow's context, and do not replace the context's server. TensorFlow
            cannot end a server: each one costs about 40 MB and 90 threads for the rest of the process.
    """
    original = context.set_server_def
    connect = context.update_server_def if same_server else original

    def connected(server_def: Any) -> None:
        for job in server_def.cluster_device_filters.jobs:
            for task in job.tasks.values() if job.name == SERVER else ():
                task.device_filters.append(f"/job:{SERVER}")
        connect(server_def)

    context.set_server_def = connected
    try:
        yield
    finally:
        context.set_server_def = original


def is_stuck() -> bool:
    """Return whether a coordinator of an earlier attempt is inside TensorFlow's context and stays there."""
    return bool(_stuck)


@contextlib.contextmanager
def strategies() -> Iterator[Strategies]:
    """Collect the strategies that the program makes meanwhile."""
    made: Strategies = []
    original = ParameterServerStrategyV2.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(weakref.ref(self))

    ParameterServerStrategyV2.__init__ = init
    try:
        yield made
    finally:
        ParameterServerStrategyV2.__init__ = original


def _coordinators(made: Strategies) -> Iterator[Any]:
    """Yield the coordinators of strategies; no public name leads to them."""
    for strategy in filter(None, (reference() for reference in made)):
        if strategy._cluster_coordinator is not None:  # noqa: SLF001
            yield strategy._cluster_coordinator  # noqa: SLF001


_stuck: list[Any] = []
"""Coordinators of earlier attempts that wait for a worker that will not return."""


def keep_stuck(made: Strategies) -> None:
    """Keep the coordinators whose end would block: one that waits for a worker's old address holds a lock."""
    for coordinator in _coordinators(made):
        lock = coordinator._cluster.failure_handler._cluster_update_lock  # noqa: SLF001
        if lock.acquire(timeout=STUCK_AFTER):
            lock.release()
        else:
            _stuck.append(coordinator)


def forget() -> None:
    """Drop the objects of an attempt that failed: the threads of its coordinators end with them.

    Their last errors are known; TensorFlow would show them again.
    """
    show, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = show


class Watch:
    """Watches the tasks while used as a context manager."""

    def __init__(
        self,
        registry: Registry,
        spares: int,
        used: ClusterChoice,
        made: Strategies,
        lost: AbstractSet[ClusterTask] = frozenset(),
    ) -> None:
        self._registry, self._spares, self._used, self._made = registry, spares, used, made
        self._lost = lost  # did not answer when the tasks in use were chosen
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlrover-tasks", daemon=True)
        self._change, self._asked = ClusterChange(), False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def change(self) -> ClusterChange:
        """Return the change that is due; a program that asks after its steps saves before a planned one by itself."""
        self._asked = True
        return self._change

    def _run(self) -> None:
        since = time.monotonic()
        while not self._stop.wait(POLL):
            try:
                reply = self._registry.ask(LookCluster())
            except InfrastructureError as error:  # the training goes on without a master
                logger.debug("%s", error)
                continue
            self._lost = {t for t in self._lost if t in reply.tasks and not answers(t)}
            due = self._change = change(reply, self._spares, self._used, self._lost)
            if not due.reason or (self._asked and not due.lost):
                since = time.monotonic()
            elif time.monotonic() - since > (LOST_GRACE if due.lost else PLANNED_GRACE):
                self._interrupt(ClusterChangedError(f"{due.reason}."))

    def _interrupt(self, error: ClusterChangedError) -> None:
        """Let ``schedule`` and ``join`` of the attempt's coordinators raise an error.

        This is what `mark_failed` of the queue does, which counts a function that has ended in addition.
        """
        for coordinator in _coordinators(self._made):
            queue = coordinator._cluster.closure_queue  # noqa: SLF001
            with queue._queue_lock:  # noqa: SLF001
                queue._error = queue._error or error  # noqa: SLF001
                queue._stop_waiting_condition.notify_all()  # noqa: SLF001
                queue._queue_free_slot_condition.notify_all()  # noqa: SLF001
