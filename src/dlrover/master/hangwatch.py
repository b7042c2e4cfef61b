"""Watch for hangs and slow ranks: gathers what the pure detectors need, and keeps the evidence."""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dlrover._util import files, tasks
from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.watches import hangs
from dlrover.master.machine.watches.slow import SpeedWatch
from dlrover.rpc import messages
from dlrover.spec import stacks
from dlrover.spec.activity import Activity
from dlrover.spec.jobdir import JobDir
from dlrover.spec.measurements import WorkerActivity
from dlrover.spec.stacks import WorkerEvidence

logger = logging.getLogger(__name__)

TICK = 1.0
"""Maximum seconds between two checks."""
LOOK_TIME = 20.0
"""Seconds that nodes get to inspect their workers."""
REPORT_LIMIT = 1 << 20
"""Maximum length of a report sent to a client, in characters."""

Say = Callable[[int, messages.MasterMessage], None]


@dataclass
class _Question:
    """Evidence that is being gathered from the nodes."""

    awaited: set[int]
    workers: list[WorkerEvidence] = field(default_factory=list)
    places: set[str] = field(default_factory=set)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, node_id: int, workers: Iterable[WorkerEvidence]) -> None:
        """Take in a node's answer. Keep one full text per place: thousands of ranks may share it."""
        if node_id not in self.awaited:
            return
        for worker in workers:
            place = stacks.place(worker.frames)
            known = place in self.places
            self.workers.append(msgspec.structs.replace(worker, text="") if known else worker)
            if place:
                self.places.add(place)
        self.awaited.discard(node_id)
        if not self.awaited:
            self.complete.set()


class HangWatch:
    """The watch of one master over its workers. It runs on the master's event loop.

    Args:
        machine: the job; read only.
        say: sends a message to a node.
        submit: journals and handles an input of the machine.
    """

    def __init__(
        self, machine: JobMachine, say: Say, submit: Callable[[inputs.Input], None]
    ) -> None:
        self._machine = machine
        self._say = say
        self._submit = submit
        self._detector = hangs.HangDetector()
        self._speed = SpeedWatch()
        self._nodes: dict[int, int] = {}
        self._reported: dict[int, tuple[WorkerActivity, ...]] = {}
        self._questions: dict[int, _Question] = {}
        self._last_question = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- reports from nodes

    def take_heartbeat(self, node_id: int, message: messages.Heartbeat, now: float) -> None:
        """Process a node's report of what its workers do."""
        self._follow_round()
        world = self._machine.rounds.worlds.get(node_id)
        if world is None or message.round != self._detector.round or not message.workers:
            return
        self._reported[node_id] = message.workers
        workers = {world.first_rank + i: worker for i, worker in enumerate(message.workers)}
        self._nodes.update(dict.fromkeys(workers, node_id))
        if node_id in self._machine.rendezvous.servers:
            return  # servers make no steps
        self._handle(hangs.NodeActivities(message.round, workers), now)

    def answered(self, node_id: int, message: messages.Evidence) -> None:
        """Process a node's evidence about its workers."""
        question = self._questions.get(message.id)
        if question is not None:
            question.answer(node_id, message.workers)

    def _follow_round(self) -> None:
        machine = self._machine
        rdzv = machine.rendezvous
        if rdzv.collecting or rdzv.round == self._detector.round:
            return
        limits = machine.job.limits
        self._detector.limits = self._speed.limits = limits
        self._nodes.clear()
        self._reported.clear()
        self._speed.begin()
        formed = hangs.WorldFormed(
            rdzv.round, machine.rounds.workers, machine.progress.total_steps > 0
        )
        self._detector.handle(formed, 0.0)

    # ---- time

    async def run(self, clock: Callable[[], float]) -> None:
        """Watch until cancelled."""
        while True:
            limits = self._machine.job.limits
            await asyncio.sleep(min(TICK, limits.hang_sample_gap, limits.slow_rank_window))
            self._tick(clock())

    def _tick(self, now: float) -> None:
        rdzv = self._machine.rendezvous
        current = rdzv.round == self._detector.round and not rdzv.collecting
        if self._machine.outcome is not None or not current:
            return
        self._handle(hangs.Tick(), now)
        for found in self._speed.compare(self._detector.workers, self._nodes, now):
            self._submit(inputs.RankSpeed(rdzv.round, found))

    def _handle(self, event: hangs.Input, now: float) -> None:
        for command in self._detector.handle(event, now):
            if isinstance(command, hangs.SampleWorkers):
                tasks.start(self._look(command.round, now), self._tasks)
            else:
                self._found(command)

    async def _look(self, round_: int, since: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        seen, _ = await self._ask()
        workers = [worker for worker in seen if worker.rank < self._machine.rounds.workers]
        now = since + loop.time() - began
        self._handle(hangs.WorkersSampled(round_, tuple(workers)), now)

    def _found(self, found: hangs.Hang) -> None:
        logger.warning("%s", found.hang.sentence())
        name = ""
        try:
            name = self._keep(found)
        except OSError as error:
            logger.warning("The evidence cannot be written: %s", error)
        nodes = {self._nodes[rank] for rank in found.hang.ranks if rank in self._nodes}
        hang = msgspec.structs.replace(found.hang, evidence=name, nodes=tuple(sorted(nodes)))
        self._submit(inputs.Hung(hang, found.restart))

    def _keep(self, found: hangs.Hang) -> str:
        """Write the evidence; return its name within the job directory."""
        if not self._machine.state.job_dir:
            return ""
        directory = JobDir(Path(self._machine.state.job_dir)).evidence
        directory.mkdir(exist_ok=True)
        number = len(list(directory.glob("*.txt"))) + 1
        text = f"{found.hang.sentence()}\n\n{stacks.report(found.evidence, found.missing)}"
        files.write_atomically(directory / f"{number}.json", msgspec.json.encode(found))
        files.write_atomically(directory / f"{number}.txt", text.encode())
        return f"{directory.name}/{number}.txt"

    # ---- questions

    async def ranks(self, _request: messages.RanksRequest) -> messages.RanksReply:
        """Return what every rank does, as its node reported last."""
        worlds = self._machine.rounds.worlds
        found = [
            messages.RankActivity(worlds[node].first_rank + place, node, worker)
            for node, workers in self._reported.items()
            if node in worlds
            for place, worker in enumerate(workers)
        ]
        found.sort(key=operator.attrgetter("rank"))
        return messages.RanksReply(self._machine.rendezvous.round, tuple(found))

    async def stacks(self, _request: messages.StacksRequest) -> messages.Stacks:
        """Return where every rank is now."""
        workers, missing = await self._ask()
        report = stacks.report(workers, missing)[:REPORT_LIMIT]
        round_ = self._machine.rendezvous.round
        return messages.Stacks(round_, stacks.groups(workers), missing, report)

    async def _ask(self) -> tuple[list[WorkerEvidence], tuple[int, ...]]:
        """Ask all nodes of the world for evidence; return it, with the ranks that are missing from it."""
        worlds = self._machine.rounds.worlds
        self._last_question += 1
        question = self._questions[self._last_question] = _Question(set(worlds))
        try:
            for node_id in worlds:
                self._say(node_id, messages.CollectEvidence(self._last_question))
            if worlds and not await tasks.signalled(question.complete, LOOK_TIME):
                silent = len(question.awaited)
                logger.warning("%d nodes do not report where their workers are", silent)
        finally:
            self._questions = {i: q for i, q in self._questions.items() if q is not question}
        return question.workers, self._ranks_of(question.awaited)

    def _ranks_of(self, nodes: Collection[int]) -> tuple[int, ...]:
        """Return the ranks that are known to run on some nodes."""
        return tuple(sorted(rank for rank, node in self._nodes.items() if node in nodes))

    # ---- for display

    def doing(self) -> dict[int, str]:
        """Return each node's latest reported activity and how long it has lasted."""
        found = {}
        for node_id, workers in self._reported.items():
            living = [worker for worker in workers if not worker.ended]
            if living:
                longest = max(living, key=lambda worker: worker.since)
                serves = node_id in self._machine.rendezvous.servers
                doing = "serve" if serves else Activity(longest.doing).name.lower()
                found[node_id] = f"{doing} {longest.since:.0f} s"
        return found

    def waiting_for(self, now: float) -> str:
        """Return which ranks of the running round are late to end; empty if none or no round runs."""
        rdzv = self._machine.rendezvous
        runs = self._machine.outcome is None and not rdzv.collecting
        return (
            self._detector.waiting_for(now) if runs and rdzv.round == self._detector.round else ""
        )

    def held_up(self, until: float) -> bool | None:
        """Return what `SpeedWatch.held_up` does."""
        return self._speed.held_up(until)

    def slow(self) -> tuple[str, ...]:
        """Return a sentence for each slow rank."""
        return tuple(found.sentence() for found in self._speed.named.values())
