"""Real database servers, each an own process in a folder of its own, that die with the tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.services import program

FAST = Path("/dev/shm")
"""Where a server's files are, if there is such a place: tests do not wait for a disk."""
START = 30.0
"""Seconds that a server may take to answer."""
PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _user(name: str) -> str:
    """Who the server runs as: these servers refuse to run as root."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid()).pw_name
    try:
        pwd.getpwnam(name)
    except KeyError:
        pytest.skip(f"there is no user {name}, and {name} does not run as root")
    return name


def _die_with_the_tests() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _folder(user: str) -> Iterator[Path]:
    """A folder of the server's own, where also another user than that of the tests can write."""
    where = FAST if os.access(FAST, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="dlrover-test-", dir=where))
    entry = pwd.getpwnam(user)
    try:
        if os.getuid() == 0:
            os.chown(path, entry.pw_uid, entry.pw_gid)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _running(command: list[str], user: str, folder: Path, url: str) -> Iterator[str]:
    """The URL of a server while it runs."""
    as_user = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    log = (folder / "server.log").open("wb")
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=log,
        stderr=log,
        preexec_fn=_die_with_the_tests,  # noqa: PLW1509 - one call of a C function
        **(as_user if os.getuid() == 0 else {}),
    )
    try:
        _wait(process, url, folder / "server.log")
        yield url
    finally:
        process.kill()
        process.wait()
        log.close()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START
    while not _answers(url):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


def _answers(url: str) -> bool:
    engine = sa.create_engine(url)
    try:
        engine.connect().close()
    except sa.exc.DBAPIError:
        return False
    finally:
        engine.dispose()
    return True


def _run(command: list[str], user: str, folder: Path) -> None:
    as_user = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    done = subprocess.run(
        command,
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        **(as_user if os.getuid() == 0 else {}),
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def mariadb() -> Iterator[str]:
    """The URL of a MariaDB server without any database of ours."""
    server, install = program("mariadbd"), program("mariadb-install-db")
    user = _user("mysql")
    with _folder(user) as folder:
        data, port = folder / "data", free_port()
        plain = [f"--datadir={data}", "--no-defaults"]
        _run(
            [
                install,
                plain[1],
                plain[0],
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
            ],
            user,
            folder,
        )
        command = [server, plain[1], plain[0], f"--port={port}", "--bind-address=127.0.0.1",
                   f"--socket={folder}/server.sock", f"--pid-file={folder}/server.pid",
                   "--innodb-buffer-pool-size=64M", "--skip-name-resolve"]  # fmt: skip
        with _running(command, user, folder, f"mysql+pymysql://root@127.0.0.1:{port}/mysql") as url:
            yield url


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """The URL of a PostgreSQL server without any database of ours."""
    server, init = program("postgres"), program("initdb")
    user = _user("postgres")
    with _folder(user) as folder:
        data, port = folder / "data", free_port()
        _run(
            [init, "-D", str(data), "-U", "brain", "-A", "trust", "-E", "UTF8", "--no-sync"],
            user,
            folder,
        )
        command = [server, "-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-k", str(folder)]
        url = f"postgresql+psycopg://brain@127.0.0.1:{port}/postgres"
        with _running(command, user, folder, url) as ready:
            yield ready


def fresh(server: str, name: str) -> str:
    """The URL of a new database of a server."""
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return sa.make_url(server).set(database=name).render_as_string(hide_password=False)
