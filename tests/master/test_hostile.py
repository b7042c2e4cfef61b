"""Peers that send anything: the master refuses it or goes on, and so does the next master, which replays it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover.errors import DLRoverError, ProtocolError
from dlrover.master.journal.history import History
from dlrover.master.journal.journal import open_journal
from dlrover.master.service import Master
from dlrover.rpc import messages, wire
from dlrover.spec.check import CheckReport
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.requests import WorkerReply, WorkerRequest
from dlrover.spec.requests.membership import JoinMembers, MembershipRequest
from dlrover.spec.requests.shards import DataSpec, Incarnation, TakeShards
from tests.support.hostile import Hostile

SEEDS = range(12)
ACTIONS = 400
FORGIVING = Limits(
    max_infrastructure_restarts=1000,
    no_progress_restarts=1000,
    join_timeout=1e6,
    heartbeat_timeout=1e6,
)
SAID = (
    *[messages.Heartbeat] * 8, *[messages.Join] * 8, *[messages.Failed] * 3, *[CheckReport] * 2,
    messages.Evidence, messages.Succeeded, messages.AgentMessage,
)  # fmt: skip
"""Kinds of messages, by how often an agent says them."""


class SetClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Peers:
    """A master with a clock that the test sets, and hostile peers of all kinds."""

    def __init__(self, master: Master, seed: int) -> None:
        self.master, self.clock = master, master.clock
        self.make = Hostile(seed)
        self.random = self.make.random
        self.agents: dict[str, tuple[asyncio.Queue[Any], asyncio.Task[None]]] = {}

    def message(self, kind: Any) -> Any:
        """A message of a kind as a peer's bytes make it; None if they are refused."""
        rdzv = self.master.machine.rendezvous
        uid = self.random.choice([f"agent {n}" for n in range(4)])
        incarnations = (Incarnation(1), Incarnation(1), Incarnation(1), Incarnation(2, -1))
        specs = (
            DataSpec(name="data", size=100, shard=10, epochs=0, attempts=1),
            DataSpec(name="stream", begins=(0, 5), shard=2**62, timeout=1e308),
        )
        self.make.names = {
            "round": (*[rdzv.round if kind is not messages.Join else rdzv.next_round] * 8, 0, -1, 2**63),
            "node_id": (*self.master.machine.nodes, 0, 99),
            "uid": (uid,), "wait": (0.0,), "check": (1, 1, 0, 2), "nproc": (1, 1, 1, 2, 0, 2**63),
            "spec": specs, "data": ("data", "data", "stream"), "worker": ("0-a", "1-b"),
            "incarnation": incarnations, "seq": (*range(20), 2**63), "acknowledged": ((), (), b""),
            "want": (0, 1, 1000), "server": (0, 1, 2), "start": (1, 1, 2, 0), "servers": (1, 2),
            "rank": (0, 0, 1, 2), "attempt": (0, 1, 1, 2), "number": (0, 1, 2, 3),
            "stop": (2, 3, 5, 10, 2**63), "partition": (0, 0, 1, 2, 2**63), "epoch": (0, 0, 1, 3, 2**63),
        }  # fmt: skip
        with contextlib.suppress(ProtocolError, ValueError):
            return wire.decode(wire.encode(self.make.value(kind)), kind)
        return None

    async def act(self) -> None:
        """Do one thing, then let all that follows from it happen."""
        choice = self.random.random()
        if choice < 0.5:
            self.say(self.random.choice(SAID))
        elif choice < 0.8:
            await self.work()
        elif choice < 0.95:
            self.clock.now += self.random.choice((0.0, 0.1, 5.0, 700.0))
            self.pass_time()
        for _ in range(5):
            await asyncio.sleep(0)
        await self.look()

    def say(self, kind: Any) -> None:
        """An agent says something; one whose stream has ended begins another one."""
        uid = f"agent {self.random.randrange(3)}"
        if uid not in self.agents or self.agents[uid][1].done():
            queue: asyncio.Queue[Any] = asyncio.Queue()
            queue.put_nowait(messages.Hello(uid, hostname=uid))
            self.agents[uid] = queue, asyncio.create_task(self.attend(queue))
        message = self.message(kind)
        if message is not None:
            self.agents[uid][0].put_nowait(message)

    async def attend(self, queue: asyncio.Queue[Any]) -> None:
        async def said() -> AsyncIterator[messages.AgentMessage]:
            while (message := await queue.get()) is not None:
                yield message

        with contextlib.suppress(DLRoverError):
            async for order in self.master.streams.attend(said()):
                wire.encode(order)

    async def work(self) -> None:
        """A worker or an embedding server asks for something."""
        kinds = (TakeShards, TakeShards, WorkerRequest, MembershipRequest, JoinMembers)
        request = self.message(self.random.choice(kinds))
        if request is not None:
            reply = await self.master.requests.use(request)
            assert wire.decode(wire.encode(reply), WorkerReply) is not None

    def pass_time(self) -> None:
        """What the master does by itself, now and then."""
        self.master._on_timer()
        self.master.heartbeats._on_timer()
        self.master.hangs._tick(self.clock.now)
        self.master.scaler.measure(self.clock.now)
        self.master.scaler.watch_servers()
        self.master.scaler.question(self.clock.now)

    async def look(self) -> None:
        """A user looks at the job; the test looks at all that the master knows."""
        master = self.master
        status = await master.status(messages.StatusRequest())
        wire.decode(wire.encode(status), messages.Status)
        master.platform.progress()
        for _, task in self.agents.values():
            if task.done():
                task.result()
        for machine in (*known_to(master), master.ledger):
            machine.validate()

    async def leave(self) -> None:
        for queue, _ in self.agents.values():
            queue.put_nowait(None)
        await asyncio.gather(*(task for _, task in self.agents.values()))
        self.master.close()


def known_to(master: Master) -> list[Any]:
    """All machines that a replay restores; the ledger's content is in the report that `play` compares."""
    datasets, placement = master.services.shards.shards, master.services.placement
    return [
        master.machine,
        datasets,
        placement,
        master.services.strategies,
    ]


@contextlib.contextmanager
def master_at(path: Path) -> Iterator[Master]:
    journal, history = open_journal("file:", path / "journal"), History(path / "events")
    with contextlib.closing(journal), contextlib.closing(history):
        yield Master(journal, history, lambda _: SetClock())


async def play(path: Path, seed: int, watch: Callable[[Master], None] = lambda _: None) -> None:
    managed = seed % 2 * 3
    spec = JobSpec(
        name="job",
        min_nodes=2,
        max_nodes=3,
        managed_nodes=managed,
        max_restarts=1000,
        node_check=seed % 3 == 1,
        exclude_stragglers=seed % 3 == 1,
        auto_scale=seed % 6 == 3,
        spares=seed % 4 if managed else 0,
        auto_spares=seed % 8 == 5,
        survive=seed % 3 == 0 or seed % 12 == 7,
        limits=FORGIVING,
    )
    with master_at(path) as master:
        master.begin(spec, str(path), None)
        peers = Peers(master, seed)
        for _ in range(ACTIONS):
            await peers.act()
        await peers.leave()
        watch(master)
    with master_at(path) as again:
        for one, other in zip(known_to(again), known_to(master), strict=True):
            assert one == other
        assert again.ledger.goodput(peers.clock.now) == master.ledger.goodput(peers.clock.now)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_no_message_ends_a_master_or_the_next_one(tmp_path, seed: int, caplog) -> None:
    asyncio.run(play(tmp_path, seed))
    assert "cannot handle" not in caplog.text
