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
def listening(answer: bytes, *, first: bool = False) -> Iterator[str]:
    """An agent's socket, which answers each request alike, or sends its answer ``first``; yields its address."""
    address = f"dlrover-test-{os.getpid()}-{uuid.uuid4().hex}"

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    while first or framing.receive(connection.recv_into):
                        connection.sendall(framing.pack(answer))
                        if first:
                            break

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{address}")
        server.listen()
        threading.Thread(target=serve, daemon=True).start()
        yield address
        server.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def told(members: Members | None) -> Iterator[survivors.Survivors]:
    """Rank 1, started again, whose master answers with a membership."""
    with listening(msgspec.msgpack.encode(MembersNow(members))) as relay:
        given = Given(round=3, relay=relay, members="nobody listens here")
        yield survivors.Survivors(Link(given), 3, 1, 1, None)


def test_a_rank_whose_round_is_over_does_not_take_the_training_for_finished(monkeypatch):
    monkeypatch.setattr(survivors, "EXCLUDED_LIMIT", 0.01)
    with told(None) as rank, pytest.raises(InfrastructureError, match="Round 3 is over"):
        rank.join(torch.zeros(1))
    with told(Members(3, 5, {0: 0}, over=True)) as rank:
        assert rank.join(torch.zeros(1)) is None
