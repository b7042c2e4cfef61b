"""A reinforcement learning job of two roles on a virtual clock, with the real coordinator, masters and agents.

The trainer is one world; each rollout is an instance. Rollouts take prompts from a queue, generate an answer with
the weights that count, and put it into another queue; a step of the trainer learns from one batch of them, saves, and
publishes the next version. Queues, versions, cursors and who serves are those of the real `RolesService`. Simulated
are processes, the machines on which they run, and how long things take.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dlrover.cli.run.arguments import parse
from dlrover.errors import ExitCode
from dlrover.master.journal.history import History
from dlrover.roles import messages
from dlrover.roles.coordinator.jobs import arguments
from dlrover.roles.coordinator.shell import Coordinator
from dlrover.roles.messages import MemberPlace, Version
from dlrover.roles.spec import (
    EntryForm,
    EntryPoint,
    Failover,
    RoleKind,
    RolesConfig,
    RolesJob,
    RoleSpec,
)
from dlrover.spec.events import Event
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import Limits
from dlrover.spec.jobdir import JobDir
from dlrover.spec.node import Size
from dlrover.spec.outcome import Outcome
from dlrover.spec.world import World
from tests.simulation.clock import Time
from tests.simulation.cluster import Cluster
from tests.simulation.nodes import Delays, Run, SimulatedNode

TRAINER, ROLLOUT, WEIGHTS = "trainer", "rollout", "policy"
SCRIPT = EntryPoint(EntryForm.SCRIPT, str(Path(__file__)))
AHEAD = 2
"""Batches of prompts that are given out at most, the one in training included."""


@dataclass(frozen=True)
class Workload:
    """How large the job is, and how long things take in seconds."""

    machines: int
    """Of each role; one process stands for all devices of a machine."""
    steps: int
    prompts: int
    """Of one step."""
    rollout: float
    """Time in which all rollouts generate one batch."""
    train: float
    save: float
    pull: float
    """Until a rollout has the newest weights."""
    trainer: Delays
    rollouts: Delays
    spread: float = 0.5
    """Largest relative deviation of the time for a prompt from its mean."""
    faults: tuple[float, ...] = ()
    """When a process is killed: after how many steps of the trainer."""
    victim: str = TRAINER
    failover: Failover = Failover.INSTANCE
    fresh: bool = False
    """Whether an attempt of the job knows nothing but the checkpoint: no queue, no cursor of an earlier one."""


class MemoryJournal(list[tuple[float, Any]]):
    """The coordinator's journal."""

    def append(self, entry: Any, now: float) -> None:  # type: ignore[override]
        super().append((now, entry))

    append_or_keep = append

    def entries(self) -> Iterator[tuple[float, Any]]:
        return iter(list(self))


class RoleRun(Run):
    """The processes of a world of a role; each is one member."""

    def __init__(self, role: RoleCluster, world: World) -> None:
        super().__init__(role.program, Size(world.node_count), world.store_addr, world.round)
        self.members: dict[SimulatedNode, Member] = {}
        self._role, self._world = role, world

    def add(self, node: SimulatedNode) -> None:
        self.nodes.append(node)
        world = node.machine.world
        assert world is not None
        index = world.index if world.index >= 0 else world.first_rank
        place = MemberPlace(self._role.name, index, self._role.attempt, world.round)
        kind = Trainer if self._role.name == TRAINER else Rollout
        self.members[node] = kind(self._role.whole, self, node, place)

    def lose(self, node: SimulatedNode) -> None:
        super().lose(node)
        if node in self.members:
            self.members[node].kill()

    @property
    def whole(self) -> bool:
        """True if all its processes are up."""
        return not self.broken and len(self.nodes) == self._world.node_count

    def stepped(self) -> None:
        """Count a step."""
        self._count()

    def succeed(self) -> None:
        """End all processes well."""
        self.over = True
        for node in self.nodes:
            node.workers.succeed(self)


class Member:
    """One process of a role, which talks to the service."""

    def __init__(
        self, training: Training, run: RoleRun, node: SimulatedNode, place: MemberPlace
    ) -> None:
        self.node, self.place, self.run = node, place, run
        self._training, self._load = training, training.load
        self._sequence, self._client = itertools.count(1), next(training.clients)
        self._view = messages.JobView()
        self._news = asyncio.Event()
        self._tasks = [
            training.time.loop.create_task(work) for work in (self._live(), self._watch())
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        training.account(place.role, 1)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._training.time.fail({"exception": task.exception()})

    def kill(self) -> None:
        """End at once."""
        if self._tasks:
            self._training.account(self.place.role, -1)
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def _live(self) -> None:
        address = messages.CallAddress(self.node.hostname, 1)
        await self.ask(messages.JoinRole(self.place, address, instances=self._load.machines))
        await self.work()

    async def work(self) -> None:
        """Do what the role does."""
        raise NotImplementedError

    async def _watch(self) -> None:
        async for view in self._training.service._watch(messages.WatchJob(self.place)):
            self._view = view
            self._news.set()
            self._news = asyncio.Event()

    async def ask(self, request: messages.RoleRequest) -> Any:
        """Return the service's reply; ask again until it is there."""
        while True:
            reply = await self._say(request)
            if not isinstance(reply, messages.Later):
                return reply

    async def _say(self, request: messages.RoleRequest) -> Any:
        """Return the service's reply; one whose life is over waits for its end."""
        reply = await self._training.service._ask(request)
        if isinstance(reply, messages.Turned):
            assert self._training.service.shared.members.is_over(self.place), reply.why
            await asyncio.sleep(1e9)
        return reply

    def queue(self, name: str) -> str:
        """Return the name of a queue."""
        return f"{name}-{self.place.attempt}" if self._load.fresh else name

    async def open(self) -> None:
        """Open both queues."""
        for name in ("prompts", "samples"):
            size = 2 * AHEAD * self._load.prompts
            await self.ask(messages.OpenQueue(self.place, self.queue(name), size))

    async def put(self, name: str, items: tuple[bytes, ...], cursor: bytes | None = None) -> None:
        """Put items into a queue."""
        number = next(self._sequence)
        request = messages.PutItems(
            self.place, self.queue(name), self._client, number, items, cursor, 60.0
        )
        await self.ask(request)

    async def get(self, name: str, count: int) -> tuple[messages.LeasedItem, ...]:
        """Lease one to ``count`` items of a queue; none if there are none within a minute."""
        number = next(self._sequence)
        request = messages.GetItems(
            self.place, self.queue(name), self._client, number, count, 1, 60.0
        )
        reply = await self._say(request)
        return reply.items if isinstance(reply, messages.LeasedItems) else ()

    @property
    def current(self) -> Version | None:
        """The version of the weights that counts."""
        known = self._view.weights.get(WEIGHTS)
        return known.versions[-1].version if known is not None and known.versions else None


class Rollout(Member):
    """Answers prompts with the current weights."""

    async def work(self) -> None:
        training, load = self._training, self._load
        await self.ask(messages.UseVersion(self.place, WEIGHTS, None))
        await self.open()
        used = None
        mean = load.rollout * load.machines / load.prompts
        while True:
            while self.current is None:
                await self._news.wait()
            if self.current != used:
                newest = self.current
                await asyncio.sleep(load.pull)
                if newest != self.current:
                    continue
                used = newest
                await self.ask(messages.UseVersion(self.place, WEIGHTS, used))
            for prompt in await self.get("prompts", 1):
                began = training.time.now
                await asyncio.sleep(
                    mean * training.time.random.uniform(1 - load.spread, 1 + load.spread)
                )
                training.generating += training.time.now - began
                training.generated += 1
                sample = msgspec.msgpack.encode((int(prompt.body), used))
                await self.put("samples", (sample,))
                await self.ask(
                    messages.AckItems(self.place, self.queue("prompts"), (prompt.number,))
                )


class Trainer(Member):
    """Publishes its part of the weights; the first rank learns from the samples."""

    async def work(self) -> None:
        training, load = self._training, self._load
        while not self.run.whole:
            await asyncio.sleep(1.0)
        step = training.saved
        if self.place.life > (1, 1):
            await self.ask(messages.Resumed(self.place, step))
        await self._publish(step)
        if self.place.index:
            while True:
                await training.published.wait()
                await self._publish(training.saved)
        await self.open()
        known = await self.ask(messages.LookCursor(self.place))
        given = int(known.cursor or 0) if not load.fresh else step * load.prompts
        while step < load.steps:
            given = await self._give(given, min(load.steps, step + AHEAD) * load.prompts)
            training.step_begins(step)
            samples: list[messages.LeasedItem] = []
            while len(samples) < load.prompts:
                samples += await self.get("samples", load.prompts - len(samples))
            await asyncio.sleep(load.train)
            await asyncio.sleep(load.save)
            if not self.run.whole:
                await asyncio.sleep(1e9)  # a collective that waits for a lost rank
            step += 1
            numbers = tuple(sample.number for sample in samples)
            await self.ask(messages.AckItems(self.place, self.queue("samples"), numbers, step))
            training.learned(step, samples)
            self.run.stepped()
            await self._publish(step)
        training.finished_at = training.time.now
        self.run.succeed()

    async def _give(self, given: int, until: int) -> int:
        """Give out prompts up to a number, and remember at the same instant that they are."""
        if given < until:
            items = tuple(b"%d" % number for number in range(given, until))
            await self.put("prompts", items, None if self._load.fresh else b"%d" % until)
        return max(given, until)

    async def _publish(self, step: int) -> None:
        part, parts = self.place.index, self._load.machines
        key = f"{WEIGHTS}-{step}-{part}"
        await self.ask(
            messages.PublishPart(self.place, WEIGHTS, step, part, parts, self.place, key)
        )


class RoleCluster(Cluster):
    """The job of one attempt of a role."""

    def __init__(self, training: Training, role: RoleSpec, attempt: int) -> None:
        self.whole, self.name, self.attempt = training, role.name, attempt
        options = parse(arguments(role, RolesConfig(job=training.job)), {})
        limits = msgspec.convert(options.rdzv_conf | {"hang_detection": "0"}, Limits, strict=False)
        spec = msgspec.structs.replace(options.job, managed_nodes=role.most, limits=limits)
        load = training.load
        delays = load.trainer if role.name == TRAINER else load.rollouts
        super().__init__(
            spec, nproc=1, steps=10**9, delays=delays, validate_every=10**9, time=training.time
        )
        self.program.make_run = lambda world: RoleRun(self, world)

    def master_left(self, ended: bool) -> None:
        super().master_left(ended)
        if ended:
            self.whole.roles.ended(self)


class SimulatedRoleJobs:
    """What the coordinator uses to run the jobs of roles; see `RoleJobs`."""

    def __init__(self, training: Training, on_exit: Callable[..., None]) -> None:
        self.running: dict[str, RoleCluster] = {}
        self.clusters: list[RoleCluster] = []
        self._training, self._on_exit = training, on_exit

    def start(self, name: str, attempt: int, _own: dict[str, str]) -> str:
        role = self._training.job.role(name)
        cluster = self.running[name] = RoleCluster(self._training, role, attempt)
        self.clusters.append(cluster)
        return f"{name} {attempt}"

    def find(self, name: str) -> str:
        return ""

    def watch(self, name: str, attempt: int, handle: str) -> None:
        """Do nothing: `ended` reports the end."""

    def ended(self, cluster: RoleCluster) -> None:
        """Report the outcome of a role's job."""
        del self.running[cluster.name]
        outcome = cluster.machine.outcome
        assert isinstance(outcome, Outcome)
        self._on_exit(cluster.name, cluster.attempt, outcome, outcome.exit_code)

    def stop(self, handle: str, _within: float) -> None:
        cluster = self.running.get(handle.partition(" ")[0])
        if cluster is not None:
            cluster.stop()

    async def follow(self, name: str) -> AsyncIterator[Event]:
        cluster, seen = self.running[name], 0
        changed = asyncio.Event()
        cluster.process.history.listeners.append(lambda _event: changed.set())
        while True:
            for event in cluster.events[seen:]:
                seen += 1
                yield event
            changed.clear()
            await changed.wait()

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Training:
    """One whole job."""

    load: Workload
    seed: int
    #: the step whose state the trainer's machines have in memory
    saved: int = 0
    #: prompts that were answered, and seconds that it took
    generated: int = 0
    generating: float = 0.0
    #: how often the trainer has learned from each prompt
    lessons: dict[int, int] = field(default_factory=dict)
    #: most steps between the weights that gave a sample and the step that learned from it
    stalest: int = 0
    #: when all machines were up for the first time, and when the last step was done
    began_at: float = -1.0
    finished_at: float = -1.0

    def __post_init__(self) -> None:
        load = self.load
        common = {"least": load.machines, "most": load.machines, "max_restarts": 1000}
        self.job = RolesJob(
            name="rl",
            roles=(
                RoleSpec(name=TRAINER, entry=SCRIPT, kind=RoleKind.ELASTIC, failover=load.failover, **common),
                RoleSpec(name=ROLLOUT, entry=EntryPoint(EntryForm.OBJECT, "rollouts:Rollout"), failover=load.failover, **common),
            ),
        )  # fmt: skip
        self.time = Time(self.seed)
        self.clients = itertools.count(1)
        self.published = asyncio.Event()
        self.failures = sorted(self.load.faults)
        self._up = {TRAINER: 0, ROLLOUT: 0}
        self._spent, self._since = 0.0, 0.0
        self._events = History(Path("/dev/null"))
        with self.time.inside():
            where = JobDir(Path("/nowhere"))
            self.coordinator = Coordinator(
                where, RolesConfig(job=self.job, platform="simulated"), MemoryJournal(),
                self._events, {}, -1, lambda _: lambda: self.time.now,
            )  # fmt: skip
            self.roles = SimulatedRoleJobs(self, self.coordinator._exited)
            self.coordinator._jobs = self.roles
            self.service = self.coordinator.service
            self.coordinator.begin("nowhere")

    # ---- what processes say

    def account(self, role: str, change: int) -> None:
        """Count the time of the machines whose processes are up."""
        now = self.time.now
        if self.began_at >= 0:
            self._spent += (now - self._since) * sum(self._up.values())
        self._since = now
        self._up[role] += change
        if self.began_at < 0 and sum(self._up.values()) == 2 * self.load.machines:
            self.began_at = now

    def step_begins(self, step: int) -> None:
        """Let the next fault strike in the course of a step, if it is due."""
        if self.failures and step >= int(self.failures[0]):
            share = self.failures.pop(0) % 1.0
            self.time.after(share * (self.load.train + self.load.save), self._strike)

    def _strike(self) -> None:
        cluster = self.roles.running.get(self.load.victim)
        nodes = [n for n in cluster.alive.values() if n.training] if cluster is not None else []
        if cluster is not None and nodes:
            node = self.time.random.choice(nodes)
            run = node.workers.run
            assert isinstance(run, RoleRun)
            run.members[node].kill()
            cluster.kill_worker(node, FailureKind.SIGNAL)

    def learned(self, step: int, samples: list[messages.LeasedItem]) -> None:
        """Count what a step has learned; its state is saved."""
        self.saved = step
        for sample in samples:
            prompt, (_, version) = msgspec.msgpack.decode(sample.body)
            self.lessons[prompt] = self.lessons.get(prompt, 0) + 1
            self.stalest = max(self.stalest, step - 1 - version)
        self.published.set()
        self.published = asyncio.Event()

    # ---- the run

    def finish(self, limit: float = 1e6) -> None:
        """Run to the end."""
        with contextlib.redirect_stderr(io.StringIO()):
            self.time.run(limit, self.coordinator.ended.done)
        outcome = self.coordinator.ended.result()
        assert outcome.exit_code == ExitCode.SUCCESS, outcome.reason
        self.account(TRAINER, 0)
        self.coordinator.machine.validate()
        self.service.shared.validate()

    @property
    def seconds(self) -> float:
        """Seconds from the first instant at which all machines are up to the end of the last step."""
        return self.finished_at - self.began_at

    @property
    def up(self) -> float:
        """Part of all machines' time in which their processes are up."""
        return self._spent / (self._since - self.began_at) / (2 * self.load.machines)

    def close(self) -> None:
        """Release what the simulation holds."""
        with self.time.inside():
            self.coordinator.close()
        self._events.close()
        self.time.close()
        for cluster in self.roles.clusters:
            cluster.close()
