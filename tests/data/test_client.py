"""A training process's side of dealing."""

from __future__ import annotations

import time

import msgspec
import pytest

from dlrover.data import client as sharding_client
from dlrover.data.client import FEWEST, ShardClient
from dlrover.data.services import LocalService
from dlrover.errors import InfrastructureError
from dlrover.spec.requests.shards import (
    DataSpec,
    Incarnation,
    LookShards,
    ShardReply,
    ShardRequest,
    Span,
    TakeShards,
)


def claimed(client: ShardClient) -> list[Span]:
    """What the training takes, all of it at once."""
    spans = client.take()
    assert all(client.claim(span) for span in spans)
    return spans


def test_what_is_done_is_reported_though_the_stream_grows_at_the_same_moment() -> None:
    service = LocalService()
    spec = DataSpec(name="data", begins=(0,), shard=10)
    client = ShardClient(spec, service, 0, Incarnation())
    try:
        client.extend((10,))
        spans = claimed(client)
        with client._changed:  # the client's thread sees both at once
            client.acknowledge(spans)
            client.extend((20,))
        end = time.monotonic() + 30
        while service.ask(LookShards("data")).acknowledged < 10:
            assert time.monotonic() < end, "it is never reported"
            time.sleep(0.01)
    finally:
        client.close()


class Noted:
    """A service that keeps how many shards were asked for, and deals a part of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.service = LocalService()
        self.wants: list[int] = []
        self.requests: list[TakeShards] = []

    def ask(self, request: ShardRequest) -> ShardReply:
        if isinstance(request, TakeShards):
            self.wants.append(request.want)
            self.requests.append(request)
            request = msgspec.structs.replace(request, want=min(request.want, self.most))
        return self.service.ask(request)

    def another(self) -> Noted:
        return self

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(("most", "grows"), [(1000, True), (1, False)])
def test_who_has_to_wait_asks_for_more_unless_it_does_not_get_it_anyway(most, grows) -> None:
    """At the end of an epoch the others' shares are kept for them, however long one waits."""
    service = Noted(most)
    client = ShardClient(
        DataSpec(name="data", size=100, shard=1), service, 0, Incarnation(), ahead=0
    )
    try:
        while spans := claimed(client):
            client.acknowledge(spans)
    finally:
        client.close()
    assert (max(service.wants) > FEWEST) is grows, service.wants


def test_a_loop_that_ends_takes_nothing_into_the_next() -> None:
    """What others give back of an epoch whose loop has ended here is for them."""
    service = Noted(1000)
    spec = DataSpec(name="data", size=4, shard=1, epochs=2)
    client = ShardClient(spec, service, 0, Incarnation(), ahead=0)
    try:
        while spans := claimed(client):
            client.acknowledge(spans)
        end = time.monotonic() + 30
        while service.requests[-1].epoch == 0:
            assert time.monotonic() < end, "it reports no more"
            with client._changed:
                client._renewed -= spec.timeout  # it is time to report
            time.sleep(0.01)
        assert service.wants[-1] == 0
        client.enter(1)
        assert client.take()[0].partition == 1
    finally:
        client.close()


def test_what_a_loop_of_a_stream_leaves_unclaimed_is_for_others_at_once() -> None:
    service = LocalService()
    client = ShardClient(DataSpec(name="data", begins=(0,), shard=10), service, 0, Incarnation())
    try:
        client.extend((40,))
        assert client.take()
        assert service.ask(LookShards("data")).leased > 0
        client.leave_unclaimed()
        client.rest()
        end = time.monotonic() + 30
        while service.ask(LookShards("data")).leased:
            assert time.monotonic() < end, "it keeps what it does not read"
            time.sleep(0.01)
        assert client.take(), "the next loop reads on"
    finally:
        client.close()


class Late(Noted):
    """A service whose answers take so many seconds of a clock."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1000)
        self.seconds, self.now = seconds, 0.0

    def ask(self, request: ShardRequest) -> ShardReply:
        reply = super().ask(request)
        if isinstance(request, TakeShards):
            self.now += self.seconds
        return reply


@pytest.mark.parametrize(("late", "has_them"), [(4.0, True), (11.0, False)])
def test_the_timeout_is_counted_from_the_request(monkeypatch, late, has_them) -> None:
    """The service counts from then, and gives the shards to others in the end."""
    service = Late(late)
    monkeypatch.setattr(sharding_client, "_now", lambda: service.now)
    monkeypatch.setattr(sharding_client, "RENEWAL_WAIT", 0.05)
    spec = DataSpec(name="data", size=9, shard=1, timeout=10.0)
    client = ShardClient(spec, service, 0, Incarnation())
    try:
        client.acknowledge(claimed(client))
        if has_them:
            assert client.acknowledged()
        else:
            with pytest.raises(InfrastructureError, match="may belong to others by now"):
                client.acknowledged()
    finally:
        client.close()
