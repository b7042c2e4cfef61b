"""Questions to gRPC servers of other programs."""

from __future__ import annotations

import grpc

TIMEOUT = 5.0
"""Seconds for an answer."""
_OPTIONS = (("grpc.enable_http_proxy", 0),)


def turns_away(address: str, method: str, token: str) -> bool:
    """Return whether the server at ``HOST:PORT`` turns an empty request away as unauthenticated.

    Args:
        address: ``HOST:PORT``.
        method: Full name of the method, with slashes.
        token: What the request bears; empty: nothing.
    """
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=TIMEOUT, metadata=metadata)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False
