"""The workers of one node: starts them from a zygote, watches them, and stops them without leftovers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dlrover._util import procs, start, tasks
from dlrover.agent import savers
from dlrover.agent.devices import Devices
from dlrover.agent.workers import environment, evidence
from dlrover.agent.workers.failures import FailureRecords, recorded_error
from dlrover.agent.workers.logs import AttemptLogs, RunLogs
from dlrover.agent.workers.membership import MembersSocket, StoppedWatch, is_stopped
from dlrover.agent.workers.zygotes import ZygotePool, make_board
from dlrover.errors import ConfigurationError
from dlrover.rpc.messages import StoredPlace
from dlrover.spec.activity import Activity
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.job import LaunchSpec
from dlrover.spec.measurements import WorkerActivity
from dlrover.spec.requests.membership import Members
from dlrover.spec.stacks import WorkerEvidence
from dlrover.spec.world import World
from dlrover.training.worker.progress import MAX_SLOTS, Board

logger = logging.getLogger(__name__)

BOARD_POLL = 0.05
"""Seconds between two reads of the progress board."""
REAP_INTERVAL = 5.0
"""Seconds between two searches for orphans to reap."""
EXPLAIN_WAIT = 2.0
"""Most seconds that a stop waits for the stacks of ranks that did not join a collective."""
KILL_WAIT = 10.0
"""Seconds to wait for a process after SIGKILL; one that takes longer hangs in the kernel."""
CLEANUP_WAIT = 0.5
"""Seconds to wait until the names of shared memory are free for the next round.

PyTorch's are random, and take longer.
"""

_STARTING_AGAIN = WorkerActivity(0, Activity.START, 0.0, (0.0,) * len(Activity))
"""Activity of a worker that was started again and has not begun yet."""


@dataclass
class Worker:
    """A worker of the current round."""

    local_rank: int
    rank: int
    attempt: int = 0
    pid: int = 0
    status: int | None = None
    """Wait status; None until the worker has ended."""
    ended_at: int = 0
    """Time at which its end was seen, in monotonic nanoseconds."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    unwanted: bool = False
    """True if it is to end at once."""
    failed_at: float = 0.0
    """Monotonic time at which an error was seen to have ended its program; 0.0: none was."""
    lingered: bool = False
    """True if it was killed because threads went on after that."""


class WorkerGroup:
    """The workers of one node; used only on the event loop on which it was created."""

    def __init__(
        self,
        launch: LaunchSpec,
        base_env: Mapping[str, str],
        logs: RunLogs,
        hostname: str,
        cache: Path | None = None,
    ) -> None:
        if launch.nproc_per_node > MAX_SLOTS:
            raise ConfigurationError(
                f"--nproc-per-node {launch.nproc_per_node}: at most {MAX_SLOTS} workers run on a node."
            )
        self.node_id = -1
        self.on_exit: Callable[[int, Failure | None], None] = lambda _local_rank, _failure: None
        """Called with the local rank of each worker that ends by itself and its failure, None after exit code 0.

        A worker that ends after `stop` was called is reported only if it failed before.
        """
        self.others: Callable[[], set[int]] = set
        """Function that returns the pids of the agent's children that are not from workers or zygotes."""
        self.orders = environment.StartOrders(launch, base_env)
        self.members: MembersSocket | None = None
        """Socket that tells the workers who trains; None outside an agent process."""
        self._away: set[int] = set()
        """Local ranks that do not train while the others do."""
        self._stopped = StoppedWatch()
        self._launch = launch
        self._base_env = base_env
        self._devices = Devices(base_env)
        self._run_logs = logs
        board_fd = make_board()
        self._board = Board(board_fd)
        self._failures = FailureRecords(self._board, hostname)
        self._zygotes = ZygotePool(launch, base_env, board_fd, cache, self._started, self._exited)
        self._workers: dict[int, Worker] = {}
        self._ids = 0
        self._by_id: dict[int, Worker] = {}
        self._world: World | None = None
        self._logs: AttemptLogs | None = None
        self._stopped_at: float | None = None
        self._savers = savers.Holds()
        self._holding: set[asyncio.Task[None]] = set()
        self._not_joined: asyncio.Task[list[str]] | None = None
        """Search for the ranks that others did not meet in a collective; None: no rank of the round gave up."""
        self._explaining: set[asyncio.Task[None]] = set()

    # ---- start

    def prepare(self) -> None:
        """Start a zygote before the first round, with the modules of the program's last run; keep the savers found."""
        self._zygotes.prepare()
        self._begin_to_hold()

    def preload(self, listed: bytes) -> None:
        """Start a zygote with a list of modules that the program has loaded on another node."""
        self._zygotes.preload(listed, self._run_logs.directory / "modules.json")

    def discard_zygotes(self) -> None:
        """Retire all zygotes, so that the next workers start from a process that has loaded nothing yet."""
        self._zygotes.discard()

    @property
    def listed_modules(self) -> bytes:
        """List of the modules that the program has loaded on this node; empty while unknown."""
        return self._zygotes.listed

    def take_place(self, node_rank: int) -> None:
        """Note the node's wanted rank, which a spare gets only when it takes a place."""
        self.orders.take_place(node_rank)

    def start(self, world: World) -> None:
        """Start the workers of a round.

        Raises:
            ConfigurationError: The options do not fit this node.
            OSError: The logs cannot be created or the zygote cannot be started.
        """
        count = self._launch.nproc_per_node
        ranks = {local: environment.rank_in(world, local) for local in range(count)}
        started_before = self._world is not None
        self._world = world
        self._stopped_at = None
        self._not_joined = None
        self._failures.begin()
        self._board.clear()
        self._away = set()
        self._tell_first(world)
        self._logs = self._run_logs.attempt(world.restart_count, ranks)
        orders = []
        for worker in [Worker(local, rank, world.attempt) for local, rank in ranks.items()]:
            self._ids += 1
            order = self.orders.order(self._ids, worker.local_rank, world, self._logs)
            orders.append((worker, order))
        if started_before:
            self._zygotes.doubt()
        zygote = self._zygotes.pick()
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
        world = self._world.as_attempt(attempt)
        worker = Worker(local_rank, environment.rank_in(world, local_rank), attempt)
        order = self.orders.order(self._ids, local_rank, world, self._logs)
        self._workers[local_rank] = self._by_id[order.spawn] = worker
        self._away.add(local_rank)
        self._board.clear(local_rank)
        zygote = self._zygotes.cold() if fresh else self._zygotes.pick()
        zygote.spawn(order)

    def end(self, local_rank: int) -> bool:
        """Kill a worker of the running round, which is started again; return False if it has ended already."""
        worker = self._workers[local_rank]
        worker.unwanted = True
        if worker.pid and worker.status is None:
            procs.kill_group(worker.pid)
        return worker.status is None

    def tell(self, members: Members) -> None:
        """Tell the workers who trains."""
        if self.members is not None:
            self.members.publish(members)
        self._away = {
            w.local_rank for w in self._workers.values() if w.rank not in members.attempts
        }

    # ---- watch

    async def watch(self, progressed: Callable[[], None]) -> None:
        """Follow the workers until cancelled; call ``progressed`` after each step that all of them have made."""
        steps, reaped_at = 0, time.monotonic()
        while True:
            await asyncio.sleep(BOARD_POLL)
            before, steps = steps, self.steps()
            if steps and steps != before:
                progressed()
                self._release_savers()
            self._end_lingering()
            if self._launch.survive:
                self._end_stopped()
            if time.monotonic() - reaped_at > REAP_INTERVAL:
                reaped_at = time.monotonic()
                self._reap()

    def _end_lingering(self) -> None:
        """Kill workers whose programs have failed and whose threads do not end: the other ranks wait for them."""
        now = time.monotonic()
        for worker in self._workers.values():
            if worker.status is not None or not self._board.failed(worker.local_rank):
                continue
            worker.failed_at = worker.failed_at or now
            if now - worker.failed_at > self._launch.shutdown_timeout and not worker.lingered:
                worker.lingered = True
                logger.warning(
                    "The program of worker %d (pid %d) failed %d s ago, but threads of it go on; it is killed",
                    worker.rank, worker.pid, self._launch.shutdown_timeout,
                )  # fmt: skip
                procs.kill_group(worker.pid)

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
        if self._stopped_at is not None or self._by_id[id_].unwanted:
            procs.kill([pid])  # it has only just started: it has no state to save

    def _exited(self, id_: int, status: int, start_problem: str) -> None:
        worker = self._by_id.pop(id_)
        if worker.lingered and os.WIFSIGNALED(status) and self._logs is not None:
            status = recorded_error(self._logs.error_file(worker.local_rank)).exit_code << 8
        worker.status = status
        worker.ended_at = time.monotonic_ns()
        worker.ended.set()
        self._begin_to_hold()
        if self._workers.get(worker.local_rank) is not worker:
            return
        failure = None
        if status:
            assert self._world is not None
            assert self._logs is not None
            ended_well = sorted(w.rank for w in self._workers.values() if self._ended_well(w))
            failure = self._failures.record(
                worker, status, self.node_id, self._world.round, self._logs, ended_well
            )
        if failure is not None and start_problem:
            failure = msgspec.structs.replace(
                failure, kind=FailureKind.SPAWN, signal=None, message=start_problem
            )
        if self._stopped_at is None or (failure is not None and self._preceded_stop(failure)):
            self._report(worker.local_rank, failure)

    def _report(self, local_rank: int, failure: Failure | None) -> None:
        """Report a worker's end; one that gave up on a collective once it is known which ranks did not join that."""
        running = {w.rank: w.pid for w in self._workers.values() if w.pid and w.status is None}
        if failure is None or not running or not evidence.gave_up(failure):
            self.on_exit(local_rank, failure)
            return
        if self._not_joined is None or self._not_joined.done():
            self._not_joined = asyncio.create_task(evidence.not_joined(running))
        tasks.start(self._explain(local_rank, failure, self._not_joined), self._explaining)

    async def _explain(
        self, local_rank: int, failure: Failure, not_joined: asyncio.Task[list[str]]
    ) -> None:
        await asyncio.wait({not_joined})
        problem = "the stop does not wait" if not_joined.cancelled() else not_joined.exception()
        if problem is not None:
            logger.warning("The ranks that did not join a collective cannot be found: %s", problem)
        found = [] if problem is not None else not_joined.result()
        facts = (*found, *failure.node_facts)
        self.on_exit(local_rank, msgspec.structs.replace(failure, node_facts=facts).bounded())

    async def _end_search(self) -> None:
        """Give up the search for ranks that did not join, unless it ends at once; its reports go out in any case."""
        if self._not_joined is not None and self._explaining:
            _, late = await asyncio.wait(self._explaining, timeout=EXPLAIN_WAIT)
            self._not_joined.cancel()
            if late:
                await asyncio.wait(late)

    def _ended_well(self, worker: Worker) -> bool:
        """Return whether a worker has ended without an error; its peers may notice before its process is gone."""
        finished = worker.status is None and self._board.finished(worker.local_rank)
        return worker.status == 0 or finished

    def _preceded_stop(self, failure: Failure) -> bool:
        """Return whether a worker that ended during a stop had recorded an exception before the stop."""
        stopped_at = self._stopped_at or 0.0
        return failure.kind is FailureKind.EXCEPTION and failure.time < stopped_at

    def steps(self) -> int:
        """Return the steps that every worker of the round that trains has completed: their minimum."""
        if self._logs is not None:
            self._zygotes.warm_up(
                self._logs.directory / "modules.json", lambda: self._board.read(0).modules_listed
            )
        training = [w for w in self._workers.values() if w.local_rank not in self._away]
        return min((self._board.read(w.local_rank).steps for w in training), default=0)

    def activities(self) -> tuple[WorkerActivity, ...]:
        """Return the workers' activities by local rank; empty while that of any worker is unknown."""
        now = time.monotonic_ns()
        found = []
        for local_rank, worker in sorted(self._workers.items()):
            ended = worker.status is not None
            at = worker.ended_at if ended else now
            over = ended or self._board.finished(local_rank) or self._board.failed(local_rank)
            activity = self._board.activity(local_rank, at, ended=over)
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
                thread_error=self._thread_error(worker.local_rank),
                busy=used[worker.local_rank].busy if worker.local_rank in used else -1,
                moving=used[worker.local_rank].moving if worker.local_rank in used else -1,
            )
            for worker, one in zip(running, seen, strict=True)
        )

    def _thread_error(self, local_rank: int) -> str:
        """Return what a worker wrote since the last exception that ended one of its threads."""
        if self._logs is None:
            return ""
        return evidence.thread_error(self._logs.stderr_tail(local_rank), len(self._workers))

    async def save_now(self, request: str) -> tuple[StoredPlace, ...]:
        """Have the newest memory checkpoint of each directory stored; return what became of it."""
        return await savers.save_now(savers.running(self.orders.place), request)

    async def store_at_end(self, *, partial: bool) -> None:
        """Have the newest memory checkpoint of each directory stored once the workers end.

        With ``partial``, nodes of the world are lost, and their savers with them.
        """
        stopping = float(self._launch.shutdown_timeout)
        await savers.store_at_end(savers.running(self.orders.place), stopping, partial=partial)

    async def stored_at_end(self, patience: float) -> tuple[StoredPlace, ...]:
        """Return what became of `store_at_end`, of each directory, once the workers have ended."""
        return await savers.stored_at_end(savers.running(self.orders.place), patience)

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
        await self._end_search()
        self._begin_to_hold()
        await asyncio.wait(self._holding, timeout=savers.WAIT)
        for order in self._zygotes.take_held():
            self._exited(order.spawn, int(signal.SIGKILL), "")  # it was never started
        running = [w for w in self._workers.values() if w.status is None]
        pids = [w.pid for w in running if w.pid]
        procs.kill(pids, number)
        procs.kill(pids, signal.SIGCONT)  # a stopped process would not handle the signal
        self._zygotes.send_signal(signal.SIGCONT)  # nor report that a worker has ended
        for worker in await _all_ended(running, grace):
            if worker.pid:
                procs.kill_group(worker.pid)
            else:
                self._zygotes.send_signal(
                    signal.SIGKILL
                )  # the zygote that should have started it hangs
        stuck = await _all_ended(running, KILL_WAIT)
        for worker in stuck:
            logger.error(
                "Worker %d (pid %d) did not end %g s after SIGKILL: it hangs in the kernel",
                worker.rank, worker.pid, KILL_WAIT,
            )  # fmt: skip
        procs.end_orphans(self._own_pids() | procs.running(start.SAVER), KILL_WAIT)
        procs.wait_for_cleaners(CLEANUP_WAIT)
        if self._logs is not None:
            self._logs.stop()
            self._logs = None
        self._workers = {}

    async def close(self, saver_wait: float = savers.WAIT) -> None:
        """End the zygotes and the checkpoint saver, after `stop`.

        The saver gets ``saver_wait`` seconds to persist what was requested.
        """
        self._failures.close()
        await self._zygotes.close()
        await procs.end(savers.running(self.orders.place), saver_wait)
        self._savers.close()

    def _begin_to_hold(self) -> None:
        """Hold the savers, unless that is under way: they have been there as long as the workers."""
        if not self._holding:
            tasks.start(self._hold_savers(), self._holding)

    async def _hold_savers(self) -> None:
        """Keep the savers, with what is in memory, until workers train again: that may take minutes."""
        await asyncio.to_thread(lambda: self._savers.update(savers.running(self.orders.place)))

    def _release_savers(self) -> None:
        """Let the savers go: those of the workers that train stay, and those of other directories leave."""
        if any(worker.status is None for worker in self._workers.values()):
            self._savers.close()

    def _reap(self) -> None:
        """Reap orphans left by ended workers and zygotes."""
        procs.reap_orphans(self._own_pids())

    def _own_pids(self) -> set[int]:
        return self._zygotes.pids() | self.others()


async def _all_ended(workers: list[Worker], seconds: float) -> list[Worker]:
    """Wait up to ``seconds`` until the workers have ended; return those that have not."""
    waits = [asyncio.ensure_future(w.ended.wait()) for w in workers if not w.ended.is_set()]
    if waits:
        _, pending = await asyncio.wait(waits, timeout=seconds)
        for wait in pending:
            wait.cancel()
    return [w for w in workers if not w.ended.is_set()]
