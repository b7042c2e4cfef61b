"""The job machine among real agent machines: faults by seed, and peers that say anything in any order."""

import copy
import gc
import random

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Phase
from dlrover.master.machine.waiting import waiting_for
from dlrover.rpc.messages import (
    AssignWorld,
    CallToRound,
    Hello,
    Join,
    Leaving,
    StartAgain,
    StopRequest,
    Succeeded,
    Welcome,
)
from dlrover.spec import events
from dlrover.spec.events import RoundOpened
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.node import LaunchNode, NodeStatus
from dlrover.spec.requests.membership import (
    FinishMembers,
    JoinMembers,
    LeaveMembers,
    Members,
    MembershipChange,
    RenewMembers,
)
from dlrover.spec.world import Holding, Offer, World
from tests.simulation.cluster import WORKER_KINDS, Cluster
from tests.simulation.nodes import Delays, SimulatedWorkers

ENOUGH = Limits(
    max_infrastructure_restarts=1000, no_progress_restarts=1000, node_start_attempts=1000
)


def job(minimum: int, maximum: int, *, managed: bool = False, **options: object) -> JobSpec:
    settings_of_job = {"limits": ENOUGH, "max_restarts": 1000} | options
    return JobSpec(
        name="simulated",
        min_nodes=minimum,
        max_nodes=maximum,
        managed_nodes=maximum if managed else 0,
        **settings_of_job,
    )


def started(spec: JobSpec, **options: object) -> Cluster:
    """A cluster whose first round trains."""
    nodes = 0 if spec.managed_nodes else spec.max_nodes
    cluster = Cluster(spec, **({"nodes": nodes, "steps": 200} | options))
    cluster.run_until(lambda: cluster.training)
    return cluster


def rounds(cluster: Cluster) -> int:
    return sum(isinstance(event.body, RoundOpened) for event in cluster.events)


def settle(cluster: Cluster) -> None:
    """Long enough for everything that follows from one fault."""
    cluster.run(50.0)
    assert cluster.training, cluster.describe()


# ---- one fault costs one round

SEEDS = range(8)


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_worker_costs_one_round_and_no_node(seed, managed):
    cluster = started(job(3, 3, managed=managed), seed=seed)
    nodes = set(cluster.machine.nodes)
    cluster.kill_worker(cluster.nodes[seed % 3], random.Random(seed).choice(WORKER_KINDS), echoes=2)
    settle(cluster)
    assert (rounds(cluster), cluster.machine.restarts.count) == (2, 1)
    assert set(cluster.machine.nodes) == nodes
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_agent_of_a_managed_job_of_fixed_size_costs_one_round(seed):
    cluster = started(job(3, 3, managed=True), seed=seed)
    cluster.kill_agent(cluster.nodes[seed % 3])
    settle(cluster)
    assert (rounds(cluster), cluster.machine.restarts.count) == (2, 1)
    assert cluster.machine.rounds.world_size == 6
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_stopped_agent_costs_one_round_and_all_nodes_store_what_is_in_memory(seed, managed):
    cluster = started(job(3, 3, managed=managed), seed=seed, delays=Delays(revive=(0.5, 1.0)))
    before = cluster.nodes[:3]
    stopped = before[seed % 3]
    cluster.stop_agent(stopped)
    settle(cluster)
    assert (rounds(cluster), cluster.machine.restarts.count) == (2, 1)
    assert [node.workers.flushes for node in before] == [1, 1, 1]
    assert (cluster.machine.rounds.world_size, stopped.alive) == (6, False)
    lost = [e.body for e in cluster.events if isinstance(e.body, events.NodeLost)]
    assert [body.reason for body in lost] == [
        "its agent left" if managed else "the agent was stopped by SIGTERM"
    ]
    assert cluster.finish().exit_code == ExitCode.SUCCESS


def test_the_savers_of_a_stopped_agent_have_the_time_that_workers_elsewhere_may_take(monkeypatch):
    waits = []

    async def close(_: SimulatedWorkers, saver_wait: float = 0.0) -> None:
        waits.append(saver_wait)

    monkeypatch.setattr(SimulatedWorkers, "close", close)
    cluster = started(
        job(3, 3, managed=True), seed=1, delays=Delays(stop=(0.1, 1.0), store=(0.1, 0.2))
    )
    spec = cluster.machine.job
    longest = spec.shutdown_timeout + spec.limits.release_grace
    cluster.stop_agent(cluster.nodes[0])
    settle(cluster)
    assert [longest - 1.3 < wait < longest for wait in waits] == [True]


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("whole", [True, False], ids=["job", "node"])
def test_a_master_that_takes_over_waits_for_nodes_that_store_what_is_in_memory(managed, whole):
    delays = Delays(stop=(0.1, 1.0), store=(40.0, 50.0), revive=(0.5, 1.0))
    cluster = started(job(3, 3, managed=managed), seed=1, delays=delays)
    leaving = cluster.nodes[:3] if whole else cluster.nodes[1:2]
    if whole:
        cluster.stop()
    else:
        cluster.stop_agent(*leaving)
    cluster.run(3.0)
    cluster.kill_master()
    cluster.run(35.0)
    assert all(node.alive for node in leaving)
    assert not cluster.training
    cluster.run(30.0)
    assert not any(node.alive for node in leaving)
    assert cluster.training != whole


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_agent_of_an_elastic_job_costs_a_round_to_shrink_and_one_to_grow(seed, managed):
    delays = Delays(revive=(20.0, 25.0), launch=(8.0, 9.0))
    cluster = started(job(2, 3, managed=managed), seed=seed, delays=delays)
    cluster.kill_agent(cluster.nodes[seed % 3])
    cluster.run_until(lambda: cluster.training and cluster.machine.rendezvous.round == 2, 8.0)
    assert cluster.machine.rounds.world_size == 4
    settle(cluster)
    assert (rounds(cluster), cluster.machine.restarts.count) == (3, 1)
    assert cluster.machine.rounds.world_size == 6


@pytest.mark.parametrize("seed", SEEDS)
def test_a_broken_device_costs_its_node_and_one_round(seed):
    cluster = started(job(3, 3, managed=True), seed=seed)
    broken = cluster.nodes[seed % 3]
    cluster.break_device(broken)
    settle(cluster)
    assert (rounds(cluster), cluster.machine.restarts.count) == (2, 1)
    assert not broken.alive
    assert cluster.machine.faults.excluded(cluster.time.now) == (broken.hostname,)
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_with_a_broken_device_that_came_by_itself_leaves(seed):
    cluster = started(job(2, 3), nodes=3, seed=seed)
    broken = cluster.nodes[seed % 3]
    cluster.break_device(broken)
    settle(cluster)
    assert (rounds(cluster), cluster.machine.rounds.world_size) == (2, 4)
    assert not broken.alive
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_that_come_together_cost_one_round(seed):
    cluster = started(job(2, 6), nodes=2, seed=seed, delays=Delays(launch=(0.2, 1.0)))
    for _ in range(3):
        cluster.add_node()
    settle(cluster)
    assert (rounds(cluster), cluster.machine.restarts.count) == (2, 0)
    assert cluster.machine.rounds.world_size == 10


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_too_many_waits_until_it_is_needed(seed):
    cluster = started(job(3, 3), seed=seed)
    spare = cluster.add_node()
    settle(cluster)
    assert rounds(cluster) == 1
    cluster.kill_agent(cluster.nodes[0])
    settle(cluster)
    assert (rounds(cluster), spare.training) == (2, True)


@pytest.mark.parametrize(
    "fault",
    [
        lambda c: c.disconnect(c.nodes[1], 1.5),
        lambda c: c.silence(c.nodes[1], 50.0),
        lambda c: c.kill_master(30.0),
        lambda c: [c.disconnect(c.nodes[0]), c.kill_master(0.1), c.silence(c.nodes[2], 5.0)],
    ],
    ids=["short disconnection", "short silence", "lost master", "all together"],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_stops_no_worker_costs_no_round(seed, fault):
    cluster = started(job(3, 3), seed=seed)
    fault(cluster)
    settle(cluster)
    assert rounds(cluster) == 1
    assert cluster.finish().restarts == 0


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_stays_silent_costs_its_place_and_comes_back_as_a_new_one(seed, managed):
    delays = Delays(launch=(4.0, 5.0))
    cluster = started(job(2, 3, managed=managed), seed=seed, steps=400, delays=delays)
    cluster.silence(cluster.nodes[1], 90.0)
    cluster.run(120.0)
    assert (rounds(cluster), cluster.machine.restarts.count) == (3, 1)
    assert cluster.machine.rounds.world_size == 6
    assert len(cluster.alive) == 3
    lost = cluster.machine.nodes[cluster.nodes[1].launched_as] if managed else None
    assert lost is None or lost.status is NodeStatus.LOST


# ---- the job always reaches its end


def troubled(seed: int) -> Cluster:
    """A job of random size and kind, whose faults end after two minutes."""
    chance = random.Random(seed)
    unit = chance.choice([1, 1, 1, 2])
    maximum = unit * chance.randint(1, 5 // unit)
    minimum = unit * chance.randint(1, maximum // unit)
    managed = chance.random() < 0.5
    cluster = Cluster(
        job(minimum, maximum, managed=managed, node_unit=unit),
        nodes=0 if managed else maximum + chance.randrange(2),
        nproc=chance.randint(1, 3),
        steps=chance.choice([5, 40, 100]),
        seed=seed,
        delays=Delays(revive=(0.1, 20.0)),
    )
    away = [0.1, 1.0, 5.0, 30.0]
    cluster.inject(
        [
            lambda n: cluster.kill_worker(n, chance.choice(WORKER_KINDS), chance.randrange(3)),
            cluster.kill_agent,
            cluster.stop_agent,
            cluster.break_device,
            lambda n: cluster.disconnect(n, chance.choice([0.0, 0.0, 1.0, 2.0, 5.0, 20.0])),
            lambda n: cluster.silence(n, chance.choice([0.5, 2.0, 30.0, 70.0, 100.0])),
            lambda _: cluster.kill_master(chance.choice(away)),
            lambda _: cluster.kill_master(chance.choice(away), after_commands=chance.randrange(6)),
            lambda _: cluster.add_node() if chance.random() < 0.3 else None,
            lambda _: cluster.scale(chance.randint(0, 7), chance.choice(["user", "plan"])),
        ],
        every=chance.choice([0.5, 2.0, 5.0, 20.0]),
        until=120.0,
    )
    return cluster


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "block", [pytest.param(n, marks=pytest.mark.heavy if n else ()) for n in range(8)]
)
def test_a_job_whose_faults_end_succeeds_and_its_nodes_leave(block):
    for seed in range(block * 125, (block + 1) * 125):
        cluster = troubled(seed)
        outcome = cluster.finish(limit=3600.0)
        assert outcome.exit_code == ExitCode.SUCCESS, f"seed {seed}: {outcome.reason}"
        assert cluster.program.steps_done >= cluster.program.steps
        assert cluster.machine.state.phase is Phase.SUCCEEDED
        cluster.run(
            35.0
        )  # a master that was killed is back, and notices the end of the last streams
        assert cluster.ledger.goodput(cluster.time.now).nodes == len(cluster.machine.nodes)
        assert not cluster.ledger.accounts, "a node's time goes on though it has left"


def test_a_seed_gives_the_same_run_every_time():
    first, second, other = troubled(3), troubled(3), troubled(4)
    for cluster in (first, second, other):
        cluster.run(150.0)
    assert first.journal == second.journal
    assert first.events == second.events
    assert first.journal != other.journal


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_budget_the_job_ends_in_order(seed):
    cluster = started(job(2, 3, max_restarts=0), seed=seed)
    cluster.kill_worker(cluster.nodes[0], FailureKind.EXCEPTION)
    outcome = cluster.finish(30.0)
    assert outcome.exit_code == ExitCode.USER_CODE
    assert outcome.failure is not None
    assert outcome.failure.exception == "ValueError"


@pytest.mark.parametrize("seed", SEEDS)
def test_an_echo_that_is_reported_first_is_not_the_cause(seed):
    cluster = started(job(3, 3, max_restarts=0), seed=seed)
    cluster.silence(cluster.nodes[1], 0.3)  # its reports come late
    cluster.kill_worker(cluster.nodes[1], FailureKind.EXCEPTION, echoes=2)
    outcome = cluster.finish(60.0)
    assert outcome.failure is not None
    assert outcome.failure.exception == "ValueError"
    assert len(outcome.others) <= 2


@pytest.fixture
def _no_collection():
    """Collecting garbage among the objects of thousands of agents takes half of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.heavy)])
def test_thousands_of_nodes_form_a_world_and_recover(count):
    spec = job(count, count, managed=True)
    cluster = Cluster(spec, nproc=1, steps=30, seed=1, validate_every=5_000)
    cluster.run_until(lambda: cluster.training)
    assert cluster.machine.rounds.world_size == count
    cluster.kill_worker(cluster.nodes[1432], echoes=100)
    cluster.kill_agent(cluster.nodes[1234])
    cluster.run_until(lambda: cluster.training and cluster.machine.rendezvous.round == 2)
    cluster.kill_master()
    assert cluster.finish().exit_code == ExitCode.SUCCESS
    assert rounds(cluster) == 2


# ---- anything in any order

Noise = list[tuple[int, int, int]]
NOISE = st.lists(
    st.tuples(st.integers(0, 19), st.integers(0, 7), st.integers(0, 7)), min_size=20, max_size=60
)
SERVERS = {"servers": 2, "min_servers": 1, "max_servers": 2, "managed": True}
JOBS = st.sampled_from(
    [
        job(1, 2, server_failover="job", **SERVERS),
        job(1, 2, server_failover="instance", **SERVERS),
        job(2, 3, survive=True),
        job(2, 3, survive=True, managed=True),
        *[
            job(
                minimum,
                maximum,
                managed=managed,
                node_unit=unit,
                max_restarts=restarts,
                limits=limits,
            )
            for minimum, maximum, unit in [(1, 1, 1), (1, 3, 1), (2, 4, 2), (3, 3, 1)]
            for managed in (False, True)
            for restarts, limits in [(0, Limits()), (1000, ENOUGH)]
        ],
    ]
)
quick = settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


CHANGES = LaunchNode | CallToRound | AssignWorld | StartAgain | Members | inputs.Emit
"""What no command of an ended job is."""


SECONDS: list[tuple[float, ...]] = [
    (),
    (1.0, 2.0, 0.5, 0.0, 3.0, 0.25),
    (1.0, 7.3, 0.5, 1e-7, 3.0, 0.25),
    (0.0,) * 6,
    (float("nan"), float("inf"), -1.0, 1e300, 1.0, 0.1),
    (5.0,),
    (1e9, 1e9, 1e9, 1e9, 1e9, 1e9),
    (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
]
"""What workers may claim to have spent their time on."""


class HostilePeers:
    """Makes inputs out of numbers: all that the master's shell lets pass, sensible or not."""

    def __init__(self, spec: JobSpec) -> None:
        self.machine = JobMachine()
        self.ledger = Ledger()
        self.now = 1000.0
        self.last: inputs.Input = inputs.Submitted(spec)
        self.ended = 0
        self.give(self.last)

    def give(self, event: inputs.Input) -> list[inputs.Command]:
        self.last = event
        over = self.machine.outcome is not None
        commands = self.machine.handle(event, self.now)
        self.machine.validate()
        self.ledger.handle(event, self.now, self.machine)
        self.ledger.validate()
        for command in commands:
            assert not (over and isinstance(getattr(command, "message", command), CHANGES))
            self.ended += isinstance(command, inputs.EndJob)
        assert self.ended == (self.machine.outcome is not None)
        assert self.machine.state.phase
        assert waiting_for(self.machine, self.now) or not self.waits()
        return commands

    def waits(self) -> bool:
        return self.machine.outcome is None and self.machine.rendezvous.collecting

    def play(self, noise: Noise) -> None:
        for kind, a, b in noise:
            for event in self.several(kind, a, b) or [self.single(kind, a, b)]:
                if event is not None:
                    self.give(event)

    def several(self, kind: int, a: int, b: int) -> list[inputs.Input | None]:
        """What brings the job on: nodes come, all join, most succeed."""
        machine, rdzv = self.machine, self.machine.rendezvous
        if kind == 17:
            uids = [f"agent {i}" for i in range(1, 4 + b % 2)]
            return [Hello(uid, -1, -1, "host", 0) for uid in uids]
        if kind == 18:
            joining = set(machine.fleet.by_uid.values()) - set(
                machine.rounds.worlds if b == 7 else ()
            )
            return [inputs.Reported(i, Join(rdzv.next_round, offer(a))) for i in sorted(joining)]
        if kind == 19:
            return [
                inputs.Reported(i, Succeeded(rdzv.round))
                for i in rdzv.members[0 if b == 7 else 1 :]
            ]
        return []

    def single(self, kind: int, a: int, b: int) -> inputs.Input | None:
        """What the shell would make of a message; None where it would make nothing."""
        machine, rdzv = self.machine, self.machine.rendezvous
        current = rdzv.next_round if kind % 2 else rdzv.round
        round_ = [current, current, current, rdzv.last_round, 0, -1, 10**9, 2**63][b]
        attended = list(machine.fleet.by_uid.values())
        launched = [n.id for n in machine.nodes.values() if n.launched]
        common = self.anybody(kind, a, b, round_)
        if kind in (10, 11) and launched:
            node_id = launched[a % len(launched)]
            exited = inputs.NodeExited(node_id, "its agent ended")
            return exited if kind == 10 else inputs.NodePlaced(node_id, f"process {b}")
        if kind >= 12 and attended:
            node_id = attended[a % len(attended)]
            return {
                12: inputs.NodeDisconnected(node_id),
                13: inputs.NodeSilent(node_id, 60.0),
                14: inputs.Reported(node_id, Succeeded(round_)),
                15: inputs.Reported(node_id, Join(round_, offer(a))),
                16: None
                if a % 2
                else inputs.Reported(node_id, Leaving("The agent was stopped by SIGTERM."))
                if b < 4
                else inputs.NodeDisconnected(node_id),
            }.get(kind) or common
        return common

    def anybody(self, kind: int, a: int, b: int, round_: int) -> inputs.Input | None:
        """What does not come from a node that is known."""
        machine, rdzv = self.machine, self.machine.rendezvous
        if kind <= 2:
            self.now += [0.0, 0.5, 1.0, 3.5, 16.0, 31.0, 61.0, 601.0 if b == 7 else 0.0][a]
            return inputs.DeadlinePassed()
        if kind <= 5:
            uid = f"agent {a}" if a else ""
            running = round_ if kind == 5 else rdzv.last_round * (b % 2)
            claimed = machine.fleet.by_uid.get(uid, [-1, 0, 1, 2, 99, -7, 3, 2**40][b])
            host = f"host{b % 3}"
            return Hello(uid, claimed, b - 1, host, running, held(kind, a, b))
        if kind == 8:
            return machine.state.table.failed(self.failure(a, b, round_))
        rare = {
            6: StopRequest("stopped", [5, 143, 0, 77][self.machine.progress.steps % 4])
            if a == b == 7
            else inputs.ScaleRequested(a, "a test", "plan" if b % 2 else "user"),
            7: inputs.MasterStarted(7) if a >= 6 else None,
            16: inputs.MemberReported(change(a, b, machine)) if a % 2 else None,
            9: inputs.Progressed(rdzv.round, machine.progress.steps + 1 + a, SECONDS[b], a - 1),
        }
        return rare.get(kind)

    def failure(self, a: int, b: int, round_: int) -> Failure:
        return Failure(
            id=f"{a}",
            kind=WORKER_KINDS[a % 4],
            exit_code=b,
            exception=["ValueError", "DistNetworkError", "SyntaxError"][a % 3],
            node_id=a - 1,
            rank=b,
            local_rank=a,
            round=round_,
            time=self.now + a - b,
            steps=(a - 1) * 10,
            message="x" * 100_000 if a == 6 else "uncorrectable ECC error" if b == 5 else "",
            signal=[6, 9, 11][b % 3],
            node_facts=("NVRM: Xid (PCI:0): 79",) if a == 4 else (),
        )


def change(a: int, b: int, machine: JobMachine) -> MembershipChange:
    """What a rank, living or dead, may report of the membership."""
    membership = machine.state.membership
    round_ = membership.round + b // 6
    attempt = membership.latest.get(a, 0) - b % 2
    if b == 5:
        return FinishMembers(round_, a, attempt)
    if b == 3:
        return LeaveMembers(round_, a, attempt)
    if b == 4:
        return RenewMembers(round_, a, attempt, membership.number)
    return JoinMembers(round_, a, attempt)


def held(kind: int, a: int, b: int) -> Holding | None:
    """What an agent may claim to hold of a round of three, two or one nodes, or of nothing."""
    if kind != 5:
        return None
    count = 1 + b % 3
    world = World(a, 0, a % count, count, 2 * (a % count), 2 * count, "host", 29400)
    return Holding(
        round=a, world=world if b < 6 else None, nproc=2, succeeded=a == 3, stopping=a == 7
    )


def offer(a: int) -> Offer:
    return Offer(1 + a % 3, f"10.0.0.{a}", 29400 + a)


@pytest.mark.slow
@pytest.mark.timeout(120)
@quick
@given(JOBS, NOISE)
def test_no_order_of_inputs_breaks_the_job_machine(spec, noise):
    HostilePeers(spec).play(noise)


REPEATABLE = (
    inputs.NodeExited
    | inputs.NodeDisconnected
    | inputs.NodeSilent
    | inputs.Reported
    | inputs.WorkerFailed
    | inputs.Progressed
    | StopRequest
    | inputs.ScaleRequested
    | inputs.DeadlinePassed
)


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(quick, max_examples=300)
@given(JOBS, NOISE)
def test_an_input_that_is_repeated_changes_nothing(spec, noise):
    peers = HostilePeers(spec)
    peers.play(noise)
    if not isinstance(peers.last, REPEATABLE):
        return
    before = copy.deepcopy(peers.machine)
    commands = peers.give(peers.last)
    assert all(isinstance(getattr(c, "message", c), CallToRound) for c in commands)
    before.state.commands = peers.machine.state.commands
    assert peers.machine == before


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(quick, max_examples=300)
@given(JOBS, NOISE)
def test_after_any_noise_nodes_that_behave_form_a_world(spec, noise):
    peers = HostilePeers(spec)
    peers.play(noise)
    machine = peers.machine
    for node_id in list(machine.fleet.by_uid.values()):
        peers.give(inputs.NodeDisconnected(node_id))
    honest = [f"honest {i}" for i in range(spec.max_nodes)]
    inbox = [command for uid in honest for command in peers.give(Hello(uid, -1, -1, "host", 0))]
    for _ in range(100):
        members = {machine.fleet.by_uid[uid] for uid in honest} & set(machine.rounds.worlds)
        if machine.outcome is not None or (members and not machine.rendezvous.collecting):
            break
        while inbox:
            command = inbox.pop(0)
            said = getattr(command, "message", command)
            if isinstance(said, Welcome | CallToRound):
                node_id = said.node_id if isinstance(said, Welcome) else command.node_id
                joined = inputs.Reported(node_id, Join(said.round, offer(1)))
                inbox += peers.give(joined)
        peers.now = max(peers.now, machine.deadline() or peers.now)
        inbox += peers.give(inputs.DeadlinePassed())
    else:
        raise AssertionError(waiting_for(machine, peers.now))
