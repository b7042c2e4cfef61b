"""Real database servers, each a process of its own in a folder of its own, that die with the tests."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.services import free_port, program

sa = pytest.importorskip("sqlalchemy")

USER = "reader"
PASSWORD = "pa@ss:w/rd%1"
"""Of `USER`, who may do anything; what must be escaped in a URL is in it."""
DRIVERS = {"mysql": "mysql+pymysql", "postgresql": "postgresql+psycopg"}
FAST = Path("/dev/shm")
"""Where a server's files are, if there is such a place: tests do not wait for a disk."""
PREFIX = "dlrover-test-databases-"
"""Of the names of the servers' folders, before the pid of the tests."""
START = 30.0
"""Seconds that a server may take until it answers."""
END = 5.0
"""Seconds that it may take to end, until it is killed."""


class Server:
    """A server that listens on ``port`` of this machine.

    Args:
        kind: how its URLs begin.
        base: the database that it begins with.
        account: who it runs as.
        folder: where its files are.
        command: makes its command, for a port.
    """

    def __init__(
        self, kind: str, base: str, account: str, folder: Path, command: Callable[[int], list[str]]
    ) -> None:
        self.port = free_port()
        self._kind, self._base, self._account, self._folder = kind, base, account, folder
        self._command = command(self.port)
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, base: str = "") -> str:
        """The URL of one of its databases."""
        who = f"{USER}:{quote(PASSWORD, safe='')}"
        return f"{self._kind}://{who}@127.0.0.1:{self.port}/{base or self._base}"

    def create(self, base: str) -> str:
        """Make a database; its URL, with the driver."""
        url = sa.make_url(self.url()).set(drivername=DRIVERS[self._kind])
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sa.text(f"CREATE DATABASE {base}"))
        engine.dispose()
        return url.set(database=base).render_as_string(hide_password=False)

    def start(self, *more: str) -> None:
        """Start it, and wait until it answers: PostgreSQL listens before it does."""
        command = _as(self._account, [*self._command, *more])
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        url = sa.make_url(self.url()).set(drivername=DRIVERS[self._kind])
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        until = time.monotonic() + START
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(sa.exc.OperationalError), engine.connect():
                return
            time.sleep(0.05)
        raise AssertionError((self._folder / "log").read_text()[-2000:])

    def stop(self) -> None:
        """End it at once."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGQUIT)
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


@contextlib.contextmanager
def mariadb() -> Iterator[Server]:
    """A MariaDB server with a database ``test``."""
    server, install = program("mariadbd"), program("mariadb-install-db")
    account = _account("mysql")
    with _folder(account) as folder:
        setup = folder / "setup.sql"
        setup.write_text(
            "SET NAMES utf8mb4;\nCREATE DATABASE test CHARACTER SET utf8mb4;\n"
            f"CREATE USER {USER}@'%' IDENTIFIED BY '{PASSWORD}';\nGRANT ALL ON *.* TO {USER}@'%';\n",
            encoding="utf-8",
        )
        files = ["--no-defaults", f"--datadir={folder}/data"]
        _run(account, [install, *files, "--skip-test-db"])

        def command(port: int) -> list[str]:
            return [server, *files, f"--port={port}", "--bind-address=127.0.0.1",
                    f"--socket={folder}/socket", f"--pid-file={folder}/pid", "--skip-name-resolve",
                    "--skip-log-bin", "--innodb-buffer-pool-size=64M"]  # fmt: skip

        with _running(
            Server("mysql", "test", account, folder, command), f"--init-file={setup}"
        ) as found:
            yield found


@contextlib.contextmanager
def postgresql() -> Iterator[Server]:
    """A PostgreSQL server with a database ``postgres``."""
    server, init = program("postgres"), program("initdb")
    account = _account("postgres")
    with _folder(account) as folder:
        secret, data = folder / "secret", folder / "data"
        secret.write_text(PASSWORD, encoding="utf-8")
        access = ["-U", USER, f"--pwfile={secret}", "-A", "scram-sha-256"]
        _run(account, [init, "-D", str(data), *access, "--no-sync", "-E", "UTF8", "--locale=C"])

        def command(port: int) -> list[str]:
            # Shared memory in files of its folder: nothing is left where it is killed.
            return [server, "-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-k", str(folder),
                    "-c", "dynamic_shared_memory_type=mmap"]  # fmt: skip

        with _running(Server("postgresql", "postgres", account, folder, command)) as found:
            yield found


@contextlib.contextmanager
def _running(server: Server, *once: str) -> Iterator[Server]:
    """A server while it runs; ``once`` is for its first start."""
    try:
        server.start(*once)
        yield server
    finally:
        server.stop()


def _account(name: str) -> str:
    """Who a server runs as: these servers refuse to run as root."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid()).pw_name
    try:
        pwd.getpwnam(name)
    except KeyError:
        pytest.skip(f"there is no user {name}, and {name} does not run as root")
    return name


def _as(account: str, command: list[str]) -> list[str]:
    change = [f"--reuid={account}", f"--regid={account}", "--clear-groups"]
    rights = change if os.getuid() == 0 else []
    return ["setpriv", "--pdeathsig", "KILL", *rights, *command]


def _run(account: str, command: list[str]) -> None:
    done = subprocess.run(
        _as(account, command), cwd="/", check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def _folder(account: str) -> Iterator[Path]:
    where = FAST if os.access(FAST, os.W_OK) else Path(tempfile.gettempdir())
    for left in where.glob(f"{PREFIX}*-*"):
        owner = left.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(
            "/proc", owner
        ).exists():  # those tests were killed, and their servers with them
            shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))
    try:
        if os.getuid() == 0:
            owner = pwd.getpwnam(account)
            os.chown(path, owner.pw_uid, owner.pw_gid)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
