"""Jobs of several roles on a real Ray cluster: who dies is replaced alone, and nothing stays in the cluster."""

from __future__ import annotations

import json

import psutil
import pytest

from dlrover.spec import events
from tests.process.test_roles import ROLES, Numbers, coordinator, each_batch_was_learned_once
from tests.support import certificates

pytestmark = [
    pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # Ray's own
]  # fmt: skip
WAIT = 200.0


def where(cluster) -> tuple[str, ...]:
    return "--platform", "ray", "--ray-address", cluster.address


class NumbersOnRay(Numbers):
    """The job on a cluster, of which it takes less than two nodes."""

    def kill_actor(self, role: str) -> None:
        """Kill the actor of an instance, above its agent and that one's zygote."""
        before = len(self.pids(role))
        psutil.Process(self.living(role)[-1]).parents()[2].kill()
        self.launch.until(lambda: len(self.pids(role)) > before, WAIT, f"another actor of {role}")
        self.more(f"after the death of an actor of {role}")


def test_whoever_dies_each_batch_is_learned_once(run, ray_cluster) -> None:
    """All that goes over a network does so by TLS."""
    tls = certificates.made(run.directory, ray_cluster.address.rpartition(":")[0])
    job = NumbersOnRay(run, *where(ray_cluster), env=certificates.settings(tls))
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
    shown = run.dlrover("goodput", "--job-dir", job.launch.job_dir, "--output", "json").stdout
    assert json.loads(shown)["trainer"]["wall_seconds"] > 0, "of masters that run in the cluster"
    (job.out / "enough").touch()
    job.launch.end_with(0, WAIT)
    each_batch_was_learned_once(job.out)


def test_the_death_of_the_command_leaves_nothing_in_the_cluster(run, ray_cluster) -> None:
    job = NumbersOnRay(run, *where(ray_cluster), name="killed")
    job.launch.until(lambda: len(job.served) > 2, WAIT, "the first batches")
    job.launch.process.kill()
    ray_cluster.is_empty()


def test_more_than_the_cluster_can_have_is_refused_at_once_by_role(run, ray_cluster) -> None:
    file = run.directory / "large.yaml"
    role = {"entry": "json.dumps", "instances": 30, "resources": {"cpu": 0.25}}
    file.write_text(json.dumps({"name": "large", "roles": {"rollout": role}}))
    job_dir = run.directory / "large" / "job"
    launch = run(file, *where(ray_cluster), "--job-dir", job_dir, launcher=ROLES, name="large")
    assert "role rollout: 30 nodes need CPU 7.5" in launch.end_with(2, WAIT)[1]
    assert not (job_dir / "roles").exists()
