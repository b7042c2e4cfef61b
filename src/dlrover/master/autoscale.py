"""The auto-scaler's shell: measures the running world, and asks the planner when the job may be changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dlrover.master.machine import inputs
from dlrover.master.machine.autoscale import MAX_TRIES
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.meter import Meter
from dlrover.rpc import messages
from dlrover.spec.speed import ScaleDecision, ScaleStage, SpeedSample

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
        self._round = 0

    def heard(self, node_id: int, message: messages.Heartbeat, now: float) -> None:
        """A node reports what its workers do."""
        machine = self._machine
        if not machine.autoscaling.active:
            return
        self._follow_round()
        world = machine.worlds.get(node_id)
        if world is None or message.round != self._round:
            return
        workers = {world.first_rank + i: worker for i, worker in enumerate(message.workers)}
        self._meter.note(workers, now)

    def _follow_round(self) -> None:
        machine, rdzv = self._machine, self._machine.rendezvous
        if not rdzv.collecting and rdzv.round != self._round:
            self._round = rdzv.round
            self._meter.limits = machine.job.limits
            self._meter.begin()

    async def run(self, clock: Callable[[], float]) -> None:
        """Measure and plan until cancelled."""
        while True:
            await asyncio.sleep(TICK)
            if self._machine.autoscaling.active and self._machine.outcome is None:
                self._measure(clock())
                if self._machine.may_scale(clock()):
                    await self._plan()

    def _measure(self, now: float) -> None:
        machine, rdzv = self._machine, self._machine.rendezvous
        if rdzv.collecting or rdzv.round != self._round:
            return
        sample = self._meter.take(len(rdzv.members), machine.world_size, now)
        if sample is not None:
            self._submit(inputs.SpeedMeasured(self._round, sample, self._meter.profile))

    async def _plan(self) -> None:
        """Ask the planner. What it says of a world that is no more by then changes nothing."""
        round_ = self._machine.rendezvous.round
        state = self._machine.autoscaling
        assert state.latest is not None
        from dlrover.master.planner import Question, decide  # noqa: PLC0415 - an extra

        asked = Question(
            current=state.latest,
            samples=_all(state.samples),
            sizes=state.sizes(),
            region=state.region,
            cost=self._machine.job.limits.autoscale_cost,
            explore=state.stage is not ScaleStage.RUNNING,
        )
        decision: ScaleDecision | None = None
        if state.tries < MAX_TRIES:
            decision = await asyncio.to_thread(decide, asked)
        self._submit(inputs.ScalePlanned(round_, decision))


def _all(samples: dict[int, list[SpeedSample]]) -> tuple[SpeedSample, ...]:
    return tuple(sample for known in samples.values() for sample in known)
