"""What a node brings to a rendezvous round, and what it is told when the round is complete."""

from __future__ import annotations

import msgspec


class Offer(msgspec.Struct, frozen=True):
    """What a node brings to a round."""

    nproc: int
    """Workers that the node will start."""
    addr: str
    """Address at which the other nodes reach this one."""
    store_port: int
    """A port that the node holds free for the world's store, should its first worker be rank 0."""


class World(msgspec.Struct, frozen=True):
    """A completed round as one node sees it: of constant size, whatever the world's.

    Ranks are given out in blocks: this node's workers have ranks ``first_rank`` to
    ``first_rank + nproc - 1``. Rank 0 opens the store at ``store_addr:store_port``, afresh each round.
    """

    round: int
    restart_count: int
    node_rank: int
    node_count: int
    first_rank: int
    world_size: int
    store_addr: str
    store_port: int
