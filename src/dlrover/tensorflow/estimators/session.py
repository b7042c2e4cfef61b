"""What the sessions of one generation do together: they make their steps, and pause while the chief saves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dlrover import launched
from dlrover.tensorflow.estimators.feed import BatchFeed
from dlrover.tensorflow.machine.plan import SessionPlan
from dlrover.tensorflow.watch import ClusterChangedError

V1 = tf.compat.v1
MAX_WORKERS = 4096
"""Maximum number of workers beside the chief."""
ABSENT, RUNS = -1, 0
"""What stands for a worker without a session, and for one that has not paused yet; else its last pause."""
PAUSE_POLL = 0.01
"""Seconds between two looks at a pause's state."""
DEAD_AFTER = 0.5
"""Seconds of waiting for a worker's pause after which the chief looks if it is alive."""


class ClusterMember(tf.estimator.SessionRunHook):  # type: ignore[misc]
    """The hook of a worker or the chief, for one session.

    While the chief saves, no worker makes a step, so that a checkpoint holds the effect of exactly the records that
    its positions list. Two variables on the parameter servers are all that this takes: the number of the pause that
    is wanted, odd until it is over, and by worker the pause that it keeps. Each step fetches the former.

    Args:
        plan: the generation.
        index: number among the workers; -1: the chief.
        feed: the batches.
        due: returns whether this session is to end.
        began: called once the session is made and the model restored.
    """

    def __init__(
        self,
        plan: SessionPlan,
        index: int,
        feed: BatchFeed,
        due: Callable[[], bool],
        began: Callable[[], None],
    ) -> None:
        self.plan, self.feed = plan, feed
        self._index, self._due, self._began = index, due, began
        self.step = -1
        """Global step after the last step; -1: no session yet."""
        self.ended = False
        """True once the training has come to its end by itself."""
        self.stopped = False
        """True if it is to end because the cluster changes."""
        self.lost = False
        """True if its cluster is lost: it must not save, and its end is not that of the training."""
        self._pending = False

    def build(self) -> None:
        """Add the variables to the graph, right after the global step: on all workers at the same servers."""

        def variable(name: str, shape: list[int], value: int) -> Any:
            return V1.get_variable(
                f"dlrover/{name}", shape, tf.int64, V1.constant_initializer(value), trainable=False,
                collections=[], use_resource=True,
            )  # fmt: skip

        self._turn = variable("turn", [], 0)
        self._kept = variable("kept", [MAX_WORKERS], ABSENT)
        self._number = V1.placeholder(tf.int64, [])
        self._keep = tf.raw_ops.ResourceScatterUpdate(
            resource=self._kept.handle, indices=self._index, updates=self._number
        )
        self._begin = self._turn.assign(self._number, read_value=False)
        self._read_turn, self._read_kept = self._turn.read_value(), self._kept.read_value()
        self._initialize = tf.group(self._turn.initializer, self._kept.initializer)
        self._read_step = V1.train.get_global_step().read_value()

    # ---- of a hook

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Take part from now on."""
        if self._index < 0:
            session.run(self._initialize)
        else:
            session.run(self._keep, {self._number: RUNS})
        self.step = int(session.run(self._read_step))
        launched.loaded(self.step)
        self.feed.begin()
        self._began()
        if self._index >= 0:
            self._pause(session, int(session.run(self._read_turn)))

    def before_run(self, run_context: Any) -> Any:
        """Fetch the pause that is wanted with each step."""
        self._pending = True
        return V1.train.SessionRunArgs([self._read_turn, self._read_step])

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Count the step and its records; pause, or end."""
        self.made()
        turn, self.step = map(int, run_values.results)
        launched.stepped()
        if self._index >= 0:
            self._pause(run_context.session, turn)
        if self._due():
            self.stopped = True
            run_context.request_stop()

    def end(self, session: Any) -> None:
        """Leave; the records that were read ahead are for others."""
        self.ended = not (self.stopped or self.lost or self._due())
        if self._index >= 0:
            session.run(self._keep, {self._number: ABSENT})

    def made(self) -> None:
        """Count the records of the step that was just made, once."""
        if self._pending:
            self._pending = False
            self.feed.learned()

    # ---- pauses

    def _pause(self, session: Any, turn: int) -> None:
        if turn % 2 == 0:
            return
        self.feed.flush()
        session.run(self._keep, {self._number: turn})
        while int(session.run(self._read_turn)) == turn and not self._due():
            threading.Event().wait(PAUSE_POLL)

    def pause_others(self, session: Any, alive: Callable[[int], bool]) -> None:
        """Let all workers pause; return when no step is under way. A lost server raises TensorFlow's error."""
        turn = int(session.run(self._read_turn)) + 1
        session.run(self._begin, {self._number: turn})
        look_at = time.monotonic() + DEAD_AFTER
        dead: set[int] = set()
        while True:
            kept = session.run(self._read_kept)
            awaited = {i for i, number in enumerate(kept) if number not in (ABSENT, turn)} - dead
            if not awaited:
                return
            if time.monotonic() > look_at:
                dead |= {index for index in awaited if not alive(index)}
                look_at = time.monotonic() + DEAD_AFTER
            threading.Event().wait(PAUSE_POLL)

    def go_on(self, session: Any) -> None:
        """End the pause."""
        session.run(self._begin, {self._number: int(session.run(self._read_turn)) + 1})


class Rooted(tf.estimator.Estimator):  # type: ignore[misc]
    """An estimator whose variables are in a container of their own, and whose session is not made again by TensorFlow.

    Args:
        inner: the program's estimator.
        member: this process's hook.
        before: called before the session is made, when the graph is complete.
    """

    def __init__(self, inner: Any, member: ClusterMember, before: Callable[[], None]) -> None:
        self._member, self._before = member, before
        super().__init__(
            self._modelled(_model_fn(inner)),
            config=inner.config,
            warm_start_from=inner._warm_start_settings,  # noqa: SLF001 - no public name leads to it
        )

    def _modelled(self, model_fn: Callable[..., Any]) -> Callable[..., Any]:
        def modelled(features: Any, labels: Any, mode: str, config: Any) -> Any:
            spec = model_fn(features, labels, mode, config)
            _once(spec.scaffold, self._before)
            return spec

        return modelled

    def _create_and_assert_global_step(self, graph: Any) -> Any:
        # The one method that TensorFlow lets a subclass override before the model's variables are made.
        self._entered = graph.container(self._member.plan.container)
        self._entered.__enter__()  # for the rest of the graph
        step = super()._create_and_assert_global_step(graph)
        self._member.build()
        return step


def _model_fn(estimator: Any) -> Callable[..., Any]:
    """Return what calls the model with its parameters; the class may have a method of the property's name."""
    found: Callable[..., Any] = tf.estimator.Estimator.model_fn.fget(estimator)
    return found


def _once(scaffold: Any, before: Callable[[], None]) -> None:
    """Call ``before`` before the first session of a scaffold is made, and let no second one be made.

    A monitored session that loses a server makes another one for the same servers, and waits for them without end.
    """
    finalize = scaffold.finalize
    made: list[bool] = []

    def once() -> Any:
        if made:
            raise ClusterChangedError("the session has lost a parameter server.")
        before()
        made.append(True)
        return finalize()

    scaffold.finalize = once
