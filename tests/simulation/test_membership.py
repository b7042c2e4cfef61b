"""Jobs that survive losses: no loss opens a round while another rank trains, and lost ranks come back."""

import random
from collections.abc import Callable

import pytest

from dlrover.errors import ExitCode
from dlrover.rpc.messages import StartAgain
from dlrover.spec.events import (
    MasterAdopted,
    Recovered,
    ReplicaJoined,
    RestartDecided,
    RoundOpened,
)
from dlrover.spec.failure import FailureKind, Rung
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.requests.membership import (
    FinishMembers,
    JoinMembers,
    Meet,
    MembershipRequest,
    checksum,
)
from tests.simulation.cluster import WORKER_KINDS, Cluster
from tests.simulation.nodes import Delays, SimulatedNode

ENOUGH = Limits(
    max_infrastructure_restarts=1000, no_progress_restarts=1000, node_start_attempts=1000
)
SEEDS = range(8)


def job(count: int, *, node_check: bool = False, spares: int = 0) -> JobSpec:
    return JobSpec(
        name="simulated",
        min_nodes=count,
        max_nodes=count,
        managed_nodes=count,
        max_restarts=1000,
        survive=True,
        node_check=node_check,
        spares=spares,
        limits=ENOUGH,
    )


def started(count: int, seed: int, nproc: int = 2) -> Cluster:
    cluster = Cluster(job(count), nodes=0, nproc=nproc, steps=300, seed=seed)
    cluster.run_until(lambda: cluster.training)
    return cluster


def counts(cluster: Cluster, *kinds: type) -> tuple[int, ...]:
    return tuple(sum(isinstance(e.body, kind) for e in cluster.events) for kind in kinds)


def survived(cluster: Cluster) -> int:
    """Number of losses after which the others went on."""
    bodies = [event.body for event in cluster.events]
    return sum(isinstance(b, RestartDecided) and b.rung is Rung.IN_PROCESS for b in bodies)


def all_train(cluster: Cluster) -> bool:
    membership = cluster.machine.state.membership
    return membership.round > 0 and membership.attempts.keys() == membership.latest.keys()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_worker_costs_no_round(seed):
    cluster = started(3, seed)
    cluster.kill_worker(cluster.nodes[seed % 3])
    cluster.run_until(lambda: counts(cluster, ReplicaJoined) == (1,) and all_train(cluster))
    assert (counts(cluster, RoundOpened), survived(cluster)) == ((1,), 1)
    cluster.run_until(lambda: cluster.machine.incident is None)
    assert counts(cluster, RestartDecided, Recovered) == (1, 1)
    goodput = cluster.ledger.goodput(cluster.time.now)
    (incident,) = goodput.incidents
    assert incident.over
    assert incident.seconds["degraded"] == goodput.seconds["degraded"] > 0
    assert goodput.degraded_seconds <= incident.until - incident.since
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_node_costs_no_round_and_its_ranks_come_back(seed):
    cluster = started(3, seed)
    lost = cluster.nodes[seed % 3]
    ranks = {lost.first_rank, lost.first_rank + 1}
    cluster.kill_agent(lost)
    cluster.run_until(lambda: counts(cluster, ReplicaJoined) == (2,))
    assert (counts(cluster, RoundOpened), survived(cluster)) == ((1,), 1)
    membership = cluster.machine.state.membership
    assert {membership.attempts[rank] for rank in ranks} == {1}
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("seed", SEEDS)
def test_losses_at_once_and_during_the_masters_absence_cost_no_round(seed):
    cluster = started(4, seed)
    cluster.kill_worker(cluster.nodes[0])
    cluster.kill_worker(cluster.nodes[1])
    cluster.kill_master(3.0)
    cluster.kill_worker(cluster.nodes[2])
    cluster.run_until(lambda: counts(cluster, ReplicaJoined) == (3,) and all_train(cluster))
    assert (counts(cluster, RoundOpened), survived(cluster)) == ((1,), 3)
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_disk_takes_no_membership_away(seed):
    cluster = started(3, seed)
    cluster.kill_worker(cluster.nodes[0])
    if seed % 2:
        cluster.run_until(lambda: counts(cluster, ReplicaJoined) == (1,) and all_train(cluster))
    else:
        cluster.run_until(lambda: survived(cluster) == 1)
    cluster.lose_disk()
    cluster.run_until(lambda: counts(cluster, MasterAdopted) == (1,) and all_train(cluster))
    lost = cluster.nodes[1]
    cluster.kill_worker(lost)
    cluster.run_until(lambda: not cluster.machine.state.membership.trains(lost.machine.node_id))
    cluster.run_until(lambda: all_train(cluster))
    assert counts(cluster, RoundOpened) == (1,)
    assert cluster.finish().exit_code == ExitCode.SUCCESS


def test_a_rank_that_finishes_before_the_master_knows_its_round_says_so_again():
    cluster = started(2, 1)
    cluster.lose_disk()
    cluster.run_until(lambda: cluster.machine.adoption.pending)
    for request in (FinishMembers(1, 0, 0), Meet(1, 0, 0)):
        assert "has lost round 1" in cluster.program.ask(request).away
    cluster.run_until(lambda: counts(cluster, MasterAdopted) == (1,))
    assert cluster.program.ask(FinishMembers(1, 0, 0)).members.over


@pytest.mark.parametrize("seed", SEEDS)
def test_two_memberships_with_one_number_do_not_meet(seed):
    """A master answers a rank that joins, and is lost with its disk before it tells anybody else."""
    cluster, ask = started(3, seed), None

    def last(request: MembershipRequest) -> object:
        reply = ask(request)
        if isinstance(request, JoinMembers) and not cluster.master_away:
            cluster.lose_disk(0.1)
            cluster.program.ask = ask
        return reply

    ask, cluster.program.ask = cluster.program.ask, last
    cluster.kill_worker(cluster.nodes[0], local_rank=0)
    cluster.run_until(lambda: counts(cluster, MasterAdopted) == (1,))
    (back,) = (r for r in cluster.program.runs[1].replicas.ranks.values() if r.attempt)
    known, present = back._members, cluster.machine.state.membership
    assert known.attempts.keys() > present.attempts.keys()
    cluster.kill_worker(cluster.nodes[1], local_rank=0)
    cluster.run_until(lambda: present.number == known.number)
    meet = Meet(1, known.number, checksum(known.attempts))
    assert "is over" in ask(meet).refused
    cluster.run_until(lambda: all_train(cluster), 20.0)
    assert (counts(cluster, RoundOpened), survived(cluster)) == ((1,), 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_journal_without_its_last_moments_takes_no_membership_away(seed):
    """Nodes and ranks know newer memberships, and later attempts, than the master that reads it."""
    cluster = started(3, seed)
    first, kill = cluster.nodes[0], cluster.kill_agent if seed // 2 % 2 else cluster.kill_worker
    kept = len(cluster.journal)
    kill(first)
    if seed // 4:
        cluster.run_until(lambda: survived(cluster) == 1)
        kept = len(cluster.journal)
    cluster.run_until(lambda: counts(cluster, ReplicaJoined) > (0,) and all_train(cluster))
    cluster.run(0.3)
    cluster.lose_moments(len(cluster.journal) - kept)
    cluster.run(10.0)

    def agreed() -> bool:
        known = [n.machine.members for n in cluster.alive.values() if n.machine.running_round]
        present = cluster.machine.state.membership
        return all((m.number, m.attempts) == (present.number, present.attempts) for m in known)

    cluster.run_until(lambda: agreed() and all_train(cluster), 20.0)
    cluster.kill_worker(cluster.nodes[1])
    cluster.run_until(lambda: survived(cluster) > 0 and agreed(), 1.0)
    assert cluster.finish().exit_code == ExitCode.SUCCESS
    assert counts(cluster, RoundOpened) == (1,)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_rank_opens_a_round(seed):
    cluster = started(1, seed, nproc=1)
    cluster.kill_worker(cluster.nodes[0])
    cluster.run_until(lambda: cluster.machine.rendezvous.round == 2 and cluster.training)
    assert survived(cluster) == 0
    assert cluster.finish().exit_code == ExitCode.SUCCESS


def test_a_mistake_of_the_program_is_no_loss():
    cluster = started(3, 1)
    cluster.kill_worker(cluster.nodes[0], FailureKind.EXCEPTION)
    cluster.run_until(lambda: cluster.machine.rendezvous.round == 2 and cluster.training)
    assert survived(cluster) == 0


def test_a_worker_that_cannot_be_started_again_keeps_no_other_one_from_it(monkeypatch):
    cluster, begun = started(3, 1), []
    node = cluster.nodes[0]

    def start_again(local_rank: int, attempt: int, *, fresh: bool) -> None:
        begun.append((local_rank, attempt))
        if local_rank == 0:
            raise OSError("no process can be made")

    monkeypatch.setattr(node.workers, "start_again", start_again)
    order = StartAgain(node.machine.running_round, {0: 1, 1: 1})
    node.machine.running.clear()
    cluster.time.loop.call_soon(node.agent._handle, order)
    cluster.run_until(lambda: begun[:2] == [(0, 1), (1, 1)], 5.0)


def test_a_worker_that_cannot_be_started_costs_few_restarts(monkeypatch):
    """Without pauses, its restarts would use up a budget within a second."""
    cluster, begun = started(3, 1), []
    node = cluster.nodes[0]
    start_again = node.workers.start_again

    def fail(local_rank: int, attempt: int, *, fresh: bool) -> None:
        begun.append(cluster.time.now)
        if len(begun) < 3:
            raise OSError("Resource temporarily unavailable")
        start_again(local_rank, attempt, fresh=fresh)

    monkeypatch.setattr(node.workers, "start_again", fail)
    cluster.kill_worker(node)
    cluster.run_until(lambda: counts(cluster, ReplicaJoined) == (1,))
    assert begun[-1] - begun[0] > 2.0
    cluster.kill_worker(node)
    failed = len(begun)
    cluster.run_until(lambda: len(begun) > failed, 1.0)


def strike_healing(cluster: Cluster, seconds: float, *, source: bool, masters: bool) -> None:
    """Lose the source or a taker of the next state that is sent, and the master at the same instant if asked for."""

    def look(until: float) -> None:
        run = cluster.program.runs.get(cluster.machine.rendezvous.round)
        healing = run.replicas.healing if run is not None and run.replicas is not None else None
        if healing is None and cluster.time.now < until:
            cluster.time.after(0.05, look, until)
        elif healing is not None:
            victim = run.replicas.ranks[healing.source if source else healing.joining[0]]
            cluster.kill_worker(victim.node, local_rank=victim.local_rank)
            cluster.struck += 1
            if masters:
                cluster.kill_master(2.0)

    look(cluster.time.now + seconds)


def two(cluster: Cluster, kill: Callable[[SimulatedNode], None]) -> None:
    """Lose two nodes, or workers of two, at the same instant."""
    alive = list(cluster.alive.values())
    for node in cluster.time.random.sample(alive, min(2, len(alive))):
        kill(node)


class Troubled(Cluster):
    """A job of replicas whose faults of all kinds end after two minutes."""

    struck = 0
    """Faults during a healing."""
    mistaken = -1
    """Step of the last failure that looks like a mistake of the program: twice at one step, it is one."""

    def __init__(self, seed: int, row: int = 1) -> None:
        chance = random.Random(seed)
        delays = Delays(revive=(0.1, 20.0), heal=(0.05, chance.choice((0.5, 5.0))))
        count, nproc = chance.randint(1, 5), chance.randint(1, 3)
        count += -count % row if nproc % row else 0
        super().__init__(
            job(count, node_check=seed % 3 == 0, spares=seed % 4 // 2 * (1 + seed % 2)),
            nproc=nproc,
            steps=chance.choice([5, 40, 100]),
            seed=seed,
            delays=delays,
        )  # fmt: skip
        self.program.row = row
        self.program.checkpoint_every = chance.choice([1, 5])
        away = [0.1, 1.0, 5.0, 30.0]
        heal = {"source": chance.random() < 0.7, "masters": chance.random() < 0.3}
        self.inject(
            [
                lambda n: self.mistake(n, chance.choice(WORKER_KINDS), chance.randrange(3)),
                self.kill_worker,
                self.kill_agent,
                self.break_device,
                lambda _: two(self, chance.choice((self.kill_worker, self.kill_agent))),
                lambda n: (self.kill_worker(n), strike_healing(self, 10.0, **heal)),
                lambda n: self.disconnect(n, chance.choice([0.0, 0.0, 1.0, 2.0, 5.0, 20.0])),
                lambda n: self.silence(n, chance.choice([0.5, 2.0, 30.0, 70.0, 100.0])),
                lambda _: self.kill_master(chance.choice(away)),
                lambda _: self.lose_disk(chance.choice(away)),
                lambda _: self.lose_moments(chance.randint(1, 40), chance.choice(away)),
                lambda _: self.kill_master(chance.choice(away), after_commands=chance.randrange(6)),
            ],
            every=chance.choice([0.5, 2.0, 5.0, 20.0]),
            until=120.0,
        )

    def mistake(self, node: SimulatedNode, kind: FailureKind, echoes: int) -> None:
        """End a worker in any way, once at a step."""
        if self.program.steps_done != self.mistaken:
            self.mistaken = self.program.steps_done
            self.kill_worker(node, kind, echoes)


def ends_well(seeds: range, row: int = 1) -> None:
    """Each of these jobs succeeds, with each state on the way valid; together, they had faults during a healing."""
    struck = healed = 0
    for seed in seeds:
        cluster = Troubled(seed, row)
        outcome = cluster.finish(limit=3600.0)
        assert outcome.exit_code == ExitCode.SUCCESS, f"seed {seed}: {outcome.reason}"
        assert cluster.program.steps_done >= cluster.program.steps
        struck += cluster.struck
        healed += sum(run.replicas.healed for run in cluster.program.runs.values())
        cluster.close()
    assert min(struck, healed) > len(seeds) / 4


@pytest.mark.slow
def test_a_job_of_replicas_whose_faults_end_succeeds() -> None:
    ends_well(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("row", [2, 3])
def test_a_job_of_rows_whose_faults_end_succeeds(row: int) -> None:
    ends_well(range(8), row)


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(20))
def test_1000_jobs_of_replicas_whose_faults_end_succeed(block: int) -> None:
    ends_well(range(1000 + 50 * block, 1050 + 50 * block))
