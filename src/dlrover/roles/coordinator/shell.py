"""The coordinator's shell: it journals each input, asks the machine, and carries out its commands."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from dlrover._util import procs
from dlrover._util.clocks import Clock
from dlrover.config import ROLE_VARIABLES
from dlrover.errors import DLRoverError, ExitCode, InfrastructureError
from dlrover.master.files import read_outcome
from dlrover.master.journal.history import History
from dlrover.roles.coordinator.following import EventReader
from dlrover.roles.coordinator.health import HealthWatch
from dlrover.roles.coordinator.jobs import CLUSTERS, RoleJobs, directory_of, runs
from dlrover.roles.coordinator.journal import RolesJournal
from dlrover.roles.coordinator.status import RolesStatus, status_of
from dlrover.roles.coordinator.streaming import EventStream
from dlrover.roles.machine import inputs
from dlrover.roles.machine.health import Stuck
from dlrover.roles.machine.job import RolesMachine
from dlrover.roles.messages import ENDED, HOLDER, MemberStarted
from dlrover.roles.runtime.environment import variables
from dlrover.roles.runtime.holder import end, keep
from dlrover.roles.serving import Loss, RolesService
from dlrover.roles.spec import RoleKind, RolesConfig
from dlrover.rpc.messages import Done, StatusRequest, StopRequest
from dlrover.rpc.server import Server
from dlrover.spec import events
from dlrover.spec.job import Limits
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import Outcome

logger = logging.getLogger(__name__)

NOTABLE = (
    events.CoordinatorRecovered,
    events.RoleRestarts,
    events.InstanceStuck,
    events.InstanceEnded,
    events.KeeperEnded,
    events.RoleEnded,
)
"""Events that are shown without asking."""
OF_ROLES = (
    events.NodeWaits,
    events.WorkerFailed,
    events.NodeLost,
    events.HangFound,
    events.Recovered,
    events.StepsUndone,
)
"""Events of a role's own job that are shown without asking."""

LAUNCHER_WAIT = 90.0 + Limits().release_grace
"""Seconds beyond a role's shutdown time-out after which its launcher is killed; one that is well gives up earlier."""


class Coordinator:
    """One job of several roles. All methods run on one event loop.

    Args:
        job_dir: Directory of the job.
        config: The job.
        journal: Takes each input before it takes effect; it holds those of earlier coordinators.
        history: Takes the events.
        env: Environment of the roles.
        lifeline_fd: As for `RoleJobs`.
        clock: Makes a clock of seconds since the epoch that is not before a given time.
    """

    def __init__(
        self,
        job_dir: JobDir,
        config: RolesConfig,
        journal: RolesJournal,
        history: History,
        env: Mapping[str, str],
        lifeline_fd: int,
        clock: Callable[[float], Callable[[], float]] = Clock,
    ) -> None:
        self.machine = RolesMachine()
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._job_dir, self._config = job_dir, config
        self._journal, self._history = journal, history
        journal.on_fenced = self._fail
        self._lifeline_fd = lifeline_fd
        self._jobs = RoleJobs(job_dir.path, config, env, lifeline_fd, self._exited)
        self._following: dict[str, asyncio.Task[None]] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._address = ""
        served: list[bytes] = []
        self._replayed, last = 0, 0.0
        for now, entry in journal.entries():
            self._replayed, last = self._replayed + 1, max(last, now)
            if isinstance(entry, bytes):
                served.append(entry)
                continue
            for command in self.machine.handle(entry, now):
                if isinstance(command, inputs.Emit):
                    history.add(command.body, now)
        self._clock = clock(last)
        self.service = RolesService(self._journal, served, config.job.worlds, self._clock)
        self.service.on_loss = self._lost
        self._health = HealthWatch(config.job, self._stuck, self._kill)
        self._events = EventStream(history)
        self._looking: asyncio.Task[None] | None = None

    def register(self, server: Server) -> None:
        """Register the methods that processes of roles and users call."""
        self.service.register(server)
        self._health.register(server)
        self._events.register(server)
        server.unary("Status", StatusRequest, self._status)
        server.unary("Stop", StopRequest, self._stop)

    def begin(self, address: str, public: str = "") -> None:
        """Begin the job, or go on with it.

        Args:
            address: Address at which the server listens.
            public: Address at which the roles reach it, if that is another one.
        """
        self._address = public or address
        self.service.begin()
        self._looking = self._in_background(self._health.run())
        if self._lifeline_fd >= 0:
            job, tls = self._config.job.name, self._config.tls
            own = variables(address, self._job_dir.token, HOLDER, 0, job=job, tls=tls)
            self._keeping = self._in_background(keep(self.service, own, self._lifeline_fd))
        if (keeper := self.service.shared.members.get(HOLDER, 0)) is not None:
            self._health.tell(MemberStarted(keeper.place))  # it may be unable to report
        if not self._replayed:
            self.submit(inputs.Submitted(self._config.job))
        elif self.machine.ended_at is not None and self.machine.end is not None:
            end = self.machine.end
            self._end(inputs.EndJob(end.exit_code, end.reason, end.role))
        else:
            self.submit(inputs.CoordinatorStarted(self._replayed))

    def close(self) -> None:
        """Leave the roles' jobs alone, which go on if the job does."""
        for own in (self._keeping, self._looking):
            if own is not None:
                own.cancel()
        self.service.close()
        self._events.close()
        self._jobs.close()
        for task in self._following.values():
            task.cancel()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine without which this coordinator is of no use: where it fails, the next one goes on."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    # ---- inputs

    def submit(self, event: inputs.Input) -> None:
        """Journal an input, then do what follows from it; a job may go on with a full disk, but not begin."""
        now = self._clock()
        if isinstance(event, inputs.Submitted):
            self._journal.append(event, now)
        else:
            self._journal.append_or_keep(event, now)
        for command in self.machine.handle(event, now):
            self._carry_out(command, now)

    def _stuck(self, stuck: Stuck) -> None:
        if stuck.place.role == HOLDER:
            end(self.service, stuck.place, f"it has not reported for {stuck.seconds:.0f} s")
        else:
            self.submit(stuck)

    def _lost(self, loss: Loss) -> None:
        own = any(place.role == HOLDER for place in loss.keepers)
        keeper = "" if own else ", ".join(map(str, loss.keepers))
        self.submit(inputs.KeeperDown(keeper, loss.reason, loss.lost, loss.left))

    def _exited(self, role: str, attempt: int, outcome: Outcome | None, code: int) -> None:
        if outcome is None and self._lifeline_fd >= 0 and procs.Lifeline.is_cut(self._lifeline_fd):
            return  # all launchers end, and so does this coordinator; in another pod, the role goes on
        if self.machine.roles[role].attempt == attempt and role in self._following:
            self._following.pop(role).cancel()
        for index in self.machine.roles[role].instances:
            self._note_time(role, index)
        if outcome is None:
            refused = code == ExitCode.USAGE
            reason = f"its dlrover-run {_death(code)}."
            known = ExitCode.USAGE if refused else ExitCode.INFRASTRUCTURE
            self.submit(
                inputs.RoleExited(role, attempt, known, reason, hopeless=refused, vanished=True)
            )
            return
        hopeless = outcome.verdict is not None and outcome.verdict.hopeless
        hopeless = hopeless or outcome.exit_code == ExitCode.USAGE
        self.submit(
            inputs.RoleExited(role, attempt, outcome.exit_code, outcome.reason, hopeless=hopeless)
        )

    async def _follow(self, name: str, attempt: int) -> None:
        reader = EventReader(self._config.job.role(name), attempt)
        seen = self.machine.roles[name].seen
        async for event in self._jobs.follow(name):
            for found in reader.read(event):
                if found.seq >= seen:
                    self._note_time(name, found.index)
                    self.submit(found)
            if event.seq > seen and isinstance(event.body, OF_ROLES):
                say(f"{name}: {event.sentence()}")

    def _note_time(self, name: str, index: int) -> None:
        """Journal what a living instance has said of its time, as it may end now; a world has its own journal."""
        role = self.machine.roles[name]
        one = role.instances.get(index)
        if one is not None and one.up and role.spec.kind is not RoleKind.ELASTIC:
            spent = self._health.spent(one.place)
            if spent is not None:
                self.submit(inputs.Spent(one.place, *spent))

    async def _status(self, _: StatusRequest) -> RolesStatus:
        phases, spent = self._health.phases(), self._health.spent
        return status_of(self.machine, self.service.shared.status(), self._clock(), phases, spent)

    async def _stop(self, request: StopRequest) -> Done:
        self.submit(inputs.StopRequested(request.reason, request.exit_code))
        return Done()

    # ---- commands

    def _carry_out(self, command: inputs.Command, now: float) -> None:
        match command:
            case inputs.Emit(body):
                event = self._history.add(body, now)
                logger.info("%s", event.sentence())
                if isinstance(body, NOTABLE):
                    say(event.sentence())
            case inputs.StartRole(name, attempt):
                asyncio.get_running_loop().call_soon(self._start, name, attempt)
            case inputs.StopRole(name, attempt):
                # Behind a start of the same role.
                asyncio.get_running_loop().call_soon(self._stop_role, name, attempt)
            case inputs.EndJob():
                self._end(command)
            case inputs.EndInstance():
                self._health.end(command)
            case _:
                self._health.tell(command)
                try:
                    self.service.tell(command)
                except (
                    DLRoverError
                ) as error:  # a later life is known; or no room: its lost connection says it
                    logger.info("%s", error)

    def _kill(self, order: inputs.EndInstance) -> None:
        """Kill the processes of an instance, if they are on this machine."""
        place = order.place
        one = self.machine.roles[place.role].instances[place.index]
        if self._config.platform != "local" or not one.up or one.place != place:
            return
        known = self.service.shared.members.get(place.role, place.index)
        if known is not None and known.place == place and known.pid:
            pids = [known.pid] if known.state != ENDED else []
        else:
            pids = self._jobs.workers(place.role, order.node)
        logger.warning("%s is killed: %s", place, pids)
        procs.kill(pids)

    def _start(self, name: str, attempt: int) -> None:
        """Start the job of a role, or go on with the one that runs."""
        role = self.machine.roles[name]
        if role.attempt != attempt or name in self._following:
            return
        handle = role.handle or self._jobs.find(name)
        if self._config.platform == "kubernetes" and not runs(handle):
            handle = ""  # it ended with the coordinator's pod, and the role goes on without it
        if handle:
            self._jobs.watch(name, attempt, handle)
        else:
            try:
                handle = self._jobs.start(name, attempt, self._variables(name, attempt))
            except InfrastructureError as error:
                self.submit(inputs.RoleExited(name, attempt, error.exit_code, str(error)))
                return
        self._following[name] = self._in_background(self._follow(name, attempt))
        if handle != role.handle:
            self.submit(inputs.RoleLaunched(name, attempt, handle))

    def _variables(self, name: str, attempt: int) -> dict[str, str]:
        job, token = self._config.job, self._job_dir.token
        found = variables(
            self._address,
            token.read_text().strip() if self._config.platform in CLUSTERS else token,
            name,
            attempt,
            job=job.name,
            settings=job.role(name).config,
            tls=self._config.tls,
        )
        return {**found, ROLE_VARIABLES["roles"]: json.dumps(job.members)}

    def _stop_role(self, name: str, attempt: int) -> None:
        role = self.machine.roles[name]
        if role.attempt == attempt:
            self._jobs.stop(role.handle, role.spec.shutdown_timeout + LAUNCHER_WAIT)

    def _end(self, command: inputs.EndJob) -> None:
        """Give the job's outcome: the root cause is that of the role which failed."""
        started = self.machine.submitted_at
        cause = None
        if command.role:
            cause = read_outcome(directory_of(self._job_dir.path, command.role).outcome)
        restarts = sum(
            role.restarted + role.instance_restarts for role in self.machine.roles.values()
        )
        outcome = Outcome(
            exit_code=command.exit_code,
            reason=command.reason,
            restarts=restarts,
            seconds=(self.machine.ended_at or started) - started,
            job_dir=str(self._job_dir.path),
        )
        if cause is not None:
            outcome = msgspec.structs.replace(
                outcome,
                failure=cause.failure,
                verdict=cause.verdict,
                others=cause.others,
                steps=cause.steps,
            )
        if not self.ended.done():
            self.ended.set_result(outcome)


def _death(code: int) -> str:
    """Return how a launcher without an outcome ended, from its exit code; that of an adopted one is unknown."""
    if code == ExitCode.USAGE:
        return "refused to start, as shown above"
    known = code < 0 and -code in list(signal.Signals)
    return f"was killed by {signal.Signals(-code).name}" if known else "died"


def say(text: str) -> None:
    """Show a line to the user."""
    print(f"dlrover: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the job's console
