"""A reinforcement learning job on a virtual clock: who restarts with a trainer that fails, and what that costs."""

from __future__ import annotations

import pytest

from dlrover.roles.spec import Failover
from dlrover.spec import events
from tests.simulation.nodes import Delays
from tests.simulation.roles import ROLLOUT, TRAINER, Training, Workload

pytestmark = pytest.mark.slow

STARTS = Delays(launch=(100.0, 100.0), start=(150.0, 150.0))
LOAD = Workload(2, 6, 8, 100.0, 100.0, 3.0, 10.0, STARTS, STARTS)


def trained(**changes: object) -> Training:
    fields = {name: getattr(LOAD, name) for name in LOAD.__dataclass_fields__} | changes
    training = Training(Workload(**fields), seed=1)
    training.finish()
    return training


def restarts(training: Training) -> dict[str, tuple[int, int]]:
    """Restarts of the jobs of roles, and of instances within them."""
    roles = training.coordinator.machine.roles
    return {name: (role.restarted, role.instance_restarts) for name, role in roles.items()}


def test_a_trainers_fault_stops_no_rollout_and_each_prompt_is_learned_once() -> None:
    calm, alone = trained(), trained(faults=(2.5,))
    assert restarts(alone) == {TRAINER: (0, 1), ROLLOUT: (0, 0)}
    assert 100.0 < alone.seconds - calm.seconds < 150.0 + 103.0 + 10.0
    whole = trained(faults=(2.5,), failover=Failover.JOB)
    assert restarts(whole) == {TRAINER: (1, 0), ROLLOUT: (1, 0)}
    assert whole.seconds > alone.seconds + 90.0
    for training in (calm, alone, whole):
        assert training.lessons == dict.fromkeys(range(48), 1)
        assert training.stalest <= 2
        training.close()
    again = trained(faults=(2.5,), failover=Failover.JOB)
    assert (again.seconds, again.up) == (whole.seconds, whole.up)
    again.close()


def test_a_rollouts_fault_restarts_no_other_instance() -> None:
    training = trained(faults=(1.5, 3.5), victim=ROLLOUT)
    assert restarts(training) == {TRAINER: (0, 0), ROLLOUT: (0, 2)}
    assert training.lessons == dict.fromkeys(range(48), 1)
    ended = [e.body for e in training.coordinator._history.events]
    assert sum(isinstance(body, events.InstanceEnded) for body in ended) == 2
    training.close()
