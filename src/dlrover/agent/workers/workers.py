"""The workers of one node: starts them from a zygote, watches them, and stops them without leftovers."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dlrover import accelerators, launched
from dlrover._util import cgroup, procs
from dlrover.agent import savers
from dlrover.agent.devices import Devices
from dlrover.agent.workers import environment, evidence, modules, numa, zygotes
from dlrover.agent.workers.facts import NodeFacts
from dlrover.agent.workers.logs import AttemptLogs, RunLogs
from dlrover.agent.workers.membership import MembersSocket, StoppedWatch, is_stopped
from dlrover.agent.workers.zygote import StartOrder
from dlrover.errors import ConfigurationError
from dlrover.rpc.messages import StoredPlace
from dlrover.spec.activity import Activity
from dlrover.spec.failure import OWN_ENDS, Failure, FailureKind
from dlrover.spec.job import Entry, LaunchSpec, Std
from dlrover.spec.measurements import WorkerActivity
from dlrover.spec.membership import Members
from dlrover.spec.stacks import WorkerEvidence
from dlrover.spec.world import World
from dlrover.training.worker.bootstrap import Program
from dlrover.training.worker.progress import MAX_SLOTS, Board

logger = logging.getLogger(__name__)

BOARD_POLL = 0.05
"""Seconds between two reads of the progress board."""
REAP_INTERVAL = 5.0
"""Seconds between two searches for orphans to reap."""
KILL_WAIT = 10.0
"""Seconds to wait for a process after SIGKILL; one that takes longer hangs in the kernel."""


SAVER = "dlrover.checkpoint.saver.saver"
"""Module of the checkpoint saver: workers start it, it outlives them and holds their generations."""
SAVER_WAIT = 5.0
"""Seconds that the saver gets to end: a supervisor does not wait much longer for its agent."""


_STARTING_AGAIN = WorkerActivity(0, Activity.START, 0.0, (0.0,) * len(Activity))
"""Activity of a worker that was started again and has not begun yet."""


@dataclass
class Worker:
    """A worker of the current round."""

    local_rank: int
    rank: int
    pid: int = 0
    status: int | None = None
    """Wait status; None until the worker has ended."""
    ended_at: int = 0
    """Time at which its end was seen, in monotonic nanoseconds."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerGroup:
    """The workers of one node; used only on the event loop on which it was created.

    ``on_exit(local_rank, failure)`` is called for each worker that ends by itself; ``failure`` is None
    after exit code 0. A worker that ends after `stop` was called is reported only if it failed before.
    """

    def __init__(  # noqa: PLR0915 - its attributes
        self,
        launch: LaunchSpec,
        base_env: Mapping[str, str],
        logs: RunLogs,
        hostname: str,
        on_exit: Callable[[int, Failure | None], None],
        cache: Path | None = None,
    ) -> None:
        if launch.nproc_per_node > MAX_SLOTS:
            raise ConfigurationError(
                f"--nproc-per-node {launch.nproc_per_node}: at most {MAX_SLOTS} workers run on a node."
            )
        self.node_id = -1
        self.others: Callable[[], set[int]] = set
        """Function that returns the pids of the agent's children that are not from workers or zygotes."""
        self.place = ""
        """Name of this node among those on this machine: its checkpoint saver serves no other node."""
        self.relay = ""
        """Address of the relay for the workers' requests; empty without a relay."""
        self.checkpoints = ""
        """File that lists the directories of the program's checkpoints."""
        self.token = ""
        """The job's token, from which the workers' secret is derived; empty without TLS."""
        self.members: MembersSocket | None = None
        """Socket that tells the workers who trains; None outside an agent process."""
        self._away: set[int] = set()
        """Local ranks that do not train while the others do."""
        self._stopped = StoppedWatch()
        self._launch = launch
        self._base_env = base_env
        self._devices = Devices(base_env)
        self._run_logs = logs
        self._hostname = hostname
        self._on_exit = on_exit
        self._board_fd = zygotes.make_board()
        self._board = Board(self._board_fd)
        self._cold: zygotes.ZygoteProcess | None = None
        self._warm: zygotes.ZygoteProcess | None = None
        self._retired: list[zygotes.ZygoteProcess] = []
        self._python = launch.python or sys.executable
        self._modules = modules.ModuleList(
            cache, launch, self._python, base_env.get("PYTHONPATH", "")
        )
        self._modules_file = ""
        self.listed_modules = b""
        """List of the modules that the program has loaded on this node; empty while unknown."""
        self._workers: dict[int, Worker] = {}
        self._ids = 0
        self._by_id: dict[int, Worker] = {}
        self._world: World | None = None
        self._logs: AttemptLogs | None = None
        self._stopped_at: float | None = None
        self._oom_kills = 0
        self._facts = NodeFacts()

    # ---- start

    def prepare(self) -> None:
        """Start a zygote before the first round, with the modules of the program's last run."""
        if self._cold is None and self._warm is None:
            if known := self._modules.find():
                self._warm = self._start_zygote(known)
            else:
                self._cold = self._start_zygote("")

    def start(self, world: World) -> None:
        """Start the workers of a round.

        Raises:
            ConfigurationError: The options do not fit this node.
            OSError: The logs cannot be created or the zygote cannot be started.
        """
        count = self._launch.nproc_per_node
        first = max(world.index, world.first_rank)  # an instance is known by its index
        ranks = {local: first + local for local in range(count)}
        started_before = self._world is not None
        self._world = world
        self._stopped_at = None
        self._oom_kills = cgroup.oom_kills()
        self._facts.begin()
        self._board.clear()
        self._away = set()
        self._tell_first(world)
        self._logs = self._run_logs.attempt(world.restart_count, ranks)
        orders = []
        for worker in [Worker(local, rank) for local, rank in ranks.items()]:
            self._ids += 1
            orders.append((worker, self._order(self._ids, worker, world, self._logs)))
        if started_before and self._warm is not None and not self._modules_file:
            # No worker has come to a step. The modules of the last run may be the reason.
            self._modules.forget()
            self.discard_zygotes()
        zygote = self._pick_zygote()
        for worker, order in orders:  # all or none: errors in the orders have been raised by now
            self._workers[worker.local_rank] = self._by_id[order.spawn] = worker
            zygote.spawn(order)
        sys.stdout.flush()
        self._logs.start(sys.stdout.buffer, sys.stderr.buffer)

    def _tell_first(self, world: World) -> None:
        """Tell the workers of a new round that all ranks train."""
        if self.members is not None and self._launch.survive and not world.attempt:
            self.members.publish(Members(world.round, 0, dict.fromkeys(range(world.workers), 0)))

    def start_again(self, local_rank: int, attempt: int, *, fresh: bool) -> None:
        """Start a worker of the running round that has ended; the others go on.

        A ``fresh`` one starts from a process that has loaded nothing yet.

        Raises:
            ConfigurationError: The options do not fit this node.
            OSError: The zygote cannot be started.
        """
        assert self._world is not None
        assert self._logs is not None
        error_file = self._logs.error_file(local_rank)
        if error_file.exists():  # evidence, and the next process must have room for its own
            error_file.rename(error_file.with_name(f"error.{attempt}.json"))
        self._ids += 1
        worker = Worker(local_rank, self._world.first_rank + local_rank)
        order = self._order(self._ids, worker, self._world.as_attempt(attempt), self._logs)
        self._workers[local_rank] = self._by_id[order.spawn] = worker
        self._away.add(local_rank)
        self._board.clear(local_rank)
        zygote = self._cold_zygote() if fresh else self._pick_zygote()
        zygote.spawn(order)

    def tell(self, members: Members) -> None:
        """Tell the workers who trains."""
        if self.members is not None:
            self.members.publish(members)
        self._away = {
            w.local_rank for w in self._workers.values() if w.rank not in members.attempts
        }

    def _order(self, id_: int, worker: Worker, world: World, logs: AttemptLogs) -> StartOrder:
        local_rank = worker.local_rank
        error_file = str(logs.error_file(local_rank))
        launch = self._launch
        return StartOrder(
            spawn=id_,
            program=Program(
                entry=launch.entry.value,
                target=launch.target,
                args=environment.worker_arguments(launch, local_rank),
                error_file=error_file,
                slot=local_rank,
                modules_file=str(logs.directory / "modules.json") if local_rank == 0 else "",
                given=launched.Given(
                    node=self.place,
                    round=world.round,
                    relay=self.relay,
                    save_at_breakpoint=launch.save_at_breakpoint,
                    auto_tuning=launch.auto_tuning,
                    rank=worker.rank,
                    world_size=world.world_size,
                    survive=launch.survive,
                    members=self.members.address if self.members is not None else "",
                    attempt=world.attempt,
                    embedding=launch.embedding,
                    global_batch=world.global_batch,
                    checkpoints=self.checkpoints,
                ),
            ),
            env=environment.worker_environment(
                launch, world, local_rank, self._base_env, error_file
            )
            | environment.secrets(world, self.token),
            stdout=str(logs.stdout(local_rank)),
            stderr=str(logs.stderr(local_rank)),
            cpus=self._cpus(local_rank),
            stdout_overflow=logs.overflow(local_rank, Std.OUT),
            stderr_overflow=logs.overflow(local_rank, Std.ERR),
        )

    def _cpus(self, local_rank: int) -> list[int]:
        if not self._launch.numa_binding:
            return []
        topology, devices = self._topology
        return sorted(numa.plan(self._launch.numa_binding, local_rank, topology, devices))

    @functools.cached_property
    def _topology(self) -> tuple[numa.Topology, tuple[int, ...]]:
        """The machine's topology, and the NUMA node of each local rank's device."""
        topology = numa.read_topology()
        count = self._launch.nproc_per_node
        return topology, numa.device_numa_nodes(accelerators.pci_addresses(), count, topology)

    # ---- zygotes

    def _start_zygote(self, preload_file: str) -> zygotes.ZygoteProcess:
        return zygotes.ZygoteProcess(
            self._python,
            self._base_env,
            self._board_fd,
            preload_file,
            self._started,
            self._exited,
            self._zygote_lost,
            self._start_cold if preload_file else None,
        )

    def _pick_zygote(self) -> zygotes.ZygoteProcess:
        """Return the warmest zygote: even one still importing is ready before a worker that starts now."""
        warm = self._warm
        if warm is not None and not warm.problem:
            if self._cold is not None and warm.ready and not self._cold.workers:
                self._retire(self._cold)
                self._cold = None
            return warm
        return self._cold_zygote()

    def _start_cold(self, orders: list[StartOrder]) -> None:
        """Start workers from the cold zygote: the warm one is unfit or late."""
        for order in orders:
            self._cold_zygote().spawn(order)

    def _cold_zygote(self) -> zygotes.ZygoteProcess:
        if self._cold is None:
            self._cold = self._start_zygote("")
        return self._cold

    def _warm_up(self) -> None:
        """Start a zygote with the workers' imports once the workers have listed them."""
        if self._launch.entry is Entry.COMMAND or self._logs is None:
            return
        if self._warm is not None and self._warm.problem:
            self._modules.forget()
        listed = str(self._logs.directory / "modules.json")
        if listed != self._modules_file and self._board.read(0).modules_listed:
            self._modules_file = listed  # one attempt per list: importing may crash
            self._modules.keep(Path(listed))
            self.listed_modules = modules.content(Path(listed))
            if self._warm is None:
                self._warm = self._start_zygote(listed)

    def take_place(self, node_rank: int) -> None:
        """Note the node's wanted rank, which a spare gets only when it takes a place."""
        _, of, job_dir = self.place.partition(" of ")
        if of:
            self.place = f"{node_rank}{of}{job_dir}"

    def preload(self, listed: bytes) -> None:
        """Start a zygote with a list of modules that the program has loaded on another node."""
        if not listed or self._warm is not None or self._launch.entry is Entry.COMMAND:
            return
        try:
            path = self._run_logs.directory / "modules.json"
            path.write_bytes(listed)
            self._warm = self._start_zygote(str(path))
        except (OSError, ConfigurationError) as error:  # it starts without them
            logger.warning("The spare cannot load what the program needs: %s", error)

    def _signal_zygotes(self, number: signal.Signals) -> None:
        procs.kill((z.process.pid for z in (self._cold, self._warm) if z is not None), number)

    def discard_zygotes(self) -> None:
        """Retire all zygotes, so that the next workers start from a process that has loaded nothing yet."""
        for zygote in (self._cold, self._warm):
            if zygote is not None:
                self._retire(zygote)
        self._cold = self._warm = None

    def _retire(self, zygote: zygotes.ZygoteProcess) -> None:
        zygote.close()
        self._retired.append(zygote)

    def _zygote_lost(self, zygote: zygotes.ZygoteProcess) -> None:
        """Handle the death of a zygote, with which its workers died."""
        problem = zygote.start_problem()
        zygote.close()
        self._retired.append(zygote)
        if zygote is self._warm:
            self._warm = None
            self._modules.forget()
        elif zygote is self._cold:
            self._cold = None
        for worker in sorted(zygote.workers):
            self._exited(worker, int(signal.SIGKILL), problem)

    # ---- watch

    async def watch(self, progressed: Callable[[], None]) -> None:
        """Follow the workers until cancelled; call ``progressed`` after each step that all of them have made."""
        steps, reaped_at = 0, time.monotonic()
        while True:
            await asyncio.sleep(BOARD_POLL)
            before, steps = steps, self.steps()
            if steps and steps != before:
                progressed()
            if self._launch.survive:
                self._end_stopped()
            if time.monotonic() - reaped_at > REAP_INTERVAL:
                reaped_at = time.monotonic()
                self._reap()

    def _end_stopped(self) -> None:
        """Kill workers that were stopped and keep the others waiting."""
        now = time.monotonic()
        running = [w for w in self._workers.values() if w.pid and w.status is None]
        self._stopped.forget([w.pid for w in running])
        for worker in running if self._stopped_at is None else ():
            steps, stopped = self._board.read(worker.local_rank).steps, is_stopped(worker.pid)
            if self._stopped.overdue(worker.pid, steps, stopped=stopped, now=now):
                logger.warning(
                    "Worker %d (pid %d) was stopped; it is killed", worker.rank, worker.pid
                )
                procs.kill_group(worker.pid)

    def _started(self, id_: int, pid: int) -> None:
        self._by_id[id_].pid = pid
        if self._stopped_at is not None:
            procs.kill([pid])  # it has only just started: it has no state to save

    def _exited(self, id_: int, status: int, start_problem: str = "") -> None:
        worker = self._by_id.pop(id_)
        worker.status = status
        worker.ended_at = time.monotonic_ns()
        worker.ended.set()
        if self._workers.get(worker.local_rank) is not worker:
            return
        failure = None if status == 0 else self._failure(worker, status)
        if failure is not None and start_problem:
            failure = msgspec.structs.replace(
                failure, kind=FailureKind.SPAWN, signal=None, message=start_problem
            )
        if self._stopped_at is None or (failure is not None and self._preceded_stop(failure)):
            self._on_exit(worker.local_rank, failure)

    def _preceded_stop(self, failure: Failure) -> bool:
        """Return whether a worker that ended during a stop had recorded an exception before the stop."""
        stopped_at = self._stopped_at or 0.0
        return failure.kind is FailureKind.EXCEPTION and failure.time < stopped_at

    def _failure(self, worker: Worker, status: int) -> Failure:
        assert self._logs is not None
        assert self._world is not None
        stderr = self._logs.stderr(worker.local_rank)
        error = _recorded_error(self._logs.error_file(worker.local_rank))
        signaled = os.WIFSIGNALED(status)
        kind = FailureKind.SIGNAL if signaled else FailureKind.EXIT
        if error and not signaled and error.type not in OWN_ENDS:
            kind = FailureKind.EXCEPTION
        return Failure(
            id=uuid.uuid4().hex,
            kind=kind,
            node_id=self.node_id,
            rank=worker.rank,
            local_rank=worker.local_rank,
            round=self._world.round,
            pid=worker.pid,
            time=error.time if kind is FailureKind.EXCEPTION and error.time else time.time(),
            exit_code=None if signaled else os.WEXITSTATUS(status),
            signal=os.WTERMSIG(status) if signaled else None,
            exception=error.type,
            handled_signal=error.handled_signal,
            message=error.message,
            traceback=error.traceback,
            stderr_tail=self._logs.stderr_tail(worker.local_rank),
            log_path=str(stderr),
            steps=self._board.read(worker.local_rank).steps,
            first_step=self._board.began_with(worker.local_rank),
            reading=self._board.reading(worker.local_rank),
            hostname=self._hostname,
            oom_killed=cgroup.oom_kills() > self._oom_kills,
            node_facts=self._facts.gather(self._logs.directory, worker.pid if signaled else 0),
        ).bounded()

    def steps(self) -> int:
        """Return the steps that every worker of the round that trains has completed: their minimum."""
        self._warm_up()
        training = [w for w in self._workers.values() if w.local_rank not in self._away]
        return min((self._board.read(w.local_rank).steps for w in training), default=0)

    def activities(self) -> tuple[WorkerActivity, ...]:
        """Return the workers' activities by local rank; empty while that of any worker is unknown."""
        now = time.monotonic_ns()
        found = []
        for local_rank, worker in sorted(self._workers.items()):
            ended = worker.status is not None
            at = worker.ended_at if ended else now
            activity = self._board.activity(local_rank, at, ended=ended)
            if activity is None and local_rank in self._away:
                activity = _STARTING_AGAIN
            if activity is None:
                return ()
            found.append(activity)
        return tuple(found)

    def pids(self) -> list[int]:
        """Return the pids of the running workers."""
        return [w.pid for w in self._workers.values() if w.pid and w.status is None]

    async def evidence(self) -> tuple[WorkerEvidence, ...]:
        """Collect evidence of the running workers from outside: process state, stacks and device use."""
        running = [w for _, w in sorted(self._workers.items()) if w.pid and w.status is None]
        seen, used = await asyncio.gather(
            evidence.collect([w.pid for w in running]),
            self._devices.use(len(self._workers)),
        )
        activities = self.activities()  # only now: heartbeats were sent during the collection
        return tuple(
            msgspec.structs.replace(
                one,
                rank=worker.rank,
                local_rank=worker.local_rank,
                activity=dict(enumerate(activities)).get(worker.local_rank),
                flight_record=evidence.flight_record(self._base_env, worker.rank),
                busy=used[worker.local_rank].busy if worker.local_rank in used else -1,
                moving=used[worker.local_rank].moving if worker.local_rank in used else -1,
            )
            for worker, one in zip(running, seen, strict=True)
        )

    async def save_now(self, request: str) -> tuple[StoredPlace, ...]:
        """Have the newest memory checkpoint of each directory stored; return what became of it."""
        return await savers.save_now(procs.running(SAVER), request)

    async def devices_busy(self) -> float:
        """Return the share of time in which the workers' accelerators work, 0 to 1; -1 if unknown."""
        used = await self._devices.use(len(self._workers))
        known = [device.busy for device in used.values() if device.busy >= 0]
        return sum(known) / len(known) / 100 if known else -1.0

    # ---- stop

    async def stop(self, number: signal.Signals, grace: float) -> None:
        """End all workers and the processes that they started.

        The signal goes to the workers only, not to their children, so that a worker can still use its
        data loaders while it saves. After ``grace`` seconds, all of them are killed.
        """
        self._stopped_at = time.time()
        for order in self._warm.take_held() if self._warm is not None else ():
            self._exited(order.spawn, int(signal.SIGKILL))  # it was never started
        running = [w for w in self._workers.values() if w.status is None]
        pids = [w.pid for w in running if w.pid]
        procs.kill(pids, number)
        procs.kill(pids, signal.SIGCONT)  # a stopped process would not handle the signal
        self._signal_zygotes(signal.SIGCONT)  # nor report that a worker has ended
        for worker in await _all_ended(running, grace):
            if worker.pid:
                procs.kill_group(worker.pid)
            else:
                self._signal_zygotes(signal.SIGKILL)  # the zygote that should have started it hangs
        stuck = await _all_ended(running, KILL_WAIT)
        for worker in stuck:
            logger.error(
                "Worker %d (pid %d) did not end %g s after SIGKILL: it hangs in the kernel",
                worker.rank, worker.pid, KILL_WAIT,
            )  # fmt: skip
        procs.end_orphans(self._own_pids() | procs.running(SAVER), KILL_WAIT)
        if self._logs is not None:
            self._logs.stop()
            self._logs = None
        self._workers = {}

    async def close(self, saver_wait: float = SAVER_WAIT) -> None:
        """End the zygotes and the checkpoint saver, after `stop`.

        The saver gets ``saver_wait`` seconds to persist what was requested.
        """
        self._facts.close()
        self.discard_zygotes()
        for zygote in self._retired:
            await zygote.wait()
        await procs.end(procs.running(SAVER), saver_wait)

    def _reap(self) -> None:
        """Reap orphans left by ended workers and zygotes."""
        self._retired = [z for z in self._retired if z.process.poll() is None]
        procs.reap_orphans(self._own_pids())

    def _own_pids(self) -> set[int]:
        alive = [self._cold, self._warm, *self._retired]
        return {z.process.pid for z in alive if z is not None} | self.others()


@dataclass(frozen=True)
class RecordedError:
    """Content of an error file; empty strings for missing fields."""

    type: str = ""
    message: str = ""
    traceback: str = ""
    time: float = 0.0
    handled_signal: int = 0
    """As in `Failure`."""

    def __bool__(self) -> bool:
        return bool(self.type or self.message or self.traceback)


def _recorded_error(path: Path) -> RecordedError:
    """Return the exception in an error file, written by our bootstrap or by torch's ``@record``."""
    content = zygotes.read_json(path)
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return RecordedError(message=message)
    if not isinstance(message, dict):
        return RecordedError()
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    text = str(message.get("message", ""))
    name, colon, rest = text.partition(": ")
    try:
        when = float(extra.get("time") or extra.get("timestamp") or 0)
    except (TypeError, ValueError):
        when = 0.0
    handled_signal = extra.get("handled_signal")
    if not isinstance(handled_signal, int) or not 0 < handled_signal < signal.NSIG:
        handled_signal = 0
    return RecordedError(
        type=str(message.get("errorType") or name.partition("(")[0]),
        message=rest if colon and name.isidentifier() else text,
        traceback=str(extra.get("py_callstack", "")),
        time=when if math.isfinite(when) else 0.0,
        handled_signal=handled_signal,
    )


async def _all_ended(workers: list[Worker], seconds: float) -> list[Worker]:
    """Wait up to ``seconds`` until the workers have ended; return those that have not."""
    waits = [asyncio.ensure_future(w.ended.wait()) for w in workers if not w.ended.is_set()]
    if waits:
        _, pending = await asyncio.wait(waits, timeout=seconds)
        for wait in pending:
            wait.cancel()
    return [w for w in workers if not w.ended.is_set()]
