"""Agents without workers: thousands of nodes in one process, over the real wire."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable

from dlrover.agent.machine import node as agent_machine
from dlrover.errors import InfrastructureError
from dlrover.rpc import messages
from dlrover.rpc.client import MasterClient
from dlrover.spec.check import CheckOrder, CheckReport
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.outcome import Outcome
from dlrover.spec.world import Offer, World

RECONNECT_DELAYS = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts to reach the master, as in the real agent; the last one repeats."""


class SimulatedAgent:
    """A node that decides like the real agent and whose workers do what the caller says.

    `run` is the node's life. Cancel it, and the node vanishes from the network; run it again, and the same
    agent process returns. Several agents may share one ``client``, and with it one connection.
    """

    def __init__(
        self,
        client: MasterClient,
        *,
        node_id: int = -1,
        node_rank: int = -1,
        nproc: int = 1,
        hostname: str = "simulated",
        phase: float = 1.0,
    ) -> None:
        """Make an agent; nothing is sent yet.

        Args:
            client: Connection to the master. It stays open when the agent exits.
            node_id: Id that the agent claims, -1 for none.
            node_rank: Rank that it asks for, -1 for none.
            nproc: Workers that it claims to start.
            hostname: Host name that it reports.
            phase: Time of the first heartbeat, in heartbeat intervals. Agents with evenly spread phases send
                evenly spread heartbeats.
        """
        self.uid = uuid.uuid4().hex
        self.machine = agent_machine.AgentMachine(nproc)
        self.steps = 0
        """Optimizer steps that the workers claim to have completed in their round."""
        self.silent = False
        """True to send no heartbeats on the open stream, like a stopped process."""
        self.outcome: Outcome | None = None
        """Outcome that the agent exited with; None until then."""
        self._client = client
        self._claimed_id = node_id
        self._node_rank = node_rank
        self._hostname = hostname
        self._phase = phase
        self._attempts = 0
        self._interval = asyncio.get_running_loop().create_future()
        self._outgoing: asyncio.Queue[messages.AgentMessage] = asyncio.Queue()
        self._changed = asyncio.Event()

    @property
    def node_id(self) -> int:
        """Id from the master; -1 until assigned."""
        return self.machine.node_id

    @property
    def world(self) -> World | None:
        """World whose workers run here; None if none do."""
        return self.machine.world

    # ---- life

    async def run(self) -> Outcome:
        """Stay connected until the master dismisses the node; return the outcome.

        Raises:
            ConfigurationError: the master refuses the token.
            ProtocolError: the master does not understand a message.
        """
        beating = asyncio.create_task(self._beat())
        self._attempts = 0
        try:
            while self.outcome is None:
                with contextlib.suppress(InfrastructureError):
                    await self._attend()
                if self.outcome is None:
                    last = len(RECONNECT_DELAYS) - 1
                    await self._client.pause(RECONNECT_DELAYS[min(self._attempts, last)])
                    self._attempts += 1
        finally:
            beating.cancel()
        return self.outcome

    async def until(self, condition: Callable[[SimulatedAgent], bool]) -> None:
        """Wait until ``condition`` holds for this agent; check it after every change."""
        while not condition(self):
            await self._changed.wait()

    async def running(self, round_: int = 1) -> World:
        """Wait until the workers of ``round_`` or a later round run; return their world."""
        await self.until(lambda a: a.outcome is not None or a.machine.running_round >= round_)
        assert self.world is not None, f"The node left: {self.outcome}"
        return self.world

    # ---- what the workers do

    def report(self, steps: int) -> None:
        """Report ``steps`` completed steps to the master now."""
        self.steps = steps
        self._say(messages.Heartbeat(self.machine.running_round, steps))

    def succeed(self) -> None:
        """End all workers with exit code 0."""
        for local_rank in range(self.machine.nproc):
            self._handle(agent_machine.WorkerEnded(local_rank, None))

    def fail(self, failure: Failure | None = None) -> None:
        """Fail a worker; by default the first one, with an exception of its program."""
        failure = failure or self.failure()
        self._handle(agent_machine.WorkerEnded(failure.local_rank, failure))

    def failure(self, traceback: str = "", stderr_tail: str = "") -> Failure:
        """Return the record of an exception in this node's first worker."""
        return Failure(
            id=uuid.uuid4().hex,
            kind=FailureKind.EXCEPTION,
            node_id=self.node_id,
            rank=self.world.first_rank if self.world is not None else 0,
            local_rank=0,
            round=self.machine.running_round,
            exit_code=1,
            exception="ValueError",
            message="simulated failure",
            traceback=traceback,
            stderr_tail=stderr_tail,
            steps=self.steps,
            hostname=self._hostname,
        )

    # ---- the stream

    async def _attend(self) -> None:
        self._outgoing = outgoing = asyncio.Queue[messages.AgentMessage]()
        claimed = self.node_id if self.node_id >= 0 else self._claimed_id
        outgoing.put_nowait(
            messages.Hello(
                self.uid,
                claimed,
                self._node_rank,
                self._hostname,
                self.machine.running_round,
                self.machine.holding(self.steps),
                self.machine.epoch,
            )
        )

        async def said() -> AsyncIterator[messages.AgentMessage]:
            while True:
                yield await outgoing.get()

        async with contextlib.aclosing(self._client.attend(said())) as incoming:
            async for message in incoming:
                if self.machine.refuses(message):
                    return
                self._attempts = 0
                if isinstance(message, messages.Welcome) and not self._interval.done():
                    self._interval.set_result(message.heartbeat_interval)
                self._handle(message)
                if self.outcome is not None:
                    return

    async def _beat(self) -> None:
        interval = await asyncio.shield(self._interval)
        await asyncio.sleep(self._phase * interval)
        while True:
            if not self.silent:
                self.report(self.steps)
            await asyncio.sleep(interval)

    def _say(self, message: messages.AgentMessage) -> None:
        self._outgoing.put_nowait(message)

    def _handle(self, event: agent_machine.Input) -> None:
        for command in self.machine.handle(event):
            self._carry_out(command)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _carry_out(self, command: agent_machine.Command) -> None:
        if isinstance(command, agent_machine.JoinRound):
            offer = Offer(self.machine.nproc, self._hostname, 1)
            self._say(messages.Join(command.round, offer))
        elif isinstance(command, messages.Failed | messages.Succeeded | CheckReport):
            self._say(command)
        elif isinstance(command, CheckOrder):
            report = CheckReport(check=command.check, round=command.round, results=())
            self._handle(report)
        elif isinstance(command, messages.AssignWorld):
            self.steps = 0
        elif isinstance(command, agent_machine.StopWorkers):
            self._handle(agent_machine.WorkersStopped())
        elif not isinstance(command, agent_machine.FlushMemory):
            self.outcome = command.outcome
