"""A listener that runs short of files or threads takes connections again, and ends when it is closed."""

import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from dlrover._util import sockets


class Short:
    """A listener whose first calls of ``accept`` fail."""

    def __init__(self, listener: socket.socket, *failures: int) -> None:
        self._listener, self._failures = listener, list(failures)

    def accept(self) -> tuple[socket.socket, object]:
        if self._failures:
            raise OSError(self._failures.pop(0), "not now")
        return self._listener.accept()


def greet(sock: socket.socket) -> None:
    with sock:
        sock.sendall(b"hello")


@contextlib.contextmanager
def served(*failures: int, ended: Callable[[], None] = lambda: None) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            sockets.serve_each(Short(listener, *failures), greet, "greet")  # type: ignore[arg-type]
            ended()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        assert not thread.is_alive()


def answer(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, 20) as sock:
        return sock.recv(5)


@pytest.mark.parametrize("reason", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED])
def test_connections_are_taken_again(reason: int) -> None:
    """An embedding server with 1,024 clients took none any more, for as long as it ran."""
    with served(reason, reason) as address:
        assert answer(address) == b"hello"


def test_a_connection_for_which_there_is_no_thread_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served() as address:
        with monkeypatch.context() as patched:
            patched.setattr(
                threading.Thread, "start", lambda _self: (_ for _ in ()).throw(RuntimeError("full"))
            )
            assert answer(address) == b""
        assert answer(address) == b"hello"


def test_a_listener_that_is_closed_ends() -> None:
    over = threading.Event()
    with served(errno.EBADF, ended=over.set):
        assert over.wait(20)
