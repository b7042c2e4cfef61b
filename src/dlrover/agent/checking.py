"""The node check, run in a separate process: the agent imports no PyTorch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dlrover.spec.check import CheckOrder, CheckReport
from dlrover.training.probes.process import CheckProcess


class Checker:
    """The check process of one node, with its current order."""

    def __init__(self, directory: Path, accelerator: str, env: Mapping[str, str]) -> None:
        """Create the checker without starting its process.

        Args:
            directory: Directory whose disk is checked.
            accelerator: The program's accelerator, as named by ``--accelerator``.
            env: The environment of the workers.
        """
        arguments = ["--directory", str(directory), "--accelerator", accelerator]
        self._process = CheckProcess(arguments, env)
        self._task: asyncio.Task[None] | None = None

    @property
    def pids(self) -> set[int]:
        """Pid of the check process, as a set; empty if it does not run."""
        return {self._process.pid} - {0}

    def start(self, order: CheckOrder, node: int, report: Callable[[CheckReport], None]) -> None:
        """Carry out an order and call ``report``; cancel an unfinished earlier order."""
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
        """Cancel the current order and end the process, to leave its memory to the workers."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._process.kill()
