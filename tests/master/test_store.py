"""Keys, counters and barriers."""

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ProtocolError
from dlrover.master.machine import store as store_module
from dlrover.master.machine.store import KeyValueStore
from dlrover.rpc.messages import AddToKey, DeleteKeys, EnterBarrier, GetKey, SetKey, StoreRequest


def ask(store: KeyValueStore, request: StoreRequest) -> bytes | None:
    store.apply(request)
    store.validate()
    return store.reply(request)


@pytest.fixture
def store() -> KeyValueStore:
    return KeyValueStore()


def test_a_key_has_the_value_that_was_set_last(store):
    assert ask(store, GetKey("key")) is None
    assert ask(store, SetKey("key", b"first")) == b"first"
    assert ask(store, SetKey("key", b"")) == b""
    assert ask(store, GetKey("key")) == b""


def test_a_counter_starts_at_zero(store):
    assert ask(store, AddToKey("count", 5, "a")) == b"5"
    assert ask(store, AddToKey("count", -7, "b")) == b"-2"
    assert ask(store, GetKey("count")) == b"-2"


def test_an_addition_that_is_sent_twice_counts_once(store):
    ask(store, AddToKey("count", 5, "a"))
    ask(store, AddToKey("count", 1, "b"))
    assert ask(store, AddToKey("count", 5, "a")) == b"6"
    assert ask(store, AddToKey("another", 5, "a")) == b"5"


@pytest.mark.parametrize("value", [b"word", b"\xff", b"9" * 5000], ids=["text", "bytes", "huge"])
def test_what_is_no_number_cannot_be_added_to(store, value):
    ask(store, SetKey("key", value))
    with pytest.raises(ProtocolError, match="Key key holds no number; it cannot be added to"):
        store.apply(AddToKey("key", 1, "a"))
    store.validate()
    assert ask(store, GetKey("key")) == value


def test_a_sum_beyond_the_digits_that_can_be_written_is_refused(store):
    ask(store, SetKey("key", b"9" * 4300))
    with pytest.raises(ProtocolError, match="Key key"):
        store.apply(AddToKey("key", 1, "a"))
    store.validate()


def test_keys_are_deleted_by_prefix(store):
    for key in ("run/1", "run/2", "other"):
        ask(store, SetKey(key, b"x"))
    ask(store, AddToKey("run/count", 1, "a"))
    assert ask(store, DeleteKeys("run/")) == b""
    assert list(store.values) == ["other"]
    assert store.size == len("other") + 1
    assert ask(store, AddToKey("run/count", 1, "a")) == b"1"


def test_a_barrier_opens_when_enough_different_members_are_there(store):
    first = EnterBarrier("gate", "node 0", 2, 60.0)
    assert ask(store, first) is None
    assert ask(store, first) is None
    assert ask(store, EnterBarrier("gate", "node 1", 2, 60.0)) == b"2"
    assert store.reply(first) == b"2"
    assert ask(store, EnterBarrier("another", "node 1", 2, 60.0)) is None


# ---- bounds


@pytest.fixture
def small(monkeypatch) -> KeyValueStore:
    monkeypatch.setattr(store_module, "MAX_STORE_BYTES", 20)
    return KeyValueStore()


def test_a_key_that_does_not_fit_is_refused_and_changes_nothing(small):
    ask(small, SetKey("a", b"x" * 9))
    with pytest.raises(ProtocolError, match=r"Key b does not fit, 11 bytes more: .* 20 bytes"):
        small.apply(SetKey("b", b"x" * 10))
    assert (small.values, small.size) == ({"a": b"x" * 9}, 10)
    ask(small, SetKey("b", b"x" * 9))
    ask(small, SetKey("a", b""))
    assert small.size == 11


def test_bytes_are_counted_not_characters(small):
    with pytest.raises(ProtocolError, match="does not fit"):
        small.apply(SetKey("ÄÖÜ" * 4, b""))


@pytest.mark.parametrize(
    "request_of",
    [
        lambda i: AddToKey("n", 0, f"request {i}"),
        lambda i: EnterBarrier("b", f"member {i}", 99, 0.0),
    ],
    ids=["additions", "members"],
)
def test_what_is_remembered_of_requests_is_bounded_too(small, request_of):
    refused = 0
    for number in range(9):
        try:
            ask(small, request_of(number))
        except ProtocolError:
            refused += 1
        small.validate()
    assert 0 < refused < 9
    before = repr(small)
    ask(small, request_of(0))
    assert repr(small) == before


# ---- any order

KEYS = st.sampled_from(["a", "ab", "b", "", "é"])
REQUESTS = st.one_of(
    st.builds(SetKey, KEYS, st.sampled_from([b"", b"7", b"x" * 30, b"-1_0", b"9" * 4300])),
    st.builds(GetKey, KEYS),
    st.builds(AddToKey, KEYS, st.integers(-(2**63), 2**63), st.sampled_from("pqr")),
    st.builds(DeleteKeys, KEYS),
    st.builds(EnterBarrier, KEYS, st.sampled_from("pqr"), st.integers(-1, 4), st.just(0.0)),
)


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(st.lists(REQUESTS, min_size=3, max_size=25), st.integers(0, 4400))
def test_any_request_is_carried_out_whole_or_refused(requests, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "MAX_STORE_BYTES", limit)
        store = KeyValueStore()
        for request in requests:
            before = repr(store)
            try:
                store.apply(request)
            except ProtocolError:
                assert repr(store) == before
            store.validate()
            store.reply(request)
            after = repr(store)
            if after != before:
                store.apply(request)
                assert repr(store) == after
