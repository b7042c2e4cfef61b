"""A training process's side of dealing."""

from __future__ import annotations

import time

from dlrover.sharding.client import ShardClient
from dlrover.sharding.dealers import LocalDealer
from dlrover.spec.shards import DataSpec, Incarnation, LookShards


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
