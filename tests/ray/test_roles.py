"""Jobs of several roles on a real Ray cluster: who dies is replaced alone, and nothing stays in the cluster."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from dlrover.spec import events
from tests.process.test_roles import ROLES, SCRIPTS, Numbers, coordinator

pytestmark = [
    pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # Ray's own
]  # fmt: skip
WAIT = 200.0


class NumbersOnRay(Numbers):
    """The job of `tests/process/test_roles.py`, on a cluster of which it takes less than two nodes."""

    def __init__(self, run, cluster, name: str = "run", rollouts: int = 2) -> None:
        self.run, self.out = run, run.directory / f"{name}-out"
        self.out.mkdir()
        common = {"config": {"out": str(self.out)}, "shutdown_timeout": 5, "max_restarts": 20}
        one = {**common, "resources": {"cpu": 0.25}}
        roles = {
            "trainer": {"entry": "trainer.py", "kind": "elastic", "processes": 2, **one},
            "rollout": {"entry": "rollout:Rollout", "instances": rollouts, **one},
            "main": {"entry": "main.py", "kind": "driver", **one},
        }
        file = run.directory / f"{name}.yaml"
        file.write_text(json.dumps({"name": name, "directory": str(SCRIPTS), "roles": roles}))
        where = ["--platform", "ray", "--ray-address", cluster.address]
        self.launch = run(
            file, *where, "--job-dir", run.directory / name / "job", launcher=ROLES, name=name
        )
        self.launch.is_ours = True

    def kill_actor(self, role: str) -> None:
        """Kill the actor of an instance, above its agent and that one's zygote."""
        before = len(self.pids(role))
        psutil.Process(self.living(role)[-1]).parents()[2].kill()
        self.launch.until(lambda: len(self.pids(role)) > before, WAIT, f"another actor of {role}")
        self.more(f"after the death of an actor of {role}")


def test_whoever_dies_each_batch_is_learned_once(run, ray_cluster) -> None:
    job = NumbersOnRay(run, ray_cluster)
    job.launch.until(lambda: len(job.served) > 2, WAIT, "the first batches")
    job.kill("rollout")
    kept = job.living("main")
    job.kill_actor("rollout")
    job.kill_actor("trainer")
    for master in ray_cluster.masters():  # of all roles at once
        master.kill()
    job.more("after the death of the masters")
    coordinator(job.launch).kill()
    job.launch.until(lambda: job.launch.events_of(events.CoordinatorRecovered), WAIT)
    job.more("after the death of the coordinator")
    assert job.living("main") == kept, "the driver ran through all of that"
    job.kill("main")

    status = job.status()
    assert (status["rollout"]["restarts"], status["main"]["restarts"]) == (2, 1)
    (job.out / "enough").touch()
    job.launch.end_with(0, WAIT)
    number, total = (job.out / "result").read_text().split()
    step, _, learned = json.loads((job.out / "state.json").read_text())
    assert sorted(learned) == list(range(int(number))), "each batch once"
    assert step == int(number)
    assert float(total) == sum(n * n for n in range(4 * int(number)))


def test_the_death_of_the_command_leaves_nothing_in_the_cluster(run, ray_cluster) -> None:
    job = NumbersOnRay(run, ray_cluster, "killed")
    job.launch.until(lambda: len(job.served) > 2, WAIT, "the first batches")
    job.launch.process.kill()
    ray_cluster.is_empty()


def test_more_than_the_cluster_can_have_is_refused_at_once_by_role(run, ray_cluster) -> None:
    job = NumbersOnRay(run, ray_cluster, "large", rollouts=30)
    assert "role rollout: 30 nodes need CPU 7.5" in job.launch.end_with(2, WAIT)[1]
    assert not Path(job.launch.job_dir, "roles").exists()
