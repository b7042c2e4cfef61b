"""Carries out the orders of the node check, in a process of its own: the agent imports no PyTorch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dlrover.elastic.probes.process import CheckProcess
from dlrover.spec.check import CheckOrder, CheckReport


class Checker:
    """One node's check process and the order that it carries out."""

    def __init__(self, directory: Path, accelerator: str, env: Mapping[str, str]) -> None:
        """Nothing is started yet.

        Args:
            directory: Where the disk is checked.
            accelerator: What the program trains on, as ``--accelerator`` names it.
            env: The environment of the workers.
        """
        arguments = ["--directory", str(directory), "--accelerator", accelerator]
        self._process = CheckProcess(arguments, env)
        self._task: asyncio.Task[None] | None = None

    @property
    def pids(self) -> set[int]:
        """The check process, if there is one."""
        return {self._process.pid} - {0}

    def start(self, order: CheckOrder, node: int, report: Callable[[CheckReport], None]) -> None:
        """Carry out an order and call ``report``; an order that is being carried out is given up."""
        if self._task is not None and not self._task.done():
            self.stop()
        self._task = asyncio.create_task(self._carry_out(order, node, report))

    async def _carry_out(
        self, order: CheckOrder, node: int, report: Callable[[CheckReport], None]
    ) -> None:
        received_at = time.time()
        results = await self._process.probe(order, node)
        report(
            CheckReport(
                check=order.check,
                round=order.round,
                results=results,
                received_at=received_at,
                sent_at=time.time(),
            )
        )

    def stop(self) -> None:
        """Give up what is being carried out, and end the process: its memory is for the workers."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._process.kill()
