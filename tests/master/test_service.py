"""The master's shell over the real wire: streams, silence, watches, the store, and what replays."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, final

import pytest

from dlrover.errors import InfrastructureError, ProtocolError
from dlrover.master import service
from dlrover.master.journal import history as history_module
from dlrover.master.journal.file import FileJournal
from dlrover.master.journal.history import History
from dlrover.master.machine import inputs
from dlrover.master.service import Master
from dlrover.master.views import watchers
from dlrover.rpc import messages, wire
from dlrover.rpc.client import MasterClient
from dlrover.rpc.server import Server
from dlrover.spec import events
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.requests.cluster import UseCluster
from tests.support.agents import SimulatedAgent

TOKEN = "right"


@final
class Job:
    """A master that is served in this process, and its clients."""

    def __init__(self, path: Path, job: JobSpec) -> None:
        self.path = path
        self.spec = job
        self.stack = contextlib.AsyncExitStack()
        self.port = 0

    async def __aenter__(self) -> Job:
        self.journal = FileJournal(self.path / "journal.sqlite")
        self.history = History(self.path / "events.jsonl")
        self.master = Master(self.journal, self.history)
        self.server = Server(TOKEN)
        self.master.register(self.server)
        self.port = await self.server.start("127.0.0.1", self.port)
        if self.master.replayed:
            self.master.submit(inputs.MasterStarted(self.master.replayed, self.master.last_entry))
        else:
            self.master.submit(inputs.Submitted(self.spec, str(self.path)))
        self.client = await self.stack.enter_async_context(self.new_client())
        self.background(self.master.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stack.aclose()
        await self.server.stop(0.0)
        self.journal.close()
        self.history.close()

    def new_client(self) -> MasterClient:
        return MasterClient(f"127.0.0.1:{self.port}", TOKEN)

    def background(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """Run something until the job is left; its errors come out then."""
        task = asyncio.ensure_future(work)

        async def end() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        self.stack.push_async_callback(end)
        return task

    def agents(self, count: int, **options: Any) -> list[SimulatedAgent]:
        found = [SimulatedAgent(self.client, hostname=f"host-{i}", **options) for i in range(count)]
        for agent in found:
            agent.life = self.background(agent.run())
        return found

    def bodies(self, kind: type) -> list[Any]:
        """The bodies of the events of one kind."""
        return [e.body for e in self.history.events if isinstance(e.body, kind)]

    def inputs(self, kind: type) -> list[Any]:
        """The journal's entries of one kind."""
        return [entry for _, entry in self.journal.entries() if isinstance(entry, kind)]

    async def event(self, kind: type, count: int = 1) -> Any:
        """Wait for the ``count``-th event of a kind; its body."""
        seen = 0
        async with contextlib.aclosing(self.client.watch(follow=True)) as notices:
            async for notice in notices:
                for event in notice.events:
                    seen += isinstance(event.body, kind)
                    if seen == count:
                        return event.body
        raise AssertionError


def run(tmp_path: Path, test: Callable[[Job], Awaitable[None]], **spec: Any) -> None:
    limits = {"heartbeat_timeout": 60.0, **spec.pop("limits", {})}
    job = JobSpec(name="job", limits=Limits(**limits), **spec)

    async def main() -> None:
        async with Job(tmp_path, job) as served:
            await served_test(served)

    async def served_test(served: Job) -> None:
        await asyncio.wait_for(test(served), 20.0)

    asyncio.run(main())


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the event loop run until a condition holds; the test's time-out is the limit."""
    while not condition():
        await asyncio.sleep(0.001)


# ---- rounds


def test_agents_form_a_world_and_leave_when_all_have_succeeded(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        agents = job.agents(3, nproc=4)
        worlds = [await agent.running() for agent in agents]
        assert sorted(w.first_rank for w in worlds) == [0, 4, 8]
        assert {(w.round, w.node_count, w.world_size) for w in worlds} == {(1, 3, 12)}
        assert len({(w.store_addr, w.store_port) for w in worlds}) == 1
        status = await job.client.status()
        assert (status.phase, status.world_size) == ("running", 12)
        by_id = {node.id: node for node in status.nodes}
        for agent in agents:
            assert by_id[agent.node_id].node_rank == agent.world.node_rank
            assert by_id[agent.node_id].connected
        for agent in agents:
            agent.succeed()
        outcomes = [await agent.life for agent in agents]
        assert {o.exit_code for o in outcomes} == {0}
        assert (await job.client.status()).phase == "succeeded"

    run(tmp_path, test, min_nodes=3, max_nodes=3)


def test_a_failed_worker_brings_all_nodes_into_the_next_round(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        agents = job.agents(3)
        for agent in agents:
            await agent.running()
        agents[1].report(7)
        failure = agents[1].failure()
        agents[1].fail(failure)
        agents[1]._say(messages.Failed(failure))  # as after a reconnection
        worlds = [await agent.running(2) for agent in agents]
        assert {w.restart_count for w in worlds} == {1}
        assert len(job.bodies(events.WorkerFailed)) == 1
        status = await job.client.status()
        assert (status.restarts, status.steps, status.total_steps) == (1, 0, 7)

    run(tmp_path, test, min_nodes=3, max_nodes=3, max_restarts=1)


def test_a_stop_dismisses_every_node(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        agents = job.agents(2)
        for agent in agents:
            await agent.running()
        await job.client.stop("enough", 5)
        outcomes = [await agent.life for agent in agents]
        assert {(o.exit_code, o.reason) for o in outcomes} == {(5, "enough")}

    run(tmp_path, test, min_nodes=2, max_nodes=2)


# ---- streams


def test_a_node_that_reconnects_keeps_its_place(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        agents = job.agents(2)
        for agent in agents:
            await agent.running()
        before = agents[0].node_id, agents[0].world
        agents[0].life.cancel()
        await eventually(lambda: not job.master.machine.nodes[agents[0].node_id].connected)
        job.background(agents[0].run())
        await eventually(lambda: job.master.machine.nodes[agents[0].node_id].connected)
        assert (agents[0].node_id, agents[0].world) == before
        assert len(job.bodies(events.RoundOpened)) == 1
        assert len(job.bodies(events.NodeConnected)) == 2

    run(tmp_path, test, min_nodes=2, max_nodes=2)


def test_a_node_that_stays_away_is_lost(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        agents = job.agents(2)
        for agent in agents:
            await agent.running()
        agents[0].life.cancel()
        lost = await job.event(events.NodeLost)
        assert lost.node == agents[0].node_id
        assert "connection" in lost.reason
        (world,) = [await agents[1].running(2)]
        assert world.node_count == 1

    run(tmp_path, test, min_nodes=1, max_nodes=2, limits={"reconnect_grace": 0.05})


def test_inputs_that_come_together_cost_one_look_at_the_deadlines(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        looks = 0
        deadline = job.master.machine.deadline

        def looking() -> float | None:
            nonlocal looks
            looks += 1
            return deadline()

        job.master.machine.deadline = looking
        for _ in range(100):
            job.master.submit(inputs.DeadlinePassed())
        await asyncio.sleep(0)
        assert looks == 1

    run(tmp_path, test, min_nodes=2, max_nodes=2)


def test_a_master_that_is_always_late_still_acts_on_a_deadline(tmp_path: Path) -> None:
    now = 0.0

    async def test() -> None:
        nonlocal now
        journal = FileJournal(tmp_path / "journal.sqlite")
        history = History(tmp_path / "events.jsonl")
        master = Master(journal, history, lambda _: lambda: now)
        limits = Limits(join_timeout=10.0)
        master.submit(inputs.Submitted(JobSpec(name="job", min_nodes=1, limits=limits), ""))
        await asyncio.sleep(0)
        for late in (12.0, 17.0):
            assert master.machine.outcome is None
            now = late
            master._on_timer()
        assert master.machine.outcome is not None
        journal.close()
        history.close()

    asyncio.run(test())


async def says(*first: messages.AgentMessage) -> AsyncIterator[messages.AgentMessage]:
    """A stream's messages; then it stays open."""
    for message in first:
        yield message
    await asyncio.Event().wait()


def test_the_newer_of_two_streams_of_one_agent_counts(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        async with job.new_client() as other:
            older = job.client.attend(says(messages.Hello("uid")))
            assert isinstance(await anext(older), messages.Welcome)
            newer = other.attend(says(messages.Hello("uid")))
            welcome = await anext(newer)
            assert welcome.node_id == 0
            with pytest.raises(StopAsyncIteration):
                await anext(older)
            assert job.master.machine.nodes[0].connected
            assert not job.inputs(inputs.NodeDisconnected)
            await job.client.stop("enough", 5)
            assert isinstance(await anext(newer), messages.Dismiss)
            await newer.aclose()
            await eventually(lambda: not job.master.machine.nodes[0].connected)

    run(tmp_path, test)


def test_a_node_that_comes_back_after_the_end_is_dismissed(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        (agent,) = job.agents(1)
        await agent.running()
        agent.life.cancel()
        await eventually(lambda: not job.master.machine.nodes[0].connected)
        await job.client.stop("enough", 5)
        outcome = await agent.run()
        assert outcome.exit_code == 5

    run(tmp_path, test)


def test_a_stream_must_begin_with_a_hello(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        stream = job.client.attend(says(messages.Heartbeat(1, 2)))
        with pytest.raises(ProtocolError, match="Hello"):
            await anext(stream)
        assert not job.master.machine.nodes

    run(tmp_path, test)


def test_what_cannot_be_read_ends_the_stream_and_the_connection_of_the_node(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        call = job.client._channel.stream_stream(f"/{wire.SERVICE}/Attend")(
            metadata=((wire.TOKEN_KEY, TOKEN),)
        )
        await call.write(wire.encode(messages.Hello("uid")))
        await call.read()
        await call.write(b"\xc1 no message")
        assert (await call.code()).name == "INVALID_ARGUMENT"
        await eventually(lambda: not job.master.machine.nodes[0].connected)

    run(tmp_path, test)


def test_a_silent_node_is_lost_and_may_come_back_as_a_new_one(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        agents = job.agents(2)
        for agent in agents:
            await agent.running()
        agents[0].silent = True
        lost = await job.event(events.NodeLost)
        assert lost.node == agents[0].node_id
        assert "no heartbeat" in lost.reason
        agents[0].silent = False  # the process was stopped, and goes on
        await agents[0].until(lambda a: a.node_id != lost.node)
        worlds = [await agent.running(3) for agent in agents]
        assert {w.node_count for w in worlds} == {2}

    run(
        tmp_path,
        test,
        min_nodes=1,
        max_nodes=2,
        limits={"heartbeat_timeout": 0.2, "heartbeat_interval": 0.05, "scale_up_delay": 0.0},
    )


def test_old_news_of_steps_is_left_out(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        agents = job.agents(2)
        for agent in agents:
            await agent.running()
        agents[0].report(5)
        await eventually(lambda: job.master.machine.progress.steps == 5)
        agents[0].report(9)  # too soon after the last one to be journalled by itself
        await eventually(lambda: job.master.heartbeats.steps[agents[0].node_id] == 9)
        agents[1].report(3)
        agents[1]._say(messages.Heartbeat(0, 1000))
        agents[1]._say(messages.Heartbeat(2, 1000))
        agents[1].fail()
        await agents[0].running(2)
        assert (await job.client.status()).total_steps == 9

    run(tmp_path, test, min_nodes=2, max_nodes=2, max_restarts=1)


# ---- watches


def test_watchers_get_each_event_once_and_in_order(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        async def follow(since: int) -> list[int]:
            seen: list[int] = []
            async with (
                job.new_client() as client,
                contextlib.aclosing(client.watch(since, follow=True)) as notices,
            ):
                async for notice in notices:
                    seen += [event.seq for event in notice.events]
                    if notice.status.phase == "succeeded":
                        return seen
            raise AssertionError

        watchers = [asyncio.create_task(follow(since)) for since in (0, 0, 2)]
        agents = job.agents(2)
        for agent in agents:
            await agent.running()
            agent.report(1)
        agents[0].fail()
        for agent in agents:
            await agent.running(2)
        for agent in agents:
            agent.succeed()
        seen = await asyncio.gather(*watchers)
        last = len(job.history.events)
        assert last > 8
        assert seen == [list(range(n + 1, last + 1)) for n in (0, 0, 2)]
        stored = history_module.read(tmp_path / "events.jsonl")
        assert stored == job.history.events

    run(tmp_path, test, min_nodes=2, max_nodes=2, max_restarts=1)


@pytest.mark.parametrize("since", [-5, 0, 1, 1000])
def test_a_watch_without_following_ends(tmp_path: Path, since: int) -> None:
    async def test(job: Job) -> None:
        seen = [e.seq async for notice in job.client.watch(since) for e in notice.events]
        assert seen == [1, 2][max(0, since) :]

    run(tmp_path, test)


def test_watchers_share_one_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the master made the status of all nodes for each of them, up to five times a second."""
    monkeypatch.setattr(watchers, "REFRESH", 0.01)
    monkeypatch.setattr(watchers, "INTERVAL", 0.01)

    async def test(job: Job) -> None:
        made = []
        status = job.master.watchers._status
        job.master.watchers._status = lambda: made.append(1) or status()
        request = messages.WatchRequest(0, follow=True)
        async with contextlib.AsyncExitStack() as stack:
            following = [
                await stack.enter_async_context(
                    contextlib.aclosing(job.master.watchers.watch(request))
                )
                for _ in range(5)
            ]
            for looks in range(3):
                _, *shared = await asyncio.gather(*map(anext, following))
                assert len(made) == looks + 2, "the first did not wait for the others"
                assert all(notice is shared[0] for notice in shared)

    run(tmp_path, test)


def test_notices_of_many_long_failures_fit_into_messages(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        (agent,) = job.agents(1)
        await agent.running()
        text = "é" * 16_000
        for _ in range(80):
            agent._say(messages.Failed(agent.failure(traceback=text, stderr_tail=text)))
        await eventually(lambda: len(job.bodies(events.WorkerFailed)) == 80)
        seen = [e.seq async for notice in job.client.watch() for e in notice.events]
        assert seen == list(range(1, len(job.history.events) + 1))

    run(tmp_path, test, max_restarts=1)


# ---- replay


def test_the_journal_replays_to_the_same_machines(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        agents = job.agents(3)
        for agent in agents:
            await agent.running()
        agents[0].report(4)
        agents[2].life.cancel()
        await job.event(events.NodeLost)
        agents[1].fail()
        await agents[1].running(3)
        await job.master.requests.use(UseCluster((), b"note"))
        size = (tmp_path / "events.jsonl").stat().st_size
        journal = FileJournal(tmp_path / "journal.sqlite", read_only=True)
        history = History(tmp_path / "events.jsonl")
        with contextlib.closing(journal), contextlib.closing(history):
            again = Master(journal, history)
            again.machine.state.commands = job.master.machine.state.commands
            assert again.machine == job.master.machine
            assert again.services.cluster == job.master.services.cluster
            assert history.events == job.history.events
        assert (tmp_path / "events.jsonl").stat().st_size == size

    run(
        tmp_path,
        test,
        min_nodes=2,
        max_nodes=3,
        max_restarts=5,
        limits={"reconnect_grace": 0.05},
    )


def test_a_torn_last_line_of_the_history_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    bodies = [events.NodeSucceeded(node) for node in range(3)]
    first = History(path)
    for body in bodies:
        first.add(body, 1.0)
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    assert len(history_module.read(path)) == 2
    second = History(path)
    for body in bodies:
        second.add(body, 1.0)
    second.close()
    assert path.read_bytes() == whole


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """No file of this process may grow beyond the size of ``path``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_events_that_a_full_disk_did_not_take_are_written_later(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with contextlib.closing(History(path)) as history:
        history.add(events.NodeSucceeded(0), 1.0)
        with full_disk(path):
            history.add(events.NodeSucceeded(1), 2.0)
            history.add(events.NodeSucceeded(2), 3.0)
        assert len(history_module.read(path)) == 1
        history.add(events.NodeSucceeded(3), 4.0)
        assert history_module.read(path) == history.events
        assert [event.seq for event in history.events] == [1, 2, 3, 4]


def test_what_happens_while_the_disk_is_full_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "JOURNAL_RETRY", 0.02)

    async def test(job: Job) -> None:
        agents = job.agents(3)
        for agent in agents:
            await agent.running()
        with full_disk(tmp_path / "journal.sqlite"):
            with pytest.raises(InfrastructureError, match=r"The journal .* cannot be written"):
                await job.master.requests.use(UseCluster((), b"note"))
            agents[0].life.cancel()
            agents[1].life.cancel()
            await eventually(lambda: len(job.master.streams._queues) == 1)
            agents[1].life = asyncio.create_task(agents[1].run())
            status = await job.client.status()
            assert status.phase == "running"
            assert "cannot be written" in status.waiting_for
            assert status.waiting_for.endswith("The workers train on; it is tried again.")
        lost = await job.event(events.NodeLost)
        assert lost.node == agents[0].node_id
        worlds = [await agent.running(2) for agent in agents[1:]]
        assert {world.node_count for world in worlds} == {2}
        assert not job.inputs(UseCluster)
        assert len(job.bodies(events.NodeLost)) == 1
        assert (await job.client.status()).waiting_for == ""
        agents[1].life.cancel()

    run(
        tmp_path,
        test,
        min_nodes=1,
        max_nodes=3,
        limits={"reconnect_grace": 0.3},
    )


def test_an_unreachable_master_is_one_sentence(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        await job.server.stop(0.0)
        with pytest.raises(InfrastructureError, match=r"The master at .* cannot be reached"):
            await job.client.status()

    run(tmp_path, test)
