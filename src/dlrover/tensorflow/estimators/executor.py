"""Runs the estimator of a configuration as one task of a job: the chief, a worker, a parameter server or an evaluator."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import tensorflow as tf

from dlrover import config
from dlrover.data.services import connect
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.spec.node import CHIEF, SERVER, WORKER
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.cluster import (
    ClusterReply,
    ClusterTask,
    EnterCluster,
    LeaveCluster,
    LookCluster,
    UseCluster,
)
from dlrover.spec.requests.shards import ForgetWorker, LookShards, ShardReply
from dlrover.tensorflow import serving
from dlrover.tensorflow.estimators.conf import EstimatorConf
from dlrover.tensorflow.estimators.evaluating import Evaluator
from dlrover.tensorflow.estimators.positions import PositionSaver
from dlrover.tensorflow.estimators.restoring import Restoring
from dlrover.tensorflow.estimators.session import ClusterMember
from dlrover.tensorflow.estimators.task import (
    SERVER_NAME,
    TrainingTask,
    check_version,
    reader_name,
    server_at,
)
from dlrover.tensorflow.machine.choice import (
    ClusterChange,
    ClusterChoice,
    TaskPlace,
    change,
    choose,
    place,
)
from dlrover.tensorflow.machine.plan import SessionPlan, plan_of
from dlrover.tensorflow.registry import Registry, answers, look
from dlrover.tensorflow.watch import ClusterChangedError

logger = logging.getLogger(__name__)

LOOK = 0.05
"""Seconds between two looks for what is awaited."""
TIMEOUT = 600.0
"""Seconds to wait for the parameter servers, and for the chief."""
FORGOTTEN = 10
"""Earlier generations whose variables are removed from the servers."""


def run(load: Callable[[], EstimatorConf]) -> None:
    """Do this process's part of the job; return at its end.

    Args:
        load: returns the configuration; parameter servers do not need it.

    Raises:
        ConfigurationError: TensorFlow has no estimators, the job has no chief, or the configuration is wrong.
    """
    check_version()
    here = place(config.environ())
    if here is None:
        raise ConfigurationError(serving.NO_CHIEF.replace("resilient", "an estimator"))
    if here.role == SERVER:
        serving.serve(here, SERVER_NAME)
    elif here.role == CHIEF:
        ChiefTask(load(), here).run()
    elif here.role == WORKER:
        WorkerTask(load(), here).run()
    else:
        Evaluator(load()).run()


class ChiefTask(TrainingTask):
    """Decides on the generations, restores and saves the model, and trains as the workers do."""

    def __init__(self, conf: EstimatorConf, here: TaskPlace) -> None:
        super().__init__(conf, here)
        self._used: ClusterChoice | None = None
        self._change = ClusterChange()
        self._shards = connect()
        self._workers: dict[int, ClusterTask] = {}
        self._dead: set[ClusterTask] = set()
        self._restoring = Restoring(conf)

    def run(self) -> None:
        """Train to the end, in one generation after the other."""
        while not self._trained(plan := self._begin()):
            pass
        # The number stays: a chief that dies right here begins with a later one.
        self._registry.ask(UseCluster((), SessionPlan(plan.number + 1).packed()), TIMEOUT)

    def _begin(self) -> SessionPlan:
        """Begin a generation, once its servers are there; all others may end from now on."""
        missing = "the master's list of tasks"
        for reply in look(self._registry, LOOK, TIMEOUT):
            lost = {t for t in reply.tasks if t.role == SERVER and not answers(t)}
            choice, missing = choose(reply, 0, self._used, lost, only_servers=True)
            if choice is None:
                continue
            plan = SessionPlan(
                plan_of(reply.note).number + 1,
                tuple(task.address for task in choice.servers),
                self._restoring.choose(),
            )
            self._used, self._change = choice, ClusterChange()
            self._tell(self._registry, plan)
            return plan
        raise InfrastructureError(f"{missing} did not come within {TIMEOUT:g} s.")

    def _why(self, error: BaseException, plan: SessionPlan) -> str:
        restores = self._member is not None and self._member.step < 0
        if restores and self._restoring.is_damaged(error):
            return "the checkpoint is damaged."
        return super()._why(error, plan)

    def _tell(self, registry: Registry, plan: SessionPlan) -> None:
        assert self._used is not None
        registry.ask(UseCluster(self._used.tasks, plan.packed()), TIMEOUT)

    def _before(self, plan: SessionPlan) -> None:
        pass

    def _began(self, plan: SessionPlan) -> None:
        """Let the workers begin; free what earlier generations have on the servers."""
        self._restoring.done()
        self._tell(self._registry.another(), msgspec.structs.replace(plan, ready=True))
        earlier = range(max(1, plan.number - FORGOTTEN), plan.number)
        if earlier:
            for address in plan.servers:
                names = [SessionPlan(number).container for number in earlier]
                tf.compat.v1.Session.reset(f"grpc://{address}", names)

    def _listeners(self, member: ClusterMember) -> list[Any]:
        return [PositionSaver(member, self._conf.model_dir, self._is_alive)]

    def _is_alive(self, index: int) -> bool:
        task = self._workers.get(index)
        return task is not None and answers(task)

    def _look(self, reply: ClusterReply) -> None:
        assert self._used is not None
        self._change = change(reply, 0, self._used, only_servers=True)
        present = {task.index: task for task in reply.tasks if task.role == WORKER}
        for index, task in self._workers.items():
            if present.get(index) != task:
                self._forget(task)
        self._workers |= present
        for task in present.values():
            if answers(task):
                self._dead.discard(task)  # it may have had no reader yet when it did not answer
            else:
                self._forget(task)

    def _forget(self, task: ClusterTask) -> None:
        """Let others have the records of a worker that is dead, or has begun another session."""
        if task in self._dead:
            return
        reply = self._shards.ask(ForgetWorker(reader_name(task)))
        if not (isinstance(reply, Unanswered) and reply.away):
            self._dead.add(task)

    def _is_due(self) -> bool:
        return bool(self._change.reason) and not self._change.lost

    def _is_gone(self) -> bool:
        return self._change.lost


class WorkerTask(TrainingTask):
    """Trains with the chief's generations."""

    def __init__(self, conf: EstimatorConf, here: TaskPlace) -> None:
        super().__init__(conf, here)
        self._leaving = threading.Event()
        self._shards = connect()
        self._number = 0
        """The chief's latest generation."""

    def run(self) -> None:
        """Train until the job ends, or this worker is to leave."""

        def leave(_signal: int, _frame: FrameType | None) -> None:
            self._leaving.set()

        signal.signal(signal.SIGTERM, leave)
        done = 0
        try:
            while (plan := self._plan(done)) is not None:
                if self._trained(plan):
                    done = plan.number
            self._registry.ask(LeaveCluster(self._task))
        except InfrastructureError as error:
            if not done:
                raise
            logger.info("Nothing is left to train: %s", error)  # the job has ended

    def _plan(self, done: int) -> SessionPlan | None:
        """Wait for a generation, or for records that others leave behind; return None if this worker is to leave.

        Args:
            done: generation in which nothing was left to read.
        """
        for reply in look(self._registry, LOOK, TIMEOUT if not done else float("inf")):
            if self._leaving.is_set():
                return None
            plan = plan_of(reply.note)
            self._number = plan.number
            if not plan.servers or not (plan.number > done or self._is_left()):
                continue
            if all(answers(server_at(a)) for a in plan.servers):
                return plan
        raise InfrastructureError(f"The chief did not come within {TIMEOUT:g} s.")

    def _is_left(self) -> bool:
        """Return whether records are to be read."""
        records = self._member.feed.records if self._member is not None else None
        if records is None or self._conf.max_steps:
            return False
        reply = self._shards.ask(LookShards(records.name))
        return isinstance(reply, ShardReply) and not reply.exhausted

    def _before(self, plan: SessionPlan) -> None:
        """Wait until the chief has restored the model."""
        registry = self._registry.another()
        registry.ask(EnterCluster(self._task), TIMEOUT)
        for reply in look(registry, LOOK, TIMEOUT):
            present = plan_of(reply.note)
            if present.number != plan.number or self._leaving.is_set():
                break
            if present.ready:
                return
        raise ClusterChangedError("the chief has begun anew.")

    def _began(self, plan: SessionPlan) -> None:
        pass

    def _look(self, reply: ClusterReply) -> None:
        self._number = plan_of(reply.note).number

    def _why(self, error: BaseException, plan: SessionPlan) -> str:
        if plan_of(self._registry.ask(LookCluster(), TIMEOUT).note).number != plan.number:
            return "the chief has begun anew."
        return super()._why(error, plan)

    def _is_due(self) -> bool:
        return self._leaving.is_set() or self._is_gone()

    def _is_gone(self) -> bool:
        return self._member is not None and self._number != self._member.plan.number
