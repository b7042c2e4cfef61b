"""One run: start a job, wait for its steps, inject fault after fault, and record each outcome."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from dlrover.errors import ExitCode, InfrastructureError
from dlrover.master.files import read_outcome
from dlrover.spec.job import Limits
from dlrover.spec.jobdir import JobDir
from dlrover.spec.node import NodeStatus
from dlrover.spec.outcome import Goodput, Outcome
from dlrover.testing.chaos import network
from dlrover.testing.chaos.guard import Launch
from dlrover.testing.chaos.report import ChaosReport, FaultRow
from dlrover.testing.chaos.strike import Strike, steps_lost
from dlrover.testing.chaos.targets import Targets
from dlrover.testing.chaos.verbs import VERBS, Planned, Verb, VerbSettings
from dlrover.testing.chaos.watcher import (
    STATUS_POLL,
    JobOverError,
    Watcher,
    ask_status,
    ask_to_stop,
)

HEARTBEATS = {"DLROVER_HEARTBEAT_INTERVAL": "2", "DLROVER_HEARTBEAT_TIMEOUT": "10"}
"""Settings of a job with a partition, unless the environment sets them: shorter than the defaults."""
HANGS = {
    "DLROVER_HEARTBEAT_INTERVAL": "1",
    "DLROVER_HANG_STEP_LIMIT": "3",
    "DLROVER_HANG_DATA_LIMIT": "3",
    "DLROVER_HANG_SAMPLE_GAP": "1",
}
"""Settings of a job with a hang, unless the environment sets them."""
SILENCE = 70.0
"""Extra seconds for the detection of a partition, whatever the job's heartbeat settings are."""
SPARE_RESTARTS = 20
"""Restarts that a job is allowed beyond one for each planned fault."""


class ChaosOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The job to run, and the faults to inject. Times are seconds."""

    program: tuple[str, ...]
    """Rest of the command line of ``dlrover-run``: the program and its arguments."""
    job_dir: Path
    plan: tuple[Planned, ...]
    settings: VerbSettings = VerbSettings()
    nodes: int = 4
    nproc_per_node: int = 1
    seed: int = 0
    detect_within: float = 10.0
    """How long a fault that ends no process lasts, unless the job restarts because of it."""
    patience: float = 120.0
    """How long to wait for a step: the first one, and after each fault."""
    steps_between: int = 5
    """Least steps between two faults."""
    steps_file: Path | None = None
    """JSON lines with a number ``step``, written by the program."""
    stop: bool = False
    """Stop the job after the last fault instead of waiting for its end."""


class ChaosRun:
    """One run of a job with faults. ``say`` is called with a line of text now and then."""

    def __init__(
        self, options: ChaosOptions, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self._options = options
        self._env = env
        self._say = say
        self._job = JobDir(options.job_dir)
        self._targets = Targets(options.job_dir)
        self._left = list(options.plan)
        self._rows: list[FaultRow] = []

    def check(self) -> None:
        """Check that every planned fault is possible on this machine.

        Raises:
            ConfigurationError: a fault is not possible.
        """
        for name in dict.fromkeys(planned.verb for planned in self._options.plan):
            VERBS[name](self._options.settings).check()

    async def run(self) -> ChaosReport:
        """Run the job to its end; return the report. No process is left behind, even if this is cancelled.

        Raises:
            InfrastructureError: the job makes no step, or there is no process to strike.
        """
        options = self._options
        output = options.job_dir / "chaos" / "output.txt"
        arguments = ["--local-nodes", str(options.nodes)]
        if options.settings.own_networks:
            arguments += ["--local-addr", network.MASTER]
        arguments += ["--nproc-per-node", str(options.nproc_per_node), *options.program]
        self._started_at = time.time()
        self._launch = Launch(arguments, options.job_dir, self._environ(), output)
        self._watcher = Watcher(self._job, self._launch)
        self._say(f"The job's directory is {options.job_dir}; its output is in {output}.")
        watching = asyncio.create_task(self._watcher.watch())
        try:
            with contextlib.suppress(JobOverError):
                await self._strike_all()
                await self._end_job()
            exit_code = await self._launch.end()
        except (InfrastructureError, asyncio.CancelledError):
            self._launch.interrupt()
            await self._launch.end()
            raise
        finally:
            watching.cancel()
            self._launch.kill()
            left_behind = self._launch.clean_up()
        return self._report(exit_code, tuple(left_behind))

    def _environ(self) -> dict[str, str]:
        plan = self._options.plan
        own: dict[str, str] = {}
        if any(planned.verb == "partition" for planned in plan):
            own |= HEARTBEATS
        if any(planned.verb == "hang" for planned in plan):
            own |= HANGS
        if len(plan) + SPARE_RESTARTS > Limits().max_infrastructure_restarts:
            own["DLROVER_MAX_INFRASTRUCTURE_RESTARTS"] = str(len(plan) + SPARE_RESTARTS)
        if self._options.settings.own_networks:
            own |= network.environ()
        if self._options.steps_file is not None:
            own["DLROVER_STEPS_FILE"] = str(self._options.steps_file.absolute())
        given = {k: v for k, v in self._env.items() if k != "DLROVER_MASTER_ADDR"}
        return {**own, **given}

    async def _strike_all(self) -> None:
        await self._until_trains(1)
        self._say(f"The job trains after {self._watcher.first_step_at - self._started_at:.1f} s.")
        while self._left:
            planned = self._left[0]
            await self._until_trains(self._watcher.steps + self._options.steps_between)
            due = self._watcher.first_step_at + planned.at
            await self._watcher.until(lambda: False, due - time.time())
            await self._strike(planned)

    async def _until_trains(self, steps: int) -> None:
        """Wait until the job has all its workers and has completed at least ``steps`` steps."""
        options = self._options
        count = options.nodes * options.nproc_per_node
        watcher = self._watcher

        def trains() -> bool:
            enough = watcher.running and watcher.steps >= steps
            return enough and len(self._targets.workers()) == count

        if not await watcher.until(trains, options.patience):
            raise InfrastructureError(
                f"The job made {watcher.steps} of {steps} steps within {options.patience:g} s, or lacks "
                "workers; dlrover chaos needs a program with a PyTorch optimizer."
            )

    async def _strike(self, planned: Planned) -> None:
        verb = self._verb(planned.verb)
        limit = self._options.detect_within + (SILENCE if planned.verb == "partition" else 0.0)
        strike = Strike(
            planned,
            verb,
            self._watcher,
            self._targets,
            patience=self._options.patience,
            detect_within=limit,
        )
        try:
            injected = await strike.inject()
            self._left.pop(0)
            at = strike.injected_at - self._started_at
            self._say(f"{at:7.1f} s  {planned.verb}: {injected.target}")
            try:
                await strike.follow()
            finally:
                self._rows.append(strike.row(self._started_at))
                self._say(f"{'':11}{self._rows[-1].verdict}")
        finally:
            verb.heal()

    def _verb(self, name: str) -> Verb:
        settings = msgspec.structs.replace(self._options.settings, hog_environ=self._launch.environ)
        return VERBS[name](settings)

    async def _end_job(self) -> None:
        if self._options.stop:
            await self._until_connected()
            reason = "All faults were injected."
            while not await ask_to_stop(self._job, reason, ExitCode.STOPPED):
                await self._watcher.until(lambda: False, 1.0)
        await self._watcher.until_over()

    async def _until_connected(self) -> None:
        """Wait until all running nodes are connected to their master: the last fault ends there."""
        until = time.monotonic() + self._options.patience
        while time.monotonic() < until:
            status = await ask_status(self._job)
            running = NodeStatus.RUNNING.value
            if status is not None and all(n.connected for n in status.nodes if n.status == running):
                return
            await self._watcher.until(lambda: False, STATUS_POLL)

    def _with_steps(self, goodput: Goodput | None) -> Iterator[FaultRow]:
        """Yield the rows with the steps that each fault undid, from the job's ledger."""
        if goodput is None:
            yield from self._rows
            return
        began = [self._started_at + row.injected for row in self._rows]
        for row, since, until in zip(self._rows, began, [*began[1:], math.inf], strict=True):
            lost = steps_lost(goodput.incidents, since, until)
            yield msgspec.structs.replace(row, steps_lost=lost)

    def _report(self, exit_code: int, left_behind: tuple[str, ...]) -> ChaosReport:
        outcome = read_outcome(self._job.outcome) or Outcome(
            exit_code=exit_code, reason="The launcher ended without an outcome."
        )
        wall = outcome.seconds or time.time() - self._started_at
        first_step_at = self._watcher.first_step_at
        start_up = first_step_at - self._started_at if first_step_at else wall
        return ChaosReport(
            job_dir=str(self._options.job_dir),
            seed=self._options.seed,
            exit_code=exit_code,
            reason=outcome.reason,
            wall_seconds=wall,
            start_up_seconds=start_up,
            steps=outcome.steps,
            goodput=outcome.goodput,
            faults=tuple(self._with_steps(outcome.goodput)),
            not_injected=tuple(planned.verb for planned in self._left),
            left_behind=left_behind,
        )
