"""A task that trains: a TensorFlow server of this process, and sessions with the parameter servers, one after the other."""

from __future__ import annotations

import abc
import functools
import inspect
import json
import logging
import os
import threading
import time
from typing import Any

import msgspec
import tensorflow as tf

from dlrover import launched
from dlrover._util import backoff
from dlrover.data.client import Reader
from dlrover.data.records import Readers
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.spec.node import CHIEF, SERVER
from dlrover.spec.requests.cluster import ClusterReply, ClusterTask, LookCluster
from dlrover.spec.requests.shards import Incarnation
from dlrover.tensorflow import serving
from dlrover.tensorflow.estimators.conf import EstimatorConf
from dlrover.tensorflow.estimators.feed import BatchFeed
from dlrover.tensorflow.estimators.session import ClusterMember, Rooted
from dlrover.tensorflow.machine.choice import TaskPlace
from dlrover.tensorflow.machine.plan import SessionPlan
from dlrover.tensorflow.registry import JobRegistry, answers, free_port, joined
from dlrover.tensorflow.watch import ClusterChangedError

logger = logging.getLogger(__name__)

POLL = 0.25
"""Seconds between two looks at the job during a session."""
PROBES = 2
"""Attempts to connect to a parameter server: a packet that is lost costs as long as one attempt lasts."""
GRACE = 0.5
"""Seconds in which a session must end by itself once its cluster is gone; after that it is left alone."""
RETRY = 0.1, 5.0
"""Seconds before the first repetition of a failed session, and before later ones."""
MAX_FAILURES = 10
"""Consecutive sessions without a new step after which the last error is raised."""
REPORT_INTERVAL = 0.1
"""Seconds between two reports of a worker; if it is killed, what it learned since is dealt again."""
STARTS = 1000
"""Numbers that each round has for the sessions of a process."""
SERVER_NAME = "server"
"""How each TensorFlow server calls itself before a session gives it a place."""
FAULTS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
"""Errors of connections."""


class TrainingTask(abc.ABC):
    """The chief, or a worker."""

    def __init__(self, conf: EstimatorConf, here: TaskPlace) -> None:
        self._conf, self._here = conf, here
        self._registry, self._watched = JobRegistry(), JobRegistry()
        address = joined(here.host, free_port())
        self._task = ClusterTask(here.role, here.index, launched.given.round * STARTS, address)
        self._server = serving.start(self._task, SERVER_NAME)
        self._member: ClusterMember | None = None
        self._reached, self._failures = -1, 0
        self._delays = backoff.delays(*RETRY)

    # ---- what differs

    @abc.abstractmethod
    def run(self) -> None:
        """Train to the end."""

    @abc.abstractmethod
    def _before(self, plan: SessionPlan) -> None:
        """Called when the graph is complete, before the session is made."""

    @abc.abstractmethod
    def _began(self, plan: SessionPlan) -> None:
        """Called when the session is made."""

    @abc.abstractmethod
    def _look(self, reply: ClusterReply) -> None:
        """Take in how the job is."""

    @abc.abstractmethod
    def _is_due(self) -> bool:
        """Return whether the session is to end."""

    @abc.abstractmethod
    def _is_gone(self) -> bool:
        """Return whether the session has lost its cluster."""

    def _listeners(self, member: ClusterMember) -> list[Any]:
        """Return what takes part in saving."""
        return []

    # ---- sessions

    def _trained(self, plan: SessionPlan) -> bool:
        """Train in one session; return whether the training has come to its end."""
        try:
            return self._attempt(plan)
        except Exception as error:
            if not self._may_repeat(error, plan):
                raise
            return False

    def _attempt(self, plan: SessionPlan) -> bool:
        self._task = msgspec.structs.replace(self._task, start=self._task.start + 1)
        reader = Reader(reader_name(self._task), REPORT_INTERVAL)
        readers = Readers(Incarnation(plan.number, 0), plan.base, reader)
        # A worker that waited for records within a step could not pause: it ends its session instead.
        leads = self._here.role == CHIEF
        feed = BatchFeed(self._conf.train_set, readers, waits_for_others=leads)
        index = -1 if leads else self._here.index
        member = self._member = ClusterMember(
            plan, index, feed, self._is_due, functools.partial(self._began, plan)
        )
        done = threading.Event()
        errors: list[BaseException] = []

        def session() -> None:
            try:
                self._train(member)
            except BaseException as error:  # noqa: BLE001 - raised in the main thread
                errors.append(error)
            finally:
                done.set()

        # TensorFlow may wait without end for a server that is lost: such a thread is left alone.
        threading.Thread(target=session, name="dlrover-session", daemon=True).start()
        try:
            self._watch(done, plan, feed)
        finally:
            feed.close()
        if errors:
            raise errors[0]
        return member.ended and not self._is_gone()

    def _train(self, member: ClusterMember) -> None:
        inner = estimator_of(self._conf, self._run_config(member.plan))
        estimator = Rooted(inner, member, functools.partial(self._before, member.plan))
        estimator.train(
            member.feed.dataset,
            hooks=[member],
            max_steps=self._conf.max_steps or None,
            saving_listeners=self._listeners(member),
        )

    def _lost(self, plan: SessionPlan) -> str:
        """Return why a session can make no more steps; TensorFlow would wait for a lost server without end."""
        silent = [
            address
            for address in plan.servers
            if not any(answers(server_at(address)) for _ in range(PROBES))
        ]
        if silent:
            return f"no connection to ps at {', '.join(silent)}."
        return "the cluster is another one." if self._is_gone() else ""

    def _watch(self, done: threading.Event, plan: SessionPlan, feed: BatchFeed) -> None:
        """Look at the job until the session has ended."""
        over = float("inf")
        while not done.wait(POLL):
            try:
                self._look(self._watched.ask(LookCluster()))
            except InfrastructureError as error:  # the training goes on without a master
                logger.debug("%s", error)
            why = self._lost(plan)
            if why:
                assert self._member is not None
                self._member.lost = True
                feed.close()  # a step may wait for records
                over = min(over, time.monotonic() + GRACE)
            if time.monotonic() > over:
                raise ClusterChangedError(why or "a parameter server was lost.")

    def _may_repeat(self, error: BaseException, plan: SessionPlan) -> bool:
        """Wait and return True if another session may help."""
        why = self._why(error, plan)
        step = self._member.step if self._member is not None else -1
        if step > self._reached:
            self._reached, self._failures, self._delays = step, 0, backoff.delays(*RETRY)
        self._failures += 1
        if not why or self._failures > MAX_FAILURES:
            return False
        since = f" at step {step}" if step >= 0 else ""
        logger.warning("Another session begins%s: %s", since, why)
        if self._failures > 1:
            threading.Event().wait(next(self._delays))
        return True

    def _why(self, error: BaseException, plan: SessionPlan) -> str:
        """Return why another session may help; empty if the error has nothing to do with the cluster."""
        if isinstance(error, ClusterChangedError):
            return str(error)
        known = isinstance(error, FAULTS)
        return self._lost(plan) or (str(error).partition("\n")[0] if known else "")

    def _run_config(self, plan: SessionPlan) -> Any:
        """Return TensorFlow's configuration of a session with the plan's servers.

        A session brings its own cluster: its process and the servers; each server knows only itself. Estimators
        have no argument for that; they read the rest from ``TF_CONFIG``, where only the number of servers and this
        task's name count.
        """
        role, index, own = self._here.role, self._here.index, self._task.address
        spec = {CHIEF: ["chief"], SERVER: list(plan.servers), role: [own] * (index + 1)}
        described = {
            "cluster": spec,
            "task": {"type": role, "index": index},
            "session_master": f"grpc://{own}",
        }
        os.environ["TF_CONFIG"] = json.dumps(described)  # noqa: TID251 - TensorFlow reads it
        cluster = tf.train.ClusterSpec({SERVER: spec[SERVER], role: {index: own}})
        session = tf.compat.v1.ConfigProto(
            allow_soft_placement=True, cluster_def=cluster.as_cluster_def()
        )
        session.experimental.share_session_state_in_clusterspec_propagation = True
        conf = self._conf
        return tf.estimator.RunConfig(
            model_dir=conf.model_dir,
            session_config=session,
            keep_checkpoint_max=conf.keep_checkpoint_max,
            log_step_count_steps=conf.log_steps,
            save_checkpoints_secs=conf.save_secs or None,
            save_checkpoints_steps=None if conf.save_secs else conf.save_steps,
        )


def estimator_of(conf: EstimatorConf, run_config: Any) -> Any:
    """Return the program's estimator; it gets what its class accepts."""
    cls: Any = conf.classifier_class
    accepted = inspect.signature(cls).parameters
    given = {"model_dir": conf.model_dir, "config": run_config, "params": conf.params}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        given = {name: value for name, value in given.items() if name in accepted}
    if "model_fn" not in accepted:
        return cls(**given)
    found = cls.__new__(cls)  # a class with a model_fn, and without an __init__ that passes it on
    found.__init__(model_fn=found.model_fn, **given)
    return found


def reader_name(task: ClusterTask) -> str:
    """Return the name under which a session's records are dealt to it."""
    return f"{task.role} {task.index}, start {task.start}"


def server_at(address: str) -> ClusterTask:
    """Return a parameter server for its address; its other fields do not count."""
    return ClusterTask(SERVER, 0, 0, address)


def check_version() -> None:
    """Refuse a TensorFlow without estimators.

    Raises:
        ConfigurationError: it is 2.16 or later.
    """
    if not hasattr(tf, "estimator"):
        raise ConfigurationError(
            f"TensorFlow {tf.__version__} has no tf.estimator, which ended with 2.15; install tensorflow==2.15.*."
        )
