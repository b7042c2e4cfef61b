"""Frames of calls, and what cannot be read as one."""

from __future__ import annotations

import socket
import struct

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ProtocolError
from dlrover.roles.runtime import payload, wire
from dlrover.roles.runtime.wire import CallOp

_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=30)
@given(_plain, st.lists(st.integers(0, 200), max_size=4))
def test_values_and_arrays_come_through_a_socket_as_they_are(
    value: object, sizes: list[int]
) -> None:
    arrays = [np.arange(size, dtype=np.int16) for size in sizes]
    here, there = socket.socketpair()
    with here, there:
        head, buffers = payload.encode_call("method", [value, *arrays], {"key": value})
        wire.send(here, CallOp.CALL, 7, head, buffers)
        frame = wire.receive(there, wire.BodyMemory())
        method, (back, *same), kwargs = payload.decode(frame.head, frame.body)
    assert (frame.op, frame.call, method) == (CallOp.CALL, 7, "method")
    assert back == value == kwargs["key"]
    for array, copy in zip(arrays, same, strict=True):
        np.testing.assert_array_equal(array, copy)
    assert payload.decode(*wire.unpacked(wire.packed(head, buffers)))[0] == "method"


def test_memory_is_used_again_once_no_array_of_it_lives() -> None:
    memory = wire.BodyMemory()
    first = memory.take(2 << 20)
    place, part = first.__array_interface__["data"][0], first[10:20].view(np.uint16)
    del first
    assert memory.take(2 << 20).__array_interface__["data"][0] != place, "a part of it lives"
    del part
    assert memory.take((2 << 20) - 5).__array_interface__["data"][0] == place


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n" + bytes(20), "A call begins with b'GET '"),
        (struct.pack("<4sB3xIQQ", b"DLR\x01", 99, 0, 0, 0), "operation 99"),
        (struct.pack("<4sB3xIQQ", b"DLR\x01", 1, 0, 0, 1 << 60), "a body of 1152921504606846976"),
    ],
)
def test_what_is_no_frame_is_refused_before_it_is_read(data: bytes, why: str) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(data)
        with pytest.raises(ProtocolError, match=why):
            wire.receive(there)


def test_an_array_outside_of_its_frame_is_refused() -> None:
    head, buffers = payload.encode(np.arange(100))
    with pytest.raises(ProtocolError, match="an array lies outside of its frame"):
        payload.decode(head, np.frombuffer(buffers[0], np.uint8)[:64])
