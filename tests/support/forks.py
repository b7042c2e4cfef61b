"""Programs in processes that are forked from one which has imported PyTorch: they start in a tenth of a second.

The file is also that one process: ``forks.py SOCKET``. A program sees its own arguments, environment and output, and
ends as a program does. Launchers and the imports themselves are for tests that start real interpreters.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

PRELOAD = (
    "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "dlrover.checkpoint.engine.checkpointer", "dlrover.integrations.dcp",
)  # fmt: skip
MESSAGE = 1 << 20
PR_SET_PDEATHSIG = 1


# ---- the process that forks


def serve(connection: socket.socket) -> dict[str, object] | None:
    """Fork for each order until the tests have gone. Returns in a fork, with its order; None at the end."""
    wakeup, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as ready:
        ready.register(connection, selectors.EVENT_READ)
        ready.register(wakeup, selectors.EVENT_READ)
        while True:
            names = [key.fileobj for key, _ in ready.select()]
            if wakeup in names:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                report_ends(connection)
            if connection not in names:
                continue
            data, streams, _, _ = socket.recv_fds(connection, MESSAGE, 2)
            if not data:
                return None
            if pid := os.fork():
                for stream in streams:
                    os.close(stream)
                connection.send(json.dumps({"started": pid}).encode())
                continue
            break
    # In the fork.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(wakeup)
    os.close(woken)
    connection.close()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)
    return json.loads(data)


def report_ends(connection: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            connection.send(json.dumps({"ended": ended[0], "code": code}).encode())


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    del sys.path[0]
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, "an import has started a thread, which forks would lack"
    order = serve(connection)
    if order is None:
        return
    os.environ.clear()
    os.environ.update(order["env"])  # type: ignore[arg-type]
    sys.argv = list(order["words"])  # type: ignore[call-overload]
    os.chdir(str(order["cwd"]))
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


# ---- the tests' side


class Fork:
    """A program that runs, as `subprocess.Popen` shows one."""

    def __init__(self, forks: Forks, pid: int, out: Path, err: Path) -> None:
        self._forks, self.pid, self._out, self._err = forks, pid, out, err
        self._read = 0

    def poll(self) -> int | None:
        return self._forks.code(self.pid, 0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._forks.code(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; the output after the lines that `line` gave, and the errors."""
        self.wait(timeout)
        return self._out.read_text()[self._read :], self.errors()

    def line(self) -> str:
        """The next line of the output; what there is of it if the program has ended."""
        while True:
            ended = self.poll() is not None
            found = self._out.read_text()[self._read :]
            line, newline, _ = found.partition("\n")
            if newline or ended:
                self._read += len(line + newline)
                return line + newline
            time.sleep(0.02)

    def errors(self) -> str:
        """What it has written to standard error."""
        return self._err.read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it if it runs."""
        self.send_signal(signal.SIGKILL)
        self.wait()


class Forks:
    """Starts programs. The process from which they are forked is started with the first of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._codes: dict[int, int] = {}

    def start(
        self, *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Fork:
        """Start a script with arguments; its output goes to files, which the `Fork` reads."""
        order = {
            "words": list(map(str, words)),
            "env": {**(os.environ if env is None else env)},
            "cwd": str(cwd or Path.cwd()),
        }
        if self._socket is None:
            self._begin()
        assert self._socket is not None
        files = [self._directory / f"{name}-{uuid.uuid4().hex}" for name in ("out", "err")]
        with files[0].open("ab") as out, files[1].open("ab") as err:
            descriptors = [out.fileno(), err.fileno()]
            socket.send_fds(self._socket, [json.dumps(order).encode()], descriptors)
        while (pid := self._receive()) is None:
            pass
        return Fork(self, pid, *files)

    def ranks(
        self, number: int, *words: str | Path, env: Mapping[str, str], timeout: float = 90.0
    ) -> str:
        """Run a script on ranks as ``torchrun --standalone`` does, to a successful end; what all of them printed."""
        from tests.services import free_port

        port = free_port()
        shared = {
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(number),
            "LOCAL_WORLD_SIZE": str(number), "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        }  # fmt: skip
        running = [
            self.start(*words, env={**env, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(number)
        ]
        end = time.monotonic() + timeout
        try:
            codes = [process.wait(max(0.0, end - time.monotonic())) for process in running]
        finally:
            for process in running:
                process.kill()
        output, errors = map(
            "".join, zip(*(process.communicate() for process in running), strict=True)
        )
        assert not any(codes), f"{codes}\n{output}{errors}"
        return output + errors

    def code(self, pid: int, timeout: float | None) -> int | None:
        """The exit code of a program; None if it does not end in time."""
        end = None if timeout is None else time.monotonic() + timeout
        while pid not in self._codes:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                self._receive(left)
            except (TimeoutError, BlockingIOError):
                return None
        return self._codes[pid]

    def close(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()

    def _begin(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def _receive(self, timeout: float | None = None) -> int | None:
        """Take one message: the pid of a program that has started, or the end of one."""
        assert self._socket is not None
        self._socket.settimeout(timeout)
        data = self._socket.recv(4096)
        assert data, "the process that forks has died"
        message = json.loads(data)
        if "started" in message:
            return message["started"]
        self._codes[message["ended"]] = message["code"]
        return None


if __name__ == "__main__":
    main()
