"""The auto-scaler's shell: measures the running world, and asks the planner when the job may be changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dlrover.master.brainside import JobBrain
from dlrover.master.machine import inputs
from dlrover.master.machine.autoscale import Question
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.memorywatch import MemoryWatch
from dlrover.master.machine.meter import WARM_UP_STEPS, Meter
from dlrover.rpc import messages
from dlrover.spec.speed import ScaleDecision
from dlrover.spec.usage import NodeUsage

TICK = 0.5
"""Seconds between two looks at the clock."""


class AutoScaler:
    """One master's auto-scaler. Runs on the master's event loop; models are fitted in a thread.

    Args:
        machine: the job; it is only looked at.
        submit: journals and handles an input of the machine.
    """

    def __init__(self, machine: JobMachine, submit: Callable[[inputs.Input], None]) -> None:
        self._machine = machine
        self._submit = submit
        self._meter = Meter()
        self._memory = MemoryWatch()
        self.usage: dict[int, NodeUsage] = {}
        """What each node of the running world uses, as it said last."""
        self.brain: JobBrain | None = None
        """Is told what is measured, and asked for the size where it chooses that of all jobs."""
        self._round = 0

    def heard(self, node_id: int, message: messages.Heartbeat, now: float) -> None:
        """A node reports what its workers do, and now and then what it uses."""
        machine = self._machine
        self._follow_round()
        world = machine.worlds.get(node_id)
        if world is None or message.round != self._round:
            return
        if message.usage is not None:
            self.usage[node_id] = message.usage
            if message.steps >= WARM_UP_STEPS:
                self._watch_memory(node_id, message.usage, now)
        if not machine.autoscaling.active:
            return
        workers = {world.first_rank + i: worker for i, worker in enumerate(message.workers)}
        self._meter.note(workers, now)

    def _follow_round(self) -> None:
        machine, rdzv = self._machine, self._machine.rendezvous
        if not rdzv.collecting and rdzv.round != self._round:
            self._round = rdzv.round
            self._meter.limits = machine.job.limits
            self._meter.begin()
            self._memory.begin()
            self.usage.clear()

    def _watch_memory(self, node_id: int, usage: NodeUsage, now: float) -> None:
        limits = self._machine.job.limits
        self._memory.note(node_id, usage, now)
        if not self._machine.is_quiet():
            return  # nothing could be done about it now
        advice = self._memory.advice(node_id, usage.limit, limits.memory_horizon, now)
        if advice is not None:
            seconds = limits.memory_horizon
            self._submit(
                inputs.MemoryForecast(
                    self._round, node_id, advice.needed, usage.limit, seconds, advice.memory
                )
            )

    async def run(self, clock: Callable[[], float]) -> None:
        """Measure and plan until cancelled."""
        while True:
            await asyncio.sleep(TICK)
            self.measure(clock())
            asked = self.question(clock())
            if asked is not None:
                round_ = self._round
                decision = await self._decide(asked)
                # Of a world that is no more by then it changes nothing.
                self._submit(inputs.ScalePlanned(round_, decision))

    async def _decide(self, asked: Question) -> ScaleDecision | None:
        """The Brain's decision, where it is to be asked and answers; else the job's own."""
        if self.brain is not None and self.brain.cluster:
            answered, decision = await self.brain.size(asked)
            if answered:
                return decision
        from dlrover.master.planner import decide  # noqa: PLC0415 - an extra

        return await asyncio.to_thread(decide, asked)

    def measure(self, now: float) -> None:
        """Submit the sample of a window that has passed."""
        machine, rdzv = self._machine, self._machine.rendezvous
        running = machine.outcome is None and not rdzv.collecting and rdzv.round == self._round
        if not (running and machine.autoscaling.active):
            return
        sample = self._meter.take(len(rdzv.members), machine.world_size, now)
        if sample is not None:
            self._submit(inputs.SpeedMeasured(self._round, sample, self._meter.profile))
            if self.brain is not None:
                self.brain.measured(sample, self._meter.profile, self.usage)

    def question(self, now: float) -> Question | None:
        """What the planner is to be asked; None while the job may not be changed."""
        return self._machine.autoscaling.question() if self._machine.may_scale(now) else None
