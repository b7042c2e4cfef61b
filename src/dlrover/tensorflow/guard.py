"""The guard round a training function: it builds TensorFlow's cluster again when a task is lost or the plan changes."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import tensorflow as tf

from dlrover import config, launched
from dlrover._util import backoff
from dlrover.errors import ConfigurationError, InfrastructureError, causes
from dlrover.spec.node import CHIEF
from dlrover.spec.requests.cluster import ClusterTask, UseCluster
from dlrover.tensorflow import serving
from dlrover.tensorflow.cluster import Present
from dlrover.tensorflow.machine.choice import (
    ClusterChoice,
    TaskPlace,
    choose,
    named,
    place,
    tf_config,
)
from dlrover.tensorflow.machine.options import GuardOptions
from dlrover.tensorflow.registry import JobRegistry, Registry, answers, free_port, joined, look
from dlrover.tensorflow.watch import (
    ClusterChangedError,
    Watch,
    connecting,
    forget,
    is_stuck,
    keep_stuck,
    strategies,
)

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])

LOOK = 0.05
"""Seconds between two looks for the tasks that are awaited."""
RETRY = 0.1, 5.0
"""Seconds before the first repetition of a failed attempt, and before later ones."""
SETTLED = 60.0
"""Seconds after which an attempt counts as one that worked, if it reports no steps."""
FAULTS = (tf.errors.UnavailableError, tf.errors.AbortedError)
"""Errors of connections."""
FORGOTTEN = ("unknown device", "Unable to find the relevant tensor remote_handle")
"""Texts of an `InvalidArgumentError` that mean that a server has started again."""


def resilient(  # noqa: PLR0913 - options, by name
    function: Function | None = None,
    *,
    checkpoint: str | os.PathLike[str] = "",
    every_seconds: float = 60.0,
    every_steps: int = 0,
    keep: int = 3,
    spares: int = 0,
    timeout: float = 600.0,
    max_failures: int = 10,
) -> Any:
    """Guard a training function of a job with ``dlrover-run --chief``.

    In the chief, the function is called again, in the same process, whenever a task is lost or the job's tasks
    change. It then makes a strategy for the present tasks. Workers and parameter servers do not call it: they
    serve until the job ends, and their process ends here. Evaluators call it once.

    A first parameter without a default that the caller leaves out is the `Present` cluster. Before each call,
    ``TF_CONFIG`` describes the same cluster. A program that runs alone gets a worker and a parameter server within
    its own process.

    Args:
        function: the training function.
        checkpoint: directory of the checkpoints of `Present.resume`, which all tasks can reach.
        every_seconds: time between two of them.
        every_steps: also save after this many steps; 0: by time only.
        keep: number of checkpoints to keep.
        spares: parameter servers to keep idle; one takes the place of a lost server at once.
        timeout: seconds to wait for the tasks.
        max_failures: consecutive attempts without a new step after which the last error is raised.

    Raises:
        ConfigurationError: an argument is wrong.
    """
    options = GuardOptions(
        os.fspath(checkpoint), every_seconds, every_steps, keep, spares, timeout, max_failures
    )

    def guarded(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            here = place(config.environ())
            if here is not None and here.serves:
                _serve(here)
            guard = TrainingGuard(here, options)
            if _is_complete(function, args, kwargs):
                return guard.run(lambda _: function(*args, **kwargs))
            return guard.run(lambda cluster: function(cluster, *args, **kwargs))

        return run  # type: ignore[return-value]

    return guarded if function is None else guarded(function)


def _is_complete(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether a function can be called with these arguments alone."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _serve(here: TaskPlace) -> NoReturn:
    serving.serve(here)
    sys.exit(0)  # as after tf.distribute.Server.join(), nothing of the program follows


class TrainingGuard:
    """Attempts of one training function, in the chief or an evaluator."""

    def __init__(self, place: TaskPlace | None, options: GuardOptions) -> None:
        self._place, self._options = place, options
        self._used: ClusterChoice | None = None
        self._lost: set[ClusterTask] = set()
        self._alive: list[Any] = []  # servers within this process
        self._address = ""
        self._attempts = 0
        self._failures = 0
        self._in_vain = False
        """Whether the last attempt went on with the server of TensorFlow's context, and failed before long."""
        self._reached = -1
        self._began: dict[str, Any] = {}
        self._delays = backoff.delays(*RETRY)

    def run(self, call: Callable[[Present], Any]) -> Any:
        """Call the function until it returns, or fails for another reason than its cluster."""
        here = self._place
        if here is not None and here.role != CHIEF:
            _export(tf_config({}, here.role, here.index))
            return call(Present(here.role, {}, self._options))
        registry = self._registry()
        while True:
            choice = self._await(registry)
            stays = self._can_stay(choice)
            cluster = self._present(choice, address=self._address if stays else self._new_address())
            self._used = choice
            began = time.monotonic()
            try:
                with connecting(same_server=stays):
                    result = self._attempt(call, cluster, choice, registry)
            except Exception as error:
                settled = time.monotonic() - began > SETTLED
                worked = settled or cluster.step > self._reached
                changed = isinstance(error, ClusterChangedError)
                self._in_vain = stays and not settled and not changed
                why = self._why(error, choice)
                if not why or not self._may_repeat(worked=worked):
                    raise
                logger.warning("The cluster is built again at step %d: %s", cluster.step, why)
            else:
                registry.ask(UseCluster(()), self._options.timeout)
                return result
            finally:
                cluster.close()
            self._reached = max(self._reached, cluster.step)
            del cluster
            forget()

    def _attempt(
        self,
        call: Callable[[Present], Any],
        cluster: Present,
        choice: ClusterChoice,
        registry: Registry,
    ) -> Any:
        with strategies() as made:
            spares = self._options.spares
            watch = Watch(registry.another(), spares, choice, made, frozenset(self._lost))
            try:
                with watch:
                    cluster.watch = watch
                    result = call(cluster)
                    if cluster.progress is not None:
                        cluster.progress.check_fits()
                    return result
            finally:
                keep_stuck(made)

    def _may_repeat(self, *, worked: bool) -> bool:
        """Wait and return True, unless too many attempts have failed without a new step."""
        if worked:
            self._failures, self._delays = 0, backoff.delays(*RETRY)
        self._failures += 1
        if self._failures > 1:
            threading.Event().wait(next(self._delays))
        return self._failures <= self._options.max_failures

    def _registry(self) -> Registry:
        if self._place is not None:
            return JobRegistry()
        if launched.given.relay:
            raise ConfigurationError(serving.NO_CHIEF)
        registry, self._alive = serving.alone()
        return registry

    def _await(self, registry: Registry) -> ClusterChoice:
        """Return the tasks of the next cluster once they are there; all others may end from now on."""
        options, missing = self._options, "the master's list of tasks"
        for reply in look(registry, LOOK, options.timeout):
            # On a busy machine, a task may have answered late.
            self._lost = {task for task in self._lost & {*reply.tasks} if not answers(task)}
            choice, missing = choose(reply, options.spares, self._used, self._lost)
            if choice is None:
                continue
            silent = {task for task in choice.tasks if not answers(task)}
            self._lost |= silent
            if not silent:
                registry.ask(UseCluster(choice.tasks), options.timeout)
                return choice
        raise InfrastructureError(f"timeout is {options.timeout:g} s, and {missing} did not come.")

    def _can_stay(self, choice: ClusterChoice) -> bool:
        """Return whether the next strategy can go on with the server of TensorFlow's context."""
        used = self._used
        stuck = self._failures > 1 or self._in_vain or is_stuck()
        return used is not None and choice.extends(used) and not stuck

    def _new_address(self) -> str:
        """Return an address with a new port: TensorFlow does not start a second server on the former one."""
        host = self._place.host if self._place is not None else "127.0.0.1"
        return joined(host, free_port())

    def _present(self, choice: ClusterChoice, address: str) -> Present:
        self._address = address
        spec = choice.spec(address)
        _export(tf_config(spec, CHIEF, 0))
        self._attempts += 1
        return Present(
            CHIEF, spec, self._options, self._attempts - 1, max(0, self._reached), self._began
        )

    def _why(self, error: Exception, used: ClusterChoice) -> str:
        """Return why another attempt may help; empty if the error has nothing to do with the cluster."""
        if isinstance(error, ClusterChangedError):
            return str(error)
        gone = [task for task in used.tasks if not answers(task)]
        self._lost.update(gone)
        if gone:
            return f"no connection to {named(gone)}."
        for cause in causes(error, "original_exception"):
            text = str(cause)
            # What a lost server leaves in the context shows in errors of all kinds, such as an OutOfRangeError.
            known = self._in_vain or isinstance(cause, FAULTS)
            known = known or any(part in text for part in FORGOTTEN)
            if isinstance(cause, tf.errors.OpError) and known and "/job:" in text:
                return text.partition("\n")[0]
        return ""


def _export(value: str) -> None:
    os.environ["TF_CONFIG"] = value  # noqa: TID251 - TensorFlow reads it
