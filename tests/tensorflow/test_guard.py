"""What the guard does with a function's own errors, in a program that runs alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

tf = pytest.importorskip("tensorflow")

from dlrover.data import Records  # noqa: E402
from dlrover.errors import ConfigurationError  # noqa: E402
from dlrover.spec.requests.cluster import (  # noqa: E402
    ClusterReply,
    ClusterRequest,
    ClusterTask,
    LookCluster,
)
from dlrover.tensorflow import resilient, serving, watch  # noqa: E402
from dlrover.tensorflow.cluster import Present  # noqa: E402
from dlrover.tensorflow.machine.options import GuardOptions  # noqa: E402
from dlrover.tensorflow.registry import free_port, joined  # noqa: E402
from dlrover.tensorflow.watch import ClusterChangedError  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_an_error_that_is_its_own_cause_is_raised_once() -> None:
    calls = []

    @resilient
    def train() -> None:
        calls.append(1)
        error = ValueError("the program's own")
        raise error from error

    with pytest.raises(ValueError, match="the program's own"):
        train()
    assert len(calls) == 1


def test_an_attempt_that_fails_in_the_context_of_a_lost_server_is_repeated_in_another_one() -> None:
    chiefs: list[str] = []

    def train(cluster: Present) -> None:
        chiefs.extend(cluster.spec["chief"])
        if len(chiefs) == 1:
            raise ClusterChangedError("ps 0 is gone.")
        if len(chiefs) in fails:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence from /job:worker/task:0")

    fails = {2}
    resilient(train)()
    assert len(chiefs) == 3
    assert chiefs[0] == chiefs[1] != chiefs[2]
    chiefs.clear()
    fails = {2, 3}
    with pytest.raises(tf.errors.OutOfRangeError):
        resilient(train)()
    assert len(chiefs) == 3


def test_a_first_parameter_that_the_caller_leaves_out_is_the_cluster() -> None:
    @resilient
    def alone(argv: Any = None, *more: Any, rate: float = 0.1) -> tuple[Any, ...]:
        return argv, more, rate

    assert alone() == (None, (), 0.1)
    assert alone("a", "b", rate=1) == ("a", ("b",), 1)

    @resilient
    def train(cluster: Present, data: str, rate: float = 0.1) -> tuple[str, str, float]:
        return cluster.role, data, rate

    assert train("a") == train(data="a") == ("chief", "a", 0.1)
    assert train("a", rate=1) == ("chief", "a", 1)


def test_an_evaluator_has_no_strategy(tmp_path: Path) -> None:
    options = GuardOptions(str(tmp_path), 60, 0, 3, 0, 600, 10)
    with pytest.raises(ConfigurationError, match="role is 'evaluator', which uses no parameter"):
        Present("evaluator", {}, options).strategy()


def test_records_made_outside_are_read_again_after_a_loss_before_the_first_checkpoint(
    tmp_path: Path,
) -> None:
    records = Records(range(50))
    read: list[list[int]] = []

    @resilient(checkpoint=tmp_path)
    def train(cluster: Present) -> None:
        cluster.resume(None, records=records)
        read.append([])
        for sample in records:
            read[-1].append(sample)
            if len(read) < 3 and len(read[-1]) == 10:
                raise ClusterChangedError("ps 0 is gone.")

    train()
    assert read == [[*range(10)], [*range(10)], [*range(50)]]


def test_a_planned_change_waits_for_the_end_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL", 0.01)
    monkeypatch.setattr(watch, "PLANNED_GRACE", 0.0)
    registry, servers = serving.alone()
    more = ClusterTask("ps", 1, 0, joined("127.0.0.1", free_port()))
    growing = Growing(registry.ask(LookCluster()), more)
    monkeypatch.setattr(serving, "alone", lambda: (growing, [*servers, serving.start(more)]))
    began = []

    @resilient(checkpoint=tmp_path)
    def train(cluster: Present) -> None:
        strategy = cluster.strategy()
        with strategy.scope():
            value = tf.Variable(0)
        progress = cluster.resume(strategy, value=value)
        began.append((progress.step, int(value.numpy()), len(cluster.spec["ps"])))
        while progress.step < 4:
            progress.schedule(tf.function(lambda: value.assign_add(1)))
            if progress.step == 2:
                growing.grow()
            progress.coordinator.join()

    train()
    assert began == [(0, 0, 1), (3, 3, 2)]


class Growing:
    """A registry that lists one parameter server more after `grow`."""

    def __init__(self, reply: ClusterReply, more: ClusterTask) -> None:
        self._reply, self._more = reply, more
        self._looks = threading.Semaphore(0)

    def ask(self, request: ClusterRequest, wait: float = 0.0) -> ClusterReply:
        self._looks.release()
        return self._reply

    def another(self) -> Growing:
        return self

    def grow(self) -> None:
        """Return when the new list was looked at twice."""
        wanted = {**self._reply.wanted, "ps": 2}
        tasks = (*self._reply.tasks, self._more)
        self._reply = msgspec.structs.replace(self._reply, tasks=tasks, wanted=wanted)
        while self._looks.acquire(blocking=False):
            pass
        for _ in range(3):
            assert self._looks.acquire(timeout=60)
