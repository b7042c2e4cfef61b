"""The server of the page: its files, the jobs, their live content, and the buttons."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import mimetypes
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Protocol
from urllib.parse import quote
from weakref import WeakValueDictionary

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from dlrover._util import decoding, procs
from dlrover.dashboard import actions, content, guard, logs
from dlrover.dashboard.cluster import JobSources
from dlrover.dashboard.feed import JobFeed
from dlrover.dashboard.listing import JobList, ask_masters
from dlrover.dashboard.page import ASSETS, STYLE, document, style
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError

MOST_BYTES = 4096
"""Maximum size of a request's body."""
LIST_PAUSE = 2.0
"""Seconds between two looks at the list of jobs."""
LOG_RETRY = 5000
"""Milliseconds after which the page asks again for a log that it did not get."""
END_WAIT = 1
"""Seconds that open streams get when the server ends."""


class JobPage(Protocol):
    """The page of one job, of this machine or of a cluster."""

    def view(self) -> AsyncIterator[str]:
        """Yield the page's parts as server-sent events."""

    def log(self, name: str) -> AsyncGenerator[str, None]:
        """Yield the end of a log and what is added to it as server-sent events."""

    async def act(self, action: actions.Action) -> dict[str, Any]:
        """Carry out what a button asks for; return the answer as ``text``, and whether it ``refused``."""


class Dashboard:
    """Handlers of the server. Use it on one event loop."""

    def __init__(self, listing: JobList, cluster: JobSources) -> None:
        self._listing = listing
        self._cluster = cluster
        self._feeds: WeakValueDictionary[str, JobPage] = WeakValueDictionary()
        self._list: tuple[float, str] = (0.0, "")
        self._listing_now = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Return the addresses that are answered."""
        return [
            Route("/", self.page),
            Route("/assets/{name}", self.asset),
            Route("/api/jobs", self.jobs),
            Route("/api/jobs/live", self.jobs_live),
            Route("/api/jobs/{job:path}/live", self.live),
            Route("/api/jobs/{job:path}/log", self.log),
            Route("/api/jobs/{job:path}/actions", self.act, methods=["POST"]),
        ]

    async def page(self, _request: Request) -> Response:
        """Return the page itself, without any content."""
        return HTMLResponse(document())

    async def asset(self, request: Request) -> Response:
        """Return one of the page's files."""
        name = request.path_params["name"]
        if name not in ASSETS:
            return guard.refused(404, "There is no such file.")
        text = style() if name == STYLE else ASSETS[name].read_text(encoding="utf-8")
        return Response(text, media_type=mimetypes.guess_type(name)[0])

    async def jobs(self, _request: Request) -> Response:
        """Return the list of jobs."""
        return Response(await self._rows(), media_type="application/json")

    async def jobs_live(self, _request: Request) -> Response:
        """Stream the list of jobs, again whenever it changes."""

        async def stream() -> AsyncIterator[str]:
            last, silent = "", 0.0
            while True:
                text = await self._rows()
                if text != last:
                    yield f"event: jobs\ndata: {text}\n\n"
                    last, silent = text, 0.0
                elif silent >= logs.BEAT:
                    yield logs.ALIVE
                    silent = 0.0
                await asyncio.sleep(LIST_PAUSE)
                silent += LIST_PAUSE

        return _stream(stream())

    async def _rows(self) -> str:
        """Return the list as JSON; all who look at about the same time get the same one."""
        async with self._listing_now:
            now = time.monotonic()
            if not self._list[1] or now - self._list[0] >= LIST_PAUSE:
                rows = await asyncio.to_thread(self._listing.jobs)
                await ask_masters(rows)
                cluster, more = await self._cluster.rows(), self._listing.more
                found = {**content.FIXED, "jobs": rows, "more": more, "cluster": cluster}
                self._list = now, msgspec.json.encode(found).decode()
            return self._list[1]

    async def live(self, request: Request) -> Response:
        """Stream a job's content."""
        job = await self._find(request)
        return _no_job() if job is None else _stream(job.view())

    async def log(self, request: Request) -> Response:
        """Stream the end of a log file, and what is added to it."""
        job = await self._find(request)
        if job is None:
            return _no_job()
        return _stream(_log(job.log(request.query_params.get("file", ""))))

    async def act(self, request: Request) -> Response:
        """Carry out what a button asks for."""
        job = await self._find(request)
        if job is None:
            return _no_job()
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return guard.refused(415, "The body must be JSON.")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BYTES:
                return guard.refused(413, f"The body must have at most {MOST_BYTES} bytes.")
        try:
            action: actions.Action = decoding.json_decoder(actions.Action).decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return guard.refused(400, f"The body is no action: {error}.")
        try:
            return _json(await job.act(action))
        except DLRoverError as error:
            return guard.refused(409, str(error))

    async def _find(self, request: Request) -> JobPage | None:
        """Return the job of an address; all who look at it at the same time get the same one."""
        name = request.path_params["job"]
        found: JobPage | None
        if "/" in name:
            found = self._cluster.find(name)
        else:
            job_dir = await asyncio.to_thread(self._listing.find, name)
            found = None if job_dir is None else JobFeed(job_dir)
        return None if found is None else self._feeds.setdefault(name, found)


def application(
    listing: JobList, cluster: JobSources, token: str, hosts: Sequence[str] | set[str]
) -> Starlette:
    """Return the ASGI application."""
    dashboard = Dashboard(listing, cluster)
    outer = Middleware(guard.AccessGuard, token=token, hosts=hosts)
    return Starlette(routes=dashboard.routes(), middleware=[outer])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0: any free one.

    Raises:
        InfrastructureError: the port is taken, or the address is not this machine's.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]  # it repeats the address
        raise InfrastructureError(
            f"The dashboard cannot listen on {host}:{port}: {reason}; choose another port or address."
        ) from error


def link(host: str, port: int, token: str) -> str:
    """Return the address of the page on a server that listens there, with its token."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/?token={quote(token, safe='')}"


async def serve(app: Starlette, sock: socket.socket, lifeline_fd: int = -1) -> None:
    """Serve the application until SIGINT or SIGTERM, or until the holder of the lifeline dies."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=END_WAIT,
    )
    server = uvicorn.Server(config)
    # Streams are open as long as anybody looks: that they are at the end is no error.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "graceful" not in str(record.msg))
    if lifeline_fd >= 0:
        procs.Lifeline.watch(lifeline_fd, functools.partial(setattr, server, "should_exit", True))
    with contextlib.suppress(asyncio.CancelledError):
        await server.serve(sockets=[sock])


def check_host(host: str, *, given_token: bool) -> None:
    """Refuse to listen beyond this machine with a token that changes unseen.

    Raises:
        ConfigurationError: ``host`` is an address of the network, and no token was set.
    """
    if host not in ("127.0.0.1", "::1", "localhost") and not given_token:
        raise ConfigurationError(
            f"--host {host}: to be reached from other machines, the dashboard needs a token that you choose; set "
            "DLROVER_DASHBOARD_TOKEN."
        )


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


async def _log(pieces: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """Yield a log; ``problem`` says why there is no more, and the page asks again after a while."""
    try:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece
    except DLRoverError as error:
        problem = msgspec.json.encode({"text": str(error)}).decode()
        yield f"retry: {LOG_RETRY}\nevent: problem\ndata: {problem}\n\n"


def _no_job() -> Response:
    return guard.refused(404, "There is no such job; it may have been deleted.")
