"""Jobs that check their nodes, among simulated nodes some of which are ill: who trains in the end."""

import pytest

from dlrover.errors import ExitCode
from dlrover.master.machine.waiting import waiting_for
from dlrover.spec import events
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.node import NodeStatus
from tests.simulation.ailments import Ailment
from tests.simulation.cluster import Cluster
from tests.simulation.nodes import Delays

SEEDS = range(6)
ENOUGH = Limits(max_infrastructure_restarts=1000, no_progress_restarts=1000)


def cluster(minimum: int, maximum: int, *, managed: bool = False, **options: object) -> Cluster:
    spec = JobSpec(
        name="checked",
        min_nodes=minimum,
        max_nodes=maximum,
        managed_nodes=maximum if managed else 0,
        max_restarts=1000,
        node_check=True,
        **({"limits": ENOUGH} | options.pop("spec", {})),
    )
    nodes = 0 if managed else maximum
    return Cluster(spec, **({"nodes": nodes, "steps": 100} | options))


def told(job: Cluster) -> list[tuple[str, tuple[int, ...], str]]:
    bodies = [e.body for e in job.events if isinstance(e.body, events.NodeCheckFinding)]
    return [(body.kind, body.nodes, body.component) for body in bodies]


def members(job: Cluster) -> set[str]:
    """The agents of the latest world."""
    return {job.machine.nodes[i].uid for i in job.machine.rendezvous.members}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("managed", [True, False])
def test_sound_nodes_train_after_one_round(seed, managed):
    job = cluster(4, 4, managed=managed, seed=seed)
    job.run_until(lambda: job.training)
    (finished,) = [e.body for e in job.events if isinstance(e.body, events.NodeCheckFinished)]
    assert (finished.rounds, finished.excluded, told(job)) == (1, 0, [])
    assert job.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ailment", [Ailment.DEVICE, Ailment.NETWORK])
def test_a_faulty_node_is_named_and_the_others_train(seed, ailment):
    job = cluster(3, 4, seed=seed)
    bad = job.nodes[seed % 4]
    bad.ailment = ailment
    job.run_until(lambda: job.training)
    number = bad.machine.node_id
    assert ("fault", (number,), ailment.value) in told(job)
    assert members(job) == {node.uid for node in job.nodes} - {bad.uid}
    times = {type(event.body): event.time for event in job.events}
    assert times[events.RoundCompleted] == times[events.NodeCheckFinished]
    job.run(1.0)
    assert not bad.alive
    assert bad.machine.outcome.exit_code == ExitCode.INFRASTRUCTURE
    assert f"names its {ailment.value}" in bad.machine.outcome.reason
    assert job.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_faulty_node_that_was_launched_is_replaced(seed):
    job = cluster(4, 4, managed=True, seed=seed)
    job.nodes[seed % 4].ailment = Ailment.NETWORK
    job.run_until(lambda: job.training)
    assert len(job.nodes) == 5
    assert len(members(job)) == 4
    assert job.nodes[4].uid in members(job)


@pytest.mark.parametrize(("exclusion_cooldown", "checks"), [(600.0, 1), (0.0, 2)])
def test_a_machine_that_was_left_out_does_not_disturb_the_others(exclusion_cooldown, checks):
    job = cluster(3, 4, spec={"limits": Limits(exclusion_cooldown=exclusion_cooldown)})
    bad = job.nodes[2]
    bad.ailment = Ailment.DEVICE
    job.run_until(lambda: job.training)
    again = job.add_node()
    again.hostname = bad.hostname
    again.ailment = Ailment.DEVICE
    job.run(30.0)
    assert job.machine.checks.count == checks
    assert not again.alive
    assert again.machine.outcome.exit_code == ExitCode.INFRASTRUCTURE
    if exclusion_cooldown:
        assert "is kept out of the job for" in again.machine.outcome.reason
        assert job.machine.rendezvous.round == 1


@pytest.mark.parametrize("managed", [True, False])
def test_a_job_with_too_few_sound_nodes_ends(managed):
    job = cluster(4, 4, managed=managed)

    def ill() -> None:
        for node in [job.nodes[2], *job.nodes[4:]]:
            node.ailment = Ailment.DEVICE
        job.time.after(0.01, ill)

    ill()
    job.run_until(lambda: job.machine.outcome is not None)
    outcome = job.machine.outcome
    assert outcome.exit_code == ExitCode.INFRASTRUCTURE
    assert "device: simulated fault" in outcome.reason
    if not managed:
        assert "only 3 of at least 4 nodes remain" in outcome.reason


def test_replacements_that_are_faulty_too_are_given_up_if_the_others_are_enough():
    job = cluster(3, 4, managed=True)

    def ill() -> None:
        for node in [job.nodes[1], *job.nodes[4:]]:
            node.ailment = Ailment.DEVICE
        job.time.after(0.01, ill)

    ill()
    job.run_until(lambda: len(job.nodes) == 4 + 2 and job.training, 600)
    job.run(30.0)
    assert len(job.nodes) == 6
    assert job.training
    assert job.machine.rounds.world_size == 3 * 2


@pytest.mark.parametrize("ailment", [Ailment.SLOW_DEVICE, Ailment.SLOW_NETWORK])
@pytest.mark.parametrize("excluded", [True, False])
def test_a_slow_node_is_named_and_left_out_if_wanted(ailment, excluded):
    job = cluster(3, 4, spec={"exclude_stragglers": excluded})
    slow = job.nodes[2]
    slow.ailment = ailment
    job.run_until(lambda: job.training)
    assert told(job) == [("slow", (slow.machine.node_id,), ailment.value.removeprefix("slow "))]
    assert (slow.uid in members(job)) is not excluded


@pytest.mark.parametrize("seed", SEEDS)
def test_a_master_that_dies_during_a_check_goes_on_with_it(seed):
    job = cluster(3, 4, seed=seed)
    job.nodes[1].ailment = Ailment.NETWORK
    job.run_until(lambda: job.machine.checks.run is not None)
    for _ in range(3):
        job.run(1.3)
        if job.machine.checks.run is not None:
            job.kill_master(0.5, after_commands=seed % 3)
        job.run(2.0)
    job.run_until(lambda: job.training)
    assert ("fault", (job.nodes[1].machine.node_id,), "network") in told(job)
    assert job.nodes[1].uid not in members(job)


def test_a_node_that_does_not_answer_is_left_out_when_the_time_is_up():
    limits = Limits(check_timeout=30.0, heartbeat_timeout=1000.0)
    job = cluster(3, 4, spec={"limits": limits})
    job.run_until(lambda: job.machine.checks.run is not None)
    began = job.time.now
    silent = job.nodes[3]
    job.silence(silent, 200.0)
    job.run(10.0)
    waiting = waiting_for(job.machine, job.time.now)
    assert waiting.startswith("checking nodes, round 1 of at most 4: ")
    assert waiting.endswith(f"of 30 s; no answer yet from {silent.machine.node_id}")
    job.run_until(lambda: job.training)
    assert ("fault", (silent.machine.node_id,), "agent") in told(job)
    assert job.time.now - began < 30.0 + 15.0 + 3 * 30.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_with_a_fault_of_the_infrastructure_is_checked_again(seed):
    job = cluster(3, 4, seed=seed)
    job.run_until(lambda: job.training)
    bad = job.nodes[seed % 4]
    bad.ailment = Ailment.DEVICE
    job.kill_worker(bad, FailureKind.SIGNAL)
    job.run_until(lambda: job.machine.rendezvous.round == 2 and job.training)
    assert told(job) == [("fault", (bad.machine.node_id,), "device")]
    assert job.machine.nodes[bad.machine.node_id].status is NodeStatus.LOST


@pytest.mark.parametrize(
    ("kind", "limits", "checks"),
    [
        (FailureKind.SIGNAL, ENOUGH, 2),
        (FailureKind.EXCEPTION, ENOUGH, 1),
        (FailureKind.SIGNAL, Limits(check_after_fault=False), 1),
    ],
)
def test_only_faults_of_the_infrastructure_lead_to_a_check(kind, limits, checks):
    job = cluster(4, 4, spec={"limits": limits})
    job.run_until(lambda: job.training)
    job.kill_worker(job.nodes[0], kind)
    job.run_until(lambda: job.machine.rendezvous.round == 2 and job.training)
    assert job.machine.checks.count == checks


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_during_checks_the_job_ends_well(seed):
    delays = Delays(revive=(5.0, 30.0))
    job = cluster(2, 6, seed=seed, steps=300, managed=seed % 2 == 0, delays=delays)
    chance = job.time.random
    faults = [
        job.kill_worker,
        job.kill_agent,
        job.stop_agent,
        lambda node: job.disconnect(node, chance.uniform(0.0, 5.0)),
        lambda node: job.silence(node, chance.uniform(0.0, 90.0)),
        lambda _: job.kill_master(chance.uniform(0.1, 5.0)),
        lambda node: setattr(node, "ailment", chance.choice(list(Ailment))),
        lambda node: setattr(node, "ailment", Ailment.NOTHING),
    ]
    job.inject(faults, every=15.0, until=600.0)
    outcome = job.finish()
    acceptable = {ExitCode.SUCCESS, ExitCode.INFRASTRUCTURE}
    assert outcome.exit_code in acceptable, outcome
    if outcome.exit_code == ExitCode.INFRASTRUCTURE:
        assert "node check" in outcome.reason or "nodes joined" in outcome.reason


@pytest.mark.slow
@pytest.mark.parametrize("count", [500, pytest.param(2000, marks=pytest.mark.heavy)])
def test_hundreds_of_nodes(count):
    job = cluster(count, count + 48, seed=3, steps=3, validate_every=500)
    bad = [job.nodes[i] for i in (7, 230, 420)]
    for node in bad:
        node.ailment = Ailment.NETWORK
    job.run_until(lambda: job.training)
    assert {t[1][0] for t in told(job) if t[0] == "fault"} == {n.machine.node_id for n in bad}
    assert job.machine.rounds.world_size == 2 * (count + 45)
