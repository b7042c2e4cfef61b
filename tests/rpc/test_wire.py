"""What goes over the wire: nothing but the messages that were meant, whatever the bytes are."""

from __future__ import annotations

import math
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.rpc import messages, wire
from dlrover.spec.events import Event, WorkerFailed
from dlrover.spec.failure import Failure, FailureKind, Origin, Verdict
from dlrover.spec.jobdir import TlsFiles
from dlrover.spec.outcome import Outcome
from dlrover.spec.world import Offer, World

FAILURE = Failure(
    id="f", kind=FailureKind.SIGNAL, node_id=3, rank=25, local_rank=1, round=2, signal=9
)
VERDICT = Verdict(title="rank 25 was killed by SIGKILL", origin=Origin.INFRASTRUCTURE)
STATUS = messages.Status(
    name="job",
    phase="running",
    round=2,
    world_size=16,
    restarts=1,
    steps=5,
    total_steps=9,
    waiting_for="",
    nodes=(messages.NodeState(0, 0, "running", "host", True, 5),),
    outcome=Outcome(exit_code=1, reason="it failed", failure=FAILURE, verdict=VERDICT),
)
EXAMPLES: list[tuple[Any, msgspec.Struct]] = [
    (messages.AgentMessage, messages.Hello("uid", 3, 1, "host", 2)),
    (messages.AgentMessage, messages.Join(2, Offer(8, "host", 1234))),
    (messages.AgentMessage, messages.Heartbeat(2, 10**12)),
    (messages.AgentMessage, messages.Failed(FAILURE)),
    (messages.AgentMessage, messages.Succeeded(2)),
    (messages.MasterMessage, messages.Welcome(3, 2, 15.0)),
    (messages.MasterMessage, messages.CallToRound(3, "node 2 was lost")),
    (messages.MasterMessage, messages.AssignWorld(World(2, 1, 0, 2, 0, 16, "host", 1234))),
    (messages.MasterMessage, messages.Dismiss(Outcome(exit_code=0, reason="done"))),
    (messages.Status, STATUS),
    (messages.Notice, messages.Notice((Event(1, 2.5, WorkerFailed(FAILURE, VERDICT)),), STATUS)),
]
KINDS = [messages.AgentMessage, messages.MasterMessage, messages.Status]


def refusal(data: bytes, kind: Any) -> str:
    """Why bytes are refused; empty if they are a message."""
    try:
        wire.decode(data, kind)
    except ProtocolError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "message"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_message_arrives_as_it_was_sent(kind: Any, message: msgspec.Struct) -> None:
    assert wire.decode(wire.encode(message), kind) == message


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=64), kind=st.sampled_from(KINDS))
def test_any_bytes_are_a_message_or_are_refused(data: bytes, kind: Any) -> None:
    assert len(refusal(data, kind)) < 300


@settings(max_examples=300, deadline=None)
@given(example=st.sampled_from(EXAMPLES), data=st.data())
def test_a_damaged_message_is_a_message_or_is_refused(example: Any, data: st.DataObject) -> None:
    kind, message = example
    encoded = bytearray(wire.encode(message))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] = data.draw(st.integers(0, 255))
    assert len(refusal(bytes(encoded), kind)) < 300


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 1_000_000,
        b"\x82\xa4type\xa5hello\xa1x" + b"\x91" * 1_000_000,
        b"\x81\xa1x" * 100_000,
        b"\x82\xa4type\xa5hello\xa3uid\xa2\xff\xfe",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        pickle.dumps(messages.Hello),
        wire.encode(messages.Heartbeat(1, 2)) + b"more",
        wire.encode(messages.Heartbeat(1, 2))[:-1],
    ],
    ids=range(12),
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    assert refusal(data, messages.AgentMessage).startswith("A message could not be read: ")


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "packed", [lambda n: b"\xcb" + struct.pack(">d", n), lambda n: b"\xca" + struct.pack(">f", n)]
)
def test_nan_and_infinity_are_refused_in_any_place(
    number: float, packed: Callable[[float], bytes]
) -> None:
    """Arithmetic on it would fail in the next master, which replays the message, as in this one."""
    failed = wire.encode(messages.Failed(msgspec.structs.replace(FAILURE, time=1.5)))
    good = b"\xcb" + struct.pack(">d", 1.5)
    assert refusal(failed, messages.AgentMessage) == ""
    assert "beyond 1e+150" in refusal(failed.replace(good, packed(number)), messages.AgentMessage)
    key = msgspec.msgpack.encode({"type": "heartbeat", "round": 1, "steps": 2, "mood": {1.5: [()]}})
    assert refusal(key, messages.AgentMessage) == ""
    assert "beyond 1e+150" in refusal(key.replace(good, packed(number)), messages.AgentMessage)


@pytest.mark.parametrize(
    ("number", "accepted"), [(1e150, True), (-1e150, True), (1.1e150, False), (-1e308, False)]
)
def test_numbers_of_any_use_are_accepted(number: float, accepted: bool) -> None:
    data = msgspec.msgpack.encode({"type": "heartbeat", "round": 1, "steps": 2, "mood": number})
    assert (refusal(data, messages.AgentMessage) == "") == accepted


def test_bytes_like_those_of_an_infinite_number_are_accepted() -> None:
    endless = b"\xcb" + struct.pack(">d", math.inf)
    listed = wire.encode(messages.ModulesListed(endless))
    assert refusal(listed, messages.AgentMessage) == ""


def test_a_text_that_is_no_unicode_arrives_readable() -> None:
    """An exception may quote the name of a file that is no UTF-8; a job must not wait for its report for ever."""
    name = os.fsdecode(b"caf\xe9.bin")
    facts = msgspec.structs.replace(FAILURE, message=f"{name} is damaged", node_facts=(name,))
    failed = wire.decode(wire.encode(messages.Failed(facts)), messages.AgentMessage)
    expected = {"message": "caf?.bin is damaged", "node_facts": ("caf?.bin",)}
    assert failed == messages.Failed(msgspec.structs.replace(FAILURE, **expected))
    stored = messages.MemoryStored(name, ())
    assert wire.decode(wire.encode(stored), messages.AgentMessage) == messages.MemoryStored(
        "caf?.bin", ()
    )


def test_a_refusal_names_what_is_wrong() -> None:
    assert "`uid`" in refusal(msgspec.msgpack.encode({"type": "hello"}), messages.AgentMessage)
    assert "'goodbye'" in refusal(
        msgspec.msgpack.encode({"type": "goodbye"}), messages.AgentMessage
    )
    assert "$.steps" in refusal(
        msgspec.msgpack.encode({"type": "heartbeat", "round": 1, "steps": "1"}),
        messages.AgentMessage,
    )


@pytest.mark.parametrize(
    "worker",
    [
        [5, 6, 1.0, [0.0] * 6],
        [5, -1, 1.0, [0.0] * 6],
        [5, 1, 1.0, [0.0] * 5],
        [5, 1, 1.0, [0.0] * 7],
    ],
)
def test_an_unknown_activity_is_refused(worker: list[Any]) -> None:
    beat = {"type": "heartbeat", "round": 1, "steps": 2, "workers": [worker]}
    assert "workers" in refusal(msgspec.msgpack.encode(beat), messages.AgentMessage)


def test_a_refusal_does_not_repeat_a_long_message() -> None:
    long = msgspec.msgpack.encode({"type": "x" * 1_000_000})
    assert 0 < len(refusal(long, messages.AgentMessage)) < 300


def test_fields_of_a_newer_peer_are_left_out() -> None:
    newer = msgspec.msgpack.encode({"type": "heartbeat", "round": 1, "steps": 2, "mood": [3]})
    assert wire.decode(newer, messages.AgentMessage) == messages.Heartbeat(1, 2)


def test_tokens_match_only_when_equal() -> None:
    assert wire.token_matches("secret", "secret")
    for other in ("", "secre", "secrets", "Secret", None, b"secret", "sécret"):
        assert not wire.token_matches(other, "secret")


@pytest.mark.parametrize("token", ["", " ", "a ", "a\nb", "ü", "x" * 4097, "\x00"])
def test_a_token_that_headers_cannot_carry_is_refused(token: str) -> None:
    with pytest.raises(ConfigurationError, match=r"token has .* printable ASCII"):
        wire.checked_token(token)


@pytest.mark.parametrize("token", ["a", "two words", "x" * 4096])
def test_other_tokens_are_accepted(token: str) -> None:
    assert wire.checked_token(token) == token


def test_tls_names_the_file_that_is_wrong(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    absent = str(tmp_path / "absent.pem")
    with pytest.raises(ConfigurationError, match="both tls_cert and tls_key"):
        wire.server_credentials(TlsFiles(cert=str(junk)))
    with pytest.raises(ConfigurationError, match=r"tls_key: .*absent.pem cannot be read: No such"):
        wire.server_credentials(TlsFiles(cert=str(junk), key=absent))
    with pytest.raises(ConfigurationError, match=r"tls_cert .*junk.pem and tls_key .*junk.pem are"):
        wire.server_credentials(TlsFiles(cert=str(junk), key=str(junk)))
    with pytest.raises(ConfigurationError, match=r"tls_ca: .*absent.pem cannot be read: No such"):
        wire.channel_credentials(TlsFiles(ca=absent))
    with pytest.raises(ConfigurationError, match=r"tls_ca .*junk.pem holds no PEM certificate"):
        wire.channel_credentials(TlsFiles(ca=str(junk)))


def test_without_files_there_is_no_tls() -> None:
    assert wire.server_credentials(TlsFiles()) is None
    assert wire.channel_credentials(TlsFiles()) is None
