"""Saves that users ask for: the nodes' savers store what is in memory, and the job's events say what came of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dlrover._util import tasks
from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.master.platformside import REASON_LIMIT
from dlrover.rpc import messages
from dlrover.spec.events import StepStored

ANSWER_TIME = 60.0
"""Seconds after which a user gets an answer even if the step is still being stored."""
STORE_TIME = 660.0
"""Seconds after which nodes that have not answered are no longer waited for."""
TICK = 1.0
"""Seconds between two looks at whether the nodes that have yet to answer still train."""
NO_WORKERS = "No workers run at this moment: there is nothing in memory to store."
NO_SAVERS = "No node holds a checkpoint in memory: the program has made no dlrover.checkpoint.Checkpointer yet."
STILL = (
    "The step is still being stored after {:.0f} s; the job's events will say what became of it."
)

Say = Callable[[int, messages.MasterMessage], None]


@dataclass
class _Request:
    awaited: set[int]
    """Nodes that have yet to answer."""
    silent: set[int] = field(default_factory=set)
    """Nodes that were away meanwhile: the request or the answer may be lost."""
    places: list[messages.StoredPlace] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class UserSaves:
    """The users' saves of one master. It runs on the master's event loop.

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
        self._requests: dict[str, _Request] = {}
        self._ends: set[tuple[int, str, int]] = set()
        """By last round and directory, the steps that are recorded as stored as workers ended; -1 for a problem."""
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[messages.ScaleReply]] = set()

    def answered(self, node_id: int, message: messages.MemoryStored) -> None:
        """Process what became of a save on a node."""
        if not message.id:
            self._note_end(message.places)
        request = self._requests.get(message.id)
        if request is not None and node_id in request.awaited:
            request.places += message.places
            self._forget(request, node_id)

    def _note_end(self, places: Iterable[messages.StoredPlace]) -> None:
        """Record what was stored as workers ended; each directory has one problem, whichever nodes have it."""
        round_ = self._machine.rendezvous.last_round
        for event in outcomes(places, (), messages.WORKERS_ENDED):
            end = round_, event.directory, event.step
            if end not in self._ends:
                self._ends.add(end)
                self._submit(event)

    def greeted(self, node_id: int) -> None:
        """Note that a node has a new stream: the request or the answer may be lost with the one before."""
        for request in self._requests.values():
            if node_id in request.awaited:
                request.silent.add(node_id)
                self._forget(request, node_id)

    def _forget(self, request: _Request, node_id: int) -> None:
        request.awaited.discard(node_id)
        if not request.awaited:
            request.complete.set()

    async def save(self, request: messages.SaveRequest) -> messages.ScaleReply:
        """Store what is in the nodes' memory; answer when that is done, or after `ANSWER_TIME`."""
        task = tasks.start(self._save_in_turn(request.reason[:REASON_LIMIT]), self._tasks)
        try:
            return await asyncio.wait_for(asyncio.shield(task), ANSWER_TIME)
        except asyncio.TimeoutError:
            return messages.ScaleReply(STILL.format(ANSWER_TIME))

    async def _save_in_turn(self, reason: str) -> messages.ScaleReply:
        async with self._turn:  # the savers of all nodes have to vote on the same request
            return await self._save(reason)

    async def _save(self, reason: str) -> messages.ScaleReply:
        outcome, worlds = self._machine.outcome, self._machine.rounds.worlds
        if outcome is not None:
            return messages.ScaleReply(f"The job has ended: {outcome.reason}", refused=True)
        if not worlds or self._machine.rendezvous.collecting:
            return messages.ScaleReply(NO_WORKERS, refused=True)
        number = secrets.token_hex(8)
        request = self._requests[number] = _Request(set(worlds))
        try:
            for node_id in worlds:
                self._say(node_id, messages.StoreMemory(number))
            await self._wait(request)
        finally:
            del self._requests[number]
        silent = request.awaited | request.silent
        found = outcomes(request.places, silent, reason)
        for event in found:
            self._submit(event)
        if not found:
            return messages.ScaleReply(_no_answer(silent) or NO_SAVERS, refused=True)
        sentence = " ".join(event.sentence() for event in found)
        return messages.ScaleReply(sentence, refused=any(event.problem for event in found))

    async def _wait(self, request: _Request) -> None:
        """Wait for the nodes' answers; not for those that are away, or have left the world."""
        loop = asyncio.get_running_loop()
        until = loop.time() + STORE_TIME
        while not request.complete.is_set() and loop.time() < until:
            away = request.awaited - self._training()
            request.silent |= away
            request.awaited -= away
            if not request.awaited:
                return
            await tasks.signalled(request.complete, TICK)

    def _training(self) -> set[int]:
        """Return the nodes of the world that are connected."""
        nodes: Mapping[int, object] = self._machine.rounds.worlds
        return {node for node in nodes if self._machine.nodes[node].connected}


def outcomes(
    places: Iterable[messages.StoredPlace], silent: Iterable[int], reason: str
) -> list[StepStored]:
    """Return an event for each directory: the step that all nodes have stored, or what kept one from it."""
    by_place: dict[str, list[messages.StoredPlace]] = {}
    for place in places:
        by_place.setdefault(place.directory, []).append(place)
    lost = _no_answer(silent)
    found = []
    for directory, answers in by_place.items():
        problem = next((each.problem for each in answers if each.problem), lost)
        step = -1 if problem else min(each.step for each in answers)
        found.append(StepStored(directory, step, reason, problem))
    return found


def _no_answer(silent: Iterable[int]) -> str:
    """Return which nodes have not answered, as a sentence; empty if all have."""
    missing = sorted(silent)
    nodes = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return f"No answer came from {nodes}." if missing else ""
