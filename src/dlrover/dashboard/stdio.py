"""``dlrover dashboard --stdio``: the content of one job's page over standard streams, for a dashboard elsewhere."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from dlrover._util import decoding
from dlrover.dashboard.actions import Action
from dlrover.dashboard.feed import JobFeed
from dlrover.errors import ConfigurationError
from dlrover.spec.jobdir import JobDir

COMMAND = ("dlrover", "dashboard", "--stdio")
BEAT = 15.0
"""Seconds between two lines of the other side, so that this one knows that somebody looks."""
SILENCE = 60.0
"""Seconds without a line after which the other side counts as gone."""


class PageRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request on the first line: for the content of the page, for a log, or for an action, whose result is the answer."""

    log: str = ""
    action: Action | None = None


async def serve(job_dir: JobDir) -> None:
    """Write what the first line of standard input asks for; end with the lines that follow it.

    Raises:
        ConfigurationError: the line is no request, or the job does not have what it asks for.
    """
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    try:
        request = decoding.json(await lines.readline(), PageRequest)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"The first line is no request: {error}.") from error
    output = await _output()
    answer = asyncio.create_task(_answer(job_dir, request, output))
    watch = asyncio.create_task(_until_silent(lines))
    await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
    if answer.done():
        answer.result()


async def _until_silent(lines: asyncio.StreamReader) -> None:
    while await asyncio.wait_for(lines.readline(), SILENCE):
        pass


async def _output() -> asyncio.StreamWriter:
    """Return standard output; a write to it never blocks, so that the other side's silence is noticed."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, sys.stdout
    )
    transport.set_write_buffer_limits(0)
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _answer(job_dir: JobDir, request: PageRequest, output: asyncio.StreamWriter) -> None:
    feed = JobFeed(job_dir)
    if request.action is not None:
        acting = asyncio.ensure_future(feed.act(request.action))
        while not (await asyncio.wait((acting,), timeout=BEAT))[0]:
            await _write(output, "\n")  # a sign of life; JSON may begin with it
        await _write(output, msgspec.json.encode(acting.result()).decode())
        return
    async for text in feed.log(request.log) if request.log else feed.view():
        await _write(output, text)


async def _write(output: asyncio.StreamWriter, text: str) -> None:
    output.write(text.encode())
    await output.drain()
