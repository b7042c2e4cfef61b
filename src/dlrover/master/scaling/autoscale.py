"""The auto-scaler's shell: measures the running world, and asks the planner when the job may be changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.scaling.changes import Question
from dlrover.master.machine.watches.memorywatch import MemoryWatch
from dlrover.master.machine.watches.meter import WARM_UP_STEPS, Meter, Servers
from dlrover.master.machine.watches.serverwatch import ServerWatch
from dlrover.master.scaling.brainside import JobBrain
from dlrover.rpc import messages
from dlrover.spec.events import MemoryGrows
from dlrover.spec.measurements import NodeUsage, SpeedSample
from dlrover.spec.plan import ScaleDecision, ScaleKind, ScaleStage

logger = logging.getLogger(__name__)

TICK = 0.5
"""Interval in seconds at which the auto-scaler measures and plans."""
LOOKS = 8
"""Usage intervals that the first plan waits at most, to find out whether the servers are uneven."""


class AutoScaler:
    """The auto-scaler of one master. It runs on the master's event loop; models are fitted in a thread.

    Args:
        machine: the job; read only.
        submit: journals and handles an input of the machine.
        held_up: returns True if a rank may have been slow up to a time, so that the job's speed does not depend
            on its size alone; None while that is unknown.
    """

    def __init__(
        self,
        machine: JobMachine,
        submit: Callable[[inputs.Input], None],
        held_up: Callable[[float], bool | None] = lambda _: False,
    ) -> None:
        self._machine = machine
        self._submit = submit
        self._held_up = held_up
        self._meter = Meter()
        self._ended: tuple[float, SpeedSample] | None = None  # not submitted yet, with its time
        self._memory = MemoryWatch()
        self._servers = ServerWatch()
        self.usage: dict[int, NodeUsage] = {}
        """Latest reported resource usage of each node of the running world."""
        self.brain: JobBrain | None = None
        """Receives the measurements, and chooses the size if it plans all jobs together; None: no Brain."""
        self._round = 0
        self._steady_since = 0.0  # time of the round's first sample; 0.0 before

    def take_heartbeat(self, node_id: int, message: messages.Heartbeat, now: float) -> None:
        """Process a node's report of what its workers do and, now and then, what it uses."""
        machine = self._machine
        self._follow_round()
        world = machine.rounds.worlds.get(node_id)
        if world is None or message.round != self._round:
            return
        server = node_id in machine.rendezvous.servers
        if message.usage is not None:
            self.usage[node_id] = message.usage
            if (machine.progress.steps if server else message.steps) >= WARM_UP_STEPS:
                self._watch_memory(node_id, message.usage, now)
                if server:
                    self._servers.note(node_id, message.usage.cpu, message.usage.cores)
        if server or not self._wanted():
            return
        workers = {world.first_rank + i: worker for i, worker in enumerate(message.workers)}
        self._meter.note(workers, now)

    def take_usage(self, node_id: int, message: messages.Heartbeat) -> None:
        """Record what an instance uses, for the job's status."""
        if message.usage is not None:
            self.usage[node_id] = message.usage

    def _follow_round(self) -> None:
        machine, rdzv = self._machine, self._machine.rendezvous
        if not rdzv.collecting and rdzv.round != self._round:
            self._round = rdzv.round
            self._steady_since = 0.0
            self._meter.limits = machine.job.limits
            self._meter.begin()
            self._ended = None
            self._memory.begin()
            self._servers.begin(self._round)
            self.usage.clear()

    def _watch_memory(self, node_id: int, usage: NodeUsage, now: float) -> None:
        limits = self._machine.job.limits
        self._memory.note(node_id, usage, now)
        if not self._machine.state.quiet:
            return  # nothing can be done about it now
        advice = self._memory.advice(node_id, usage.limit, limits.memory_horizon, now)
        if advice is not None:
            found = MemoryGrows(node_id, advice.needed, usage.limit, limits.memory_horizon)
            self._submit(inputs.MemoryForecast(self._round, found, advice.memory))

    async def run(self, clock: Callable[[], float]) -> None:
        """Measure and plan until cancelled."""
        while True:
            await asyncio.sleep(TICK)
            self.measure(clock())
            self.watch_servers()
            question = self.question(clock())
            if question is not None:
                round_ = self._round
                decision = await self._decide(question)
                # It changes nothing if its world has ended by then.
                self._submit(inputs.ScalePlanned(round_, decision))

    async def _decide(self, question: Question) -> ScaleDecision | None:
        """Return the Brain's decision if the Brain plans and answers; otherwise the job's own."""
        if self.brain is not None and self.brain.cluster:
            answered, decision = await self.brain.size(question)
            if answered:
                return decision
        from dlrover.master.machine.scaling.planner import decide  # noqa: PLC0415 - an extra

        similar = await self.brain.similar() if self.brain is not None else None
        try:
            return await asyncio.to_thread(decide, question, similar)
        except Exception:
            logger.exception("The planner failed: the job keeps its size until the next review")
            return None

    def measure(self, now: float) -> None:
        """Submit the sample of a window that has ended, once the speeds of its ranks are compared.

        The first sample of a size does not wait, and no sample waits longer than one window of the comparison.
        """
        machine = self._machine
        if not self._measures():
            return
        self._ended = self._ended or self._sample(now)
        if self._ended is None:
            return
        ended, sample = self._ended
        held_up, patience = self._held_up(ended), machine.job.limits.slow_rank_window
        known = sample.size in machine.autoscaling.samples
        if held_up is None and known and now < ended + patience:
            return
        self._ended, held_up = None, bool(held_up)
        profile = self._meter.profile
        if machine.autoscaling.active:
            self._submit(inputs.SpeedMeasured(self._round, sample, profile, held_up))
        if self.brain is not None and not held_up:
            self.brain.measured(machine.autoscaling.bounded(sample), profile, self.usage)

    def _sample(self, now: float) -> tuple[float, SpeedSample] | None:
        machine, size = self._machine, self._machine.rendezvous.size
        servers = self._cores(size.servers) if size.servers else None
        sample = self._meter.take(size.workers, machine.rounds.workers, now, servers)
        if sample is None:
            return None
        self._steady_since = self._steady_since or now
        return now, sample

    def _measures(self) -> bool:
        """Return whether the running world is being measured."""
        machine, rdzv = self._machine, self._machine.rendezvous
        running = machine.outcome is None and not rdzv.collecting and rdzv.round == self._round
        return running and self._wanted()

    def _wanted(self) -> bool:
        """Return whether measurements are wanted: to scale the job, or by the Brain."""
        return self._machine.autoscaling.active or self.brain is not None

    def _cores(self, servers: int) -> Servers:
        """Return the world's servers, with the mean cores of its nodes by role; 0.0 if some are unknown."""

        def mean(of_servers: bool) -> float:
            nodes = [
                n
                for n in self._machine.rendezvous.members
                if (n in self._machine.rendezvous.servers) is of_servers
            ]
            known = [self.usage[n].cores for n in nodes if n in self.usage]
            return sum(known) / len(known) if known and len(known) == len(nodes) else 0.0

        return Servers(servers, mean(False), mean(True))

    def watch_servers(self) -> None:
        """Report overloaded or uneven servers to the machine."""
        scaling = self._machine.autoscaling
        if not scaling.active or scaling.change is not None or scaling.latest is None:
            return
        if not self._measures():
            return
        servers = self._machine.rendezvous.size.servers
        found = self._servers.look(
            servers,
            rebalance=scaling.free(ScaleKind.REBALANCE),
            migrate=self._machine.job.grows_cpu and scaling.free(ScaleKind.MIGRATE),
        )
        if found is None or (found.more and scaling.one_more_server() is None):
            return
        self._servers.begin(self._round)  # the samples that follow show the effect
        self._submit(found)

    def question(self, now: float) -> Question | None:
        """Return the question for the planner; None while the job may not be changed."""
        machine = self._machine
        if self._held_up(now) or self._awaits_looks(now) or not machine.resizer.may_scale(now):
            return None
        return machine.autoscaling.question()

    def _awaits_looks(self, now: float) -> bool:
        """Return whether the first size is being measured before it is known if its servers are uneven.

        Measurements with uneven servers say little about other sizes.
        """
        machine, servers = self._machine, self._machine.rendezvous.size.servers
        first = servers > 1 and machine.autoscaling.stage is ScaleStage.START
        until = self._steady_since + LOOKS * machine.job.limits.usage_interval
        return first and now < until and not self._servers.knows(servers)
