"""Each test of this folder that asks for a database runs on SQLite, MariaDB and PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from dlrover.brain.database import open_database
from dlrover.brain.service import Brain
from dlrover.rpc import wire
from dlrover.rpc.brain import BrainClient
from dlrover.rpc.server import Server
from tests import databases

TOKEN = "the-token-of-the-brain"

Serve = Callable[..., AbstractAsyncContextManager[BrainClient]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "database" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines, each on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[str], databases.Server]]:
    """A server by the kind of its database; each is started when a test first asks."""
    with contextlib.ExitStack() as stack:
        started: dict[str, databases.Server] = {}

        def server(kind: str) -> databases.Server:
            if kind not in started:
                start = {"mariadb": databases.mariadb, "postgresql": databases.postgresql}[kind]
                started[kind] = stack.enter_context(start())
            return started[kind]

        yield server


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def database(
    request: pytest.FixtureRequest, servers: Callable[[str], databases.Server], tmp_path: Path
) -> str:
    """The URL of a new database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/brain.db"
    return servers(request.param).create(f"t{secrets.token_hex(6)}")


@pytest.fixture
def serve() -> Serve:
    """A Brain over a database, in this process, and a client of it."""

    @contextlib.asynccontextmanager
    async def serving(
        url: str, clock: Callable[[], float] | None = None
    ) -> AsyncIterator[BrainClient]:
        engine = open_database(url)
        brain = Brain(engine, clock) if clock else Brain(engine)
        server = Server(TOKEN, service=wire.BRAIN_SERVICE)
        brain.register(server)
        port = await server.start("127.0.0.1", 0)
        try:
            async with BrainClient(f"127.0.0.1:{port}", TOKEN) as client:
                yield client
        finally:
            await server.stop(0)
            brain.close()

    return serving
