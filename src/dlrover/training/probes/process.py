"""The parent's side of a check process: enforces time limits and reports its end as a result."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from dlrover._util import decoding, framing, procs, start
from dlrover.errors import InfrastructureError
from dlrover.spec.check import CheckOrder, Component, ProbeResult, ProbeState
from dlrover.training.probes.wire import (
    Began,
    Finished,
    Probe,
    ProbeProblem,
    ProbeReply,
    Reply,
    Request,
    SharedValues,
    ShareValue,
)

START_SECONDS = 30.0
"""Time limit from the start of the process to its first reply."""


class CheckProcess:
    """A check process, started on demand and restarted after its end."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Set up without starting the process.

        Args:
            arguments: Arguments of ``python -m dlrover.training.probes``.
            env: Environment of the process.
        """
        command = [*start.command("dlrover.training.probes"), *arguments]
        self._command, self._env = command, dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: asyncio.StreamReader | None = None
        self._transport: asyncio.BaseTransport | None = None

    @property
    def pid(self) -> int:
        """Pid of the process; 0 if none."""
        return self._process.pid if self._process is not None else 0

    async def probe(self, order: CheckOrder, node: int) -> tuple[ProbeResult, ...]:
        """Carry out an order; a probe that hangs or ends the process counts as failed."""
        results: list[ProbeResult] = []
        current, seconds = Component.AGENT, START_SECONDS
        try:
            await self._send(Probe(order, node))
            while True:
                reply = await asyncio.wait_for(self._reply(), seconds)
                if isinstance(reply, Began):
                    current, seconds = reply.component, reply.seconds
                elif isinstance(reply, ProbeReply):
                    results.append(reply.result)
                elif isinstance(reply, Finished):
                    return tuple(results)
        except asyncio.TimeoutError:
            results.append(_failed(current, f"it did not end within {seconds:.0f} s"))
            self.kill()
        except OSError as error:
            results.append(_failed(current, f"the check process ended: {error}"))
            self.kill()
        return tuple(results)

    async def share(self, topic: str, value: str, seconds: float) -> tuple[str, ...]:
        """Share a value with the other ranks of a launcher's job; return all ranks' values, by rank.

        Raises:
            InfrastructureError: the ranks cannot reach each other.
        """
        try:
            await self._send(ShareValue(topic, value, seconds))
            reply = await asyncio.wait_for(self._reply(), START_SECONDS + 4 * seconds)
        except (asyncio.TimeoutError, OSError) as error:
            self.kill()
            raise InfrastructureError(f"The ranks do not find each other: {error}.") from error
        if isinstance(reply, SharedValues) and len(reply.values) > 0 and any(reply.values):
            return reply.values
        problem = reply.message if isinstance(reply, ProbeProblem) else "rank 0 does not answer"
        raise InfrastructureError(f"The ranks do not find each other: {problem}.")

    def kill(self) -> None:
        """Kill the process, if any."""
        process, self._process = self._process, None
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            procs.kill_group(process.pid)
            process.wait()

    async def _send(self, request: Request) -> None:
        if self._process is None or self._process.poll() is not None:
            self.kill()
            await self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(framing.pack(msgspec.msgpack.encode(request)))

    async def _start(self) -> None:
        self._process = self._popen()
        assert self._process.stdout is not None
        reader = asyncio.StreamReader()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        self._replies = reader

    def _popen(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    async def _reply(self) -> Reply:
        assert self._replies is not None
        try:
            return _DECODER.decode(await framing.read(self._replies))
        except ConnectionError as error:
            raise ConnectionError(self._end()) from error

    def _end(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        return procs.exit_reason(-code if code < 0 else code << 8)


_DECODER: msgspec.msgpack.Decoder[Reply] = decoding.msgpack_decoder(Reply)


def _failed(component: Component, message: str) -> ProbeResult:
    return ProbeResult(component=component, state=ProbeState.FAILED, message=message)
