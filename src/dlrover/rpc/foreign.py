"""Questions to gRPC servers of other programs."""

from __future__ import annotations

from typing import NamedTuple

import grpc

TIMEOUT = 5.0
"""Seconds for an answer."""
_OPTIONS = (("grpc.enable_http_proxy", 0),)


class ForeignReply(NamedTuple):
    """What a server has answered; nothing of it is set if it has not, or with another error."""

    body: bytes = b""
    turned_away: bool = False
    """The request was not authenticated."""


def ask(address: str, method: str, token: str = "") -> ForeignReply:
    """Return the answer of the server at ``HOST:PORT`` to an empty request.

    Args:
        address: ``HOST:PORT``.
        method: Full name of the method, with slashes.
        token: What the request bears; empty: nothing.
    """
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        try:
            return ForeignReply(
                channel.unary_unary(method)(b"", timeout=TIMEOUT, metadata=metadata)
            )
        except grpc.RpcError as error:
            return ForeignReply(turned_away=error.code() is grpc.StatusCode.UNAUTHENTICATED)
