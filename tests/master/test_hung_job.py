"""What a job does about a hang that was found."""

from __future__ import annotations

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.spec import events
from dlrover.spec.job import JobSpec
from tests.simulation.cluster import Cluster


def hung(cluster: Cluster, place: str = "read (data.py:41)", *, restart: bool = True) -> None:
    """The watch over the workers finds that they hang."""
    found = events.HangFound(
        cluster.machine.rendezvous.round, (1,), place, f"rank 1 in {place}", 200
    )
    for node in cluster.nodes:
        node.agent._say_progress()
    cluster.run(0.1)
    cluster._submit(inputs.Hung(found, restart))


def training() -> Cluster:
    cluster = Cluster(JobSpec(name="hung", min_nodes=3, max_nodes=3), nodes=3, steps=400)
    cluster.run_until(lambda: cluster.training)
    return cluster


def sentences(cluster: Cluster) -> list[str]:
    return [event.sentence() for event in cluster.events]


def test_a_hang_is_told_and_the_workers_restart_on_the_infrastructures_budget():
    cluster = training()
    hung(cluster)
    told = sentences(cluster)
    assert "The training has been hanging for 200 s: rank 1 in read (data.py:41)." in told
    assert "Restart 1: the training hung in read (data.py:41)." in told
    assert cluster.machine.restarts.user_restarts == 0
    assert len(cluster.machine.restarts.infrastructure_times) == 1
    cluster.run(30)
    assert cluster.training
    assert cluster.machine.rendezvous.round == 2
    assert cluster.finish().exit_code == ExitCode.SUCCESS


def test_a_hang_that_is_only_reported_changes_nothing():
    cluster = training()
    hung(cluster, restart=False)
    assert cluster.machine.rendezvous.round == 1
    assert cluster.machine.incident is None
    assert any("The training has been hanging" in sentence for sentence in sentences(cluster))


def test_a_hang_of_a_round_that_is_over_is_nothing():
    cluster = training()
    before = len(cluster.events)
    found = events.HangFound(7, (1,), "x", "x", 200)
    cluster._submit(inputs.Hung(found, True))
    cluster._submit(inputs.RankSpeed(7, events.SlowRank(1, 1, 1.5, "data")))
    assert len(cluster.events) == before


def test_a_job_that_hangs_at_the_same_place_before_any_step_ends():
    """However long each round has waited there."""
    cluster = training()
    for _ in range(5):
        if cluster.machine.outcome is not None:
            break
        cluster.run_until(lambda: not cluster.machine.rendezvous.collecting)
        cluster.machine.progress.steps = 0
        cluster.machine.rounds.since -= 10_000
        found = events.HangFound(
            cluster.machine.rendezvous.round, (), "init (train.py:9)", "x", 1900
        )
        cluster._submit(inputs.Hung(found, True))
    assert cluster.machine.outcome is not None
    assert cluster.machine.outcome.exit_code == ExitCode.NO_PROGRESS
    verdict = cluster.machine.outcome.verdict
    assert verdict is not None
    assert verdict.title == "the training hung in init (train.py:9)"
    assert verdict.evidence == "x"
    assert cluster.machine.outcome.failure is None


def test_a_slow_rank_is_told():
    cluster = training()
    cluster._submit(inputs.RankSpeed(1, events.SlowRank(1, 1, 1.5, "data")))
    cluster._submit(inputs.RankSpeed(1, events.SlowRankRecovered(1, 1)))
    assert sentences(cluster)[-2:] == [
        "Rank 1 on node 1 is slow: it waits for its data, and takes 1.50 times as long for a step as "
        "the median rank.",
        "Rank 1 on node 1 is no longer slow.",
    ]


def test_another_master_finds_the_hang_in_the_journal():
    cluster = training()
    hung(cluster)
    cluster.kill_master()
    cluster.run(60)
    assert cluster.finish().exit_code == ExitCode.SUCCESS
    assert sum("The training has been hanging" in sentence for sentence in sentences(cluster)) == 1
