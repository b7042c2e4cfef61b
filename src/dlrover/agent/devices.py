"""Current utilisation of the node's accelerators, from the vendors' tools.

On a node without such a tool, no process is started.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence

from dlrover import accelerators
from dlrover.accelerators import DeviceUse

logger = logging.getLogger(__name__)

TOOL_TIME = 5.0
"""Timeout of a tool in seconds: with a broken device it may never end."""
END_TIME = 1.0
"""Seconds that a killed tool gets to end."""


class Devices:
    """The node's accelerators. ``env`` is the environment of its workers and of the tools."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._stuck: Process | None = None

    async def use(self, workers: int) -> dict[int, DeviceUse]:
        """Return the utilisation of each worker's device, by local rank; omit unknown ones.

        A worker's device has the index of its local rank among the visible devices.
        """
        path = self._env.get("PATH", "")
        for vendor in accelerators.vendors():
            program = vendor.use_command and shutil.which(vendor.use_command[0], path=path)
            if program:
                found = vendor.parse_use(await self._output(program, vendor.use_command[1:]))
                return _by_worker(found, self._env.get(vendor.visible, ""), workers)
        return {}

    async def _output(self, program: str, arguments: Sequence[str]) -> str:
        """Return a tool's output; empty if it fails to run or times out."""
        if self._stuck is not None and self._stuck.returncode is None:
            return ""
        try:
            process = await asyncio.create_subprocess_exec(
                program, *arguments, env=self._env, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL
            )
        except OSError as error:
            logger.warning("%s cannot be run: %s", program, error.strerror)
            return ""
        try:
            output, _ = await asyncio.wait_for(process.communicate(), TOOL_TIME)
        except asyncio.TimeoutError:
            logger.warning("%s does not answer within %g s", program, TOOL_TIME)
            await self._end(process)
            return ""
        return output.decode(errors="replace")

    async def _end(self, process: Process) -> None:
        process.kill()
        try:
            await asyncio.wait_for(process.wait(), END_TIME)
        except asyncio.TimeoutError:
            self._stuck = process  # stuck in the kernel, as another one would be


def _by_worker(found: Sequence[DeviceUse], visible: str, workers: int) -> dict[int, DeviceUse]:
    """Return the devices by local rank, in the order in which the workers see them."""
    names = {name: device for device in found for name in (str(device.index), device.uuid)}
    order = [names.get(word.strip()) for word in visible.split(",")] if visible else list(found)
    return {rank: device for rank, device in enumerate(order[:workers]) if device is not None}
