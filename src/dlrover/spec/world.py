"""What a node brings to a rendezvous round, and what it is told when the round is complete."""

from __future__ import annotations

import msgspec

from dlrover.spec import roles


class Offer(msgspec.Struct, frozen=True):
    """What a node brings to a round."""

    nproc: int
    """Workers that the node will start."""
    addr: str
    """Address at which the other nodes reach this one."""
    store_port: int
    """A port that the node holds free for the world's store, should its first worker be rank 0."""
    salt: str = ""
    """Random: of the world's secrets, should its first worker be rank 0."""


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
    servers: int = 0
    """How many of the processes are parameter servers: those of the highest ranks. 0: the job has none."""
    global_batch: int = 0
    """Samples of a step of all workers that were chosen for the job; 0: as many as the program says."""
    salt: str = ""
    """What tells this world's secrets, which are made of the job's token, from another's."""

    @property
    def role(self) -> str:
        """The role of this node: `roles.WORKER` or `roles.SERVER`; empty in a job without servers."""
        if not self.servers:
            return ""
        return roles.SERVER if self.first_rank >= self.workers else roles.WORKER

    @property
    def workers(self) -> int:
        """How many of the processes are no servers: those of the lowest ranks."""
        return self.world_size - self.servers


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent holds when it meets a master: enough for one that has lost its journal."""

    round: int = 0
    """The highest round that the agent was told of; 0 for none."""
    world: World | None = None
    """The world whose workers are here, whether they run, have ended or are being stopped."""
    nproc: int = 1
    """Workers of the node."""
    steps: int = 0
    """Optimizer steps that they have completed in ``world``."""
    succeeded: bool = False
    """All of them ended with exit code 0."""
    stopping: bool = False
    """They are being stopped: the world is over."""
