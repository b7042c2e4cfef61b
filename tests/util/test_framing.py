import asyncio
import io
import random

import pytest

from dlrover._util import backoff, framing


def test_frames_are_read_back_from_files_and_buffers():
    frames = framing.pack(b"one") + framing.pack(b"") + framing.pack(b"three")
    pipe = io.BytesIO(frames)
    assert [bytes(framing.receive(pipe.readinto)) for _ in range(3)] == [b"one", b"", b"three"]
    with pytest.raises(ConnectionError, match="closed"):
        framing.receive(pipe.readinto)
    buffer, found = bytearray(), []
    for byte in frames:
        buffer.append(byte)
        found += framing.take(buffer)
    assert found == [b"one", b"", b"three"]
    assert not buffer


def test_a_stream_is_read_up_to_its_end():
    asyncio.run(_read_up_to_the_end())


async def _read_up_to_the_end():
    reader = asyncio.StreamReader()
    reader.feed_data(framing.pack(b"one") + framing.pack(b"half")[:-1])
    reader.feed_eof()
    assert await framing.read(reader) == b"one"
    with pytest.raises(ConnectionError, match="closed"):
        await framing.read(reader)


def test_a_message_above_the_limit_is_not_read():
    frame = framing.pack(b"12345")
    with pytest.raises(framing.FrameTooLongError, match="5 bytes exceeds the limit of 4"):
        framing.receive(io.BytesIO(frame).readinto, 4)
    with pytest.raises(framing.FrameTooLongError):
        framing.take(bytearray(b"\xff" * 4))


def test_delays_grow_to_their_cap_and_are_shortened_at_random(monkeypatch):
    monkeypatch.setattr(random, "random", lambda: 0.0)
    delays = backoff.delays(1.0, 5.0)
    assert [next(delays) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    monkeypatch.setattr(random, "random", lambda: 1.0)
    assert next(backoff.delays(1.0, 5.0)) == 0.75
