"""An operator process: it waits for leadership, works while it leads, and reports its readiness."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api.client import Client
from dlrover.kubernetes.machine.decisions import Options
from dlrover.kubernetes.operator.leader import Leader
from dlrover.kubernetes.operator.operator import Operator
from dlrover.kubernetes.operator.stats import Stats


class Serving:
    """An operator for the jobs of one namespace; of the cluster if ``namespace`` is None.

    Without ``leader``, it leads from the start.
    """

    def __init__(
        self, client: Client, namespace: str | None, options: Options, leader: Leader | None
    ) -> None:
        self.stats = Stats()
        client.on_call = self.stats.called
        self._leader = leader
        self._operator = Operator(client, namespace, options, self.stats)

    @property
    def waiting(self) -> int:
        """Number of jobs waiting to be processed."""
        return self._operator.waiting

    def phases(self) -> Iterator[str]:
        """Yield the state of each known job; an operator that does not lead knows none."""
        return self._operator.phases()

    @property
    def obstacle(self) -> str:
        """Why it is not ready; empty if it is. A standby is ready once it has read the Lease."""
        if not self.stats.leads:
            seen = self._leader is not None and self._leader.informed
            return "" if seen else "It has not read its Lease yet."
        return "" if self._operator.synced.is_set() else "It has not seen all jobs and pods yet."

    async def run(self) -> None:
        """Work while this operator leads.

        Raises:
            InfrastructureError: another operator leads now.
        """
        leader = self._leader
        if leader is not None:
            await leader.acquire()
        self.stats.leads = True
        running = asyncio.create_task(self._operator.run())
        holding = asyncio.create_task(leader.hold()) if leader is not None else None
        try:
            tasks = [running, *([holding] if holding is not None else [])]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            raise InfrastructureError("Another operator leads now: this one ends.")
        finally:
            self.stats.leads = False
            for task in (running, holding):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, InfrastructureError):
                        await task
            if leader is not None:
                await leader.release()
