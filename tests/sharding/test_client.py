"""A training process's side of dealing."""

from __future__ import annotations

import time

import msgspec
import pytest

from dlrover.sharding.client import FEWEST, ShardClient
from dlrover.sharding.dealers import LocalDealer
from dlrover.spec.shards import (
    DataSpec,
    Incarnation,
    LookShards,
    ShardReply,
    ShardRequest,
    TakeShards,
)


def test_what_is_done_is_told_though_the_stream_grows_at_the_same_moment() -> None:
    dealer = LocalDealer()
    spec = DataSpec(name="data", begins=(0,), shard=10)
    client = ShardClient(spec, dealer, 0, Incarnation())
    try:
        client.extend((10,))
        spans = client.take()
        with client._changed:  # the client's thread sees both at once
            client.consumed(spans)
            client.extend((20,))
        end = time.monotonic() + 5
        while dealer.ask(LookShards("data")).done < 10:
            assert time.monotonic() < end, "it is never told"
            time.sleep(0.01)
    finally:
        client.close()


class Noted:
    """A dealer that keeps how many shards were asked for, and deals a part of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.dealer = LocalDealer()
        self.wants: list[int] = []

    def ask(self, request: ShardRequest) -> ShardReply:
        if isinstance(request, TakeShards):
            self.wants.append(request.want)
            request = msgspec.structs.replace(request, want=min(request.want, self.most))
        return self.dealer.ask(request)

    def another(self) -> Noted:
        return self

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(("most", "grows"), [(1000, True), (1, False)])
def test_who_has_to_wait_asks_for_more_unless_it_does_not_get_it_anyway(most, grows) -> None:
    """At the end of an epoch the others' shares are kept for them, however long one waits."""
    dealer = Noted(most)
    client = ShardClient(
        DataSpec(name="data", size=100, shard=1), dealer, 0, Incarnation(), ahead=0
    )
    try:
        while spans := client.take():
            client.consumed(spans)
    finally:
        client.close()
    assert (max(dealer.wants) > FEWEST) is grows, dealer.wants
