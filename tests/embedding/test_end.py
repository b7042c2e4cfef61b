"""An embedding server whose job has ended, before its agent stops it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from dlrover._util import decoding, framing
from dlrover.embedding.machine.placement import Placement
from dlrover.embedding.remote.directory import JobDirectory
from dlrover.embedding.remote.holding import HeldSlots
from dlrover.embedding.remote.server import EmbeddingServer
from dlrover.rpc import encoding
from dlrover.spec.requests import Unanswered, WorkerRequest
from dlrover.spec.requests.placement import Announce


@pytest.mark.timeout(30)
def test_a_server_ends_without_an_error_when_the_job_has_ended() -> None:
    address = f"dlrover-test-{os.getpid()}"
    placement, decode = Placement(), decoding.msgpack_decoder(WorkerRequest).decode

    def relay() -> None:
        with listener.accept()[0] as sock, contextlib.suppress(ConnectionError):
            while True:
                request = decode(framing.receive(sock.recv_into))
                ended = Unanswered(refused="The job has ended.", ended=True)
                announced = isinstance(request, Announce)
                reply = placement.handle(request) if announced else ended
                sock.sendall(framing.pack(encoding.encode(reply)))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        agent = threading.Thread(target=relay)
        agent.start()
        with contextlib.closing(JobDirectory(address)) as directory:
            EmbeddingServer(0, 1, 1, directory, HeldSlots(), lambda *_: None).run()
        agent.join()
