"""What a rank does that asks to train when there is nothing to join."""

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Iterator

import msgspec
import pytest

from dlrover._util import framing
from dlrover.errors import InfrastructureError
from dlrover.launched import Given
from dlrover.spec.membership import Members, MembersNow

torch = pytest.importorskip("torch")

from dlrover.training.replicas import survivors  # noqa: E402
from dlrover.training.replicas.link import Link  # noqa: E402

pytestmark = [pytest.mark.torch]


@contextlib.contextmanager
def listening(*pushed: bytes, answer: bytes = b"") -> Iterator[str]:
    """An agent's socket, which pushes one message to each that connects, or answers alike; yields its address."""
    address = f"dlrover-test-{os.getpid()}-{uuid.uuid4().hex}"
    left = list(pushed)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    if left:
                        connection.sendall(framing.pack(left.pop(0)))
                    while answer and framing.receive(connection.recv_into):
                        connection.sendall(framing.pack(answer))

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{address}")
        server.listen()
        threading.Thread(target=serve, daemon=True).start()
        yield address
        server.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def told(members: Members | None) -> Iterator[survivors.Survivors]:
    """Rank 1, started again, whose master answers with a membership."""
    with listening(answer=msgspec.msgpack.encode(MembersNow(members))) as relay:
        given = Given(round=3, relay=relay, members="nobody listens here")
        yield survivors.Survivors(Link(given), 3, 1, 1, None)


def test_a_rank_whose_round_is_over_does_not_take_the_training_for_finished(monkeypatch):
    monkeypatch.setattr(survivors, "EXCLUDED_LIMIT", 0.01)
    with told(None) as rank, pytest.raises(InfrastructureError, match="Round 3 is over"):
        rank.join(torch.zeros(1))
    with told(Members(3, 5, {0: 0}, over=True)) as rank:
        assert rank.join(torch.zeros(1)) is None


def test_what_the_agent_pushes_is_read_after_garbage_too():
    members = Members(3, 1, {0: 0, 1: 1})
    with listening(b"\xc1", msgspec.msgpack.encode(members)) as address:
        link = Link(Given(round=3, members=address))
        assert link.wait(lambda m: m.number == 1, 30.0) == members


def test_what_another_user_pushes_is_not_read(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with listening(*4 * [msgspec.msgpack.encode(Members(3, 1))]) as address:
        link = Link(Given(round=3, members=address))
        assert link.wait(lambda _members: True, 0.3) is None
