"""Database servers of their own, in a temporary directory, that die with the tests."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PASSWORD = "pa@ss:w/rd%1"
"""Of the user ``reader``; what must be escaped in a URL is in it."""


class Server:
    """A server that listens on ``port`` of this machine."""

    def __init__(self, directory: Path, user: str, command: Callable[[Path, int], list[str]]):
        self.directory, self.user = directory, user
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._command = command(directory, self.port)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        command = as_user(self.user, [*self._command, *more])
        with open(self.directory / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)
        until = time.monotonic() + 20
        while time.monotonic() < until and self._process.poll() is None:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1),
            ):
                return
            time.sleep(0.05)
        raise AssertionError((self.directory / "log").read_text()[-2000:])

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # both servers then end at once
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def as_user(user: str, command: list[str]) -> list[str]:
    """The command as another user if this is root, which these servers refuse to run as."""
    change = [f"--reuid={user}", f"--regid={user}", "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", "--pdeathsig", "KILL", *change, *command]


@contextlib.contextmanager
def own_directory(user: str) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix=f"{user}-"))
    try:
        if os.geteuid() == 0:
            found = pwd.getpwnam(user)
            os.chown(directory, found.pw_uid, found.pw_gid)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def mariadb(mariadbd: str, install: str) -> Iterator[Server]:
    """A MariaDB server with a database ``test``."""
    with own_directory("mysql") as directory:
        setup = directory / "setup.sql"
        setup.write_text(
            "SET NAMES utf8mb4;\nCREATE DATABASE test CHARACTER SET utf8mb4;\n"
            f"CREATE USER reader@'%' IDENTIFIED BY '{PASSWORD}';\n"
            "GRANT ALL ON test.* TO reader@'%';\n",
            encoding="utf-8",
        )
        data = f"--datadir={directory}/data"
        subprocess.run(
            as_user("mysql", [install, "--no-defaults", data, "--skip-test-db"]),
            check=True,
            capture_output=True,
            timeout=60,
        )

        def command(directory: Path, port: int) -> list[str]:
            socket_file = f"--socket={directory}/socket"
            where = [f"--port={port}", "--bind-address=127.0.0.1", socket_file, data]
            quick = ["--skip-log-bin", "--innodb-flush-log-at-trx-commit=0"]
            return [
                mariadbd,
                "--no-defaults",
                "--skip-name-resolve",
                *where,
                *quick,
            ]

        server = Server(directory, "mysql", command)
        try:
            server.start(f"--init-file={setup}")
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def postgres(program: str, initdb: str) -> Iterator[Server]:
    """A PostgreSQL server with a database ``postgres``."""
    with own_directory("postgres") as directory:
        secret = directory / "secret"
        secret.write_text(PASSWORD, encoding="utf-8")
        access = ["-U", "reader", f"--pwfile={secret}", "-A", "scram-sha-256"]
        options = ["--no-sync", "--encoding=UTF8", "--locale=C"]
        subprocess.run(
            as_user("postgres", [initdb, "-D", f"{directory}/data", *access, *options]),
            check=True,
            capture_output=True,
            timeout=60,
        )

        def command(directory: Path, port: int) -> list[str]:
            where = ["-p", str(port), "-h", "127.0.0.1", "-k", str(directory)]
            return [program, "-D", f"{directory}/data", *where, "-c", "fsync=off"]

        server = Server(directory, "postgres", command)
        try:
            server.start()
            yield server
        finally:
            server.stop()
