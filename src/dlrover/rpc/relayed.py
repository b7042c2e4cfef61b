"""A worker's requests to the job's master, which its agent relays.

A worker has no connection to the master. Its agent takes its requests on a Unix socket in the abstract
namespace and forwards them. A training process, which forks data loaders and must leave nothing behind,
therefore holds no token, no address and no gRPC.
"""

from __future__ import annotations

import contextlib
import os
import socket

import msgspec

from dlrover._util import decoding, framing
from dlrover._util.sockets import peer
from dlrover.errors import InfrastructureError
from dlrover.rpc import encoding
from dlrover.spec.requests import Unanswered, WorkerReply, WorkerRequest

CALL_TIMEOUT = 30.0
"""Seconds that the agent may take to answer; it reports by itself that the master is away."""
_reply = decoding.msgpack_decoder(WorkerReply)


class RelayedMaster:
    """A connection to the relay at an address in the abstract namespace. One thread uses it at a time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._sock: socket.socket | None = None
        self._pid = 0

    def ask(self, request: WorkerRequest) -> WorkerReply:
        """Return the reply to a request."""
        data = encoding.encode(request)
        if len(data) > framing.MAX_FRAME:
            return Unanswered(
                refused=f"A request has {len(data)} bytes; {framing.MAX_FRAME} are accepted."
            )
        try:
            return self._asked(data)
        except (OSError, InfrastructureError, framing.FrameTooLongError) as error:
            self.close()
            return Unanswered(away=f"The agent of this node does not answer: {error}.")
        except msgspec.DecodeError as error:
            self.close()
            return Unanswered(refused=f"The agent's answer cannot be read: {error}.")
        except (
            BaseException
        ):  # such as Ctrl-C: the next request must not take a late reply for its own
            self.close()
            raise

    def _asked(self, data: bytes) -> WorkerReply:
        if self._pid != os.getpid():
            self.close()  # a fork of the process that opened it
        if self._sock is None:
            self._sock, self._pid = connected(self.address), os.getpid()
        self._sock.sendall(framing.pack(data))
        return _reply.decode(framing.receive(self._sock.recv_into))

    def another(self) -> RelayedMaster:
        """Return a connection for another thread."""
        return RelayedMaster(self.address)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.close()
            self._sock = None


def connected(address: str) -> socket.socket:
    """Return a connection to a socket of this node's agent.

    Raises:
        OSError: No process listens there.
        InfrastructureError: Another user does.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CALL_TIMEOUT)
        sock.connect(f"\0{address}")
    except BaseException:
        sock.close()
        raise
    if peer(sock).uid != os.getuid():
        sock.close()
        raise InfrastructureError("another user has the socket of the agent")
    return sock
