"""A node's offer to a rendezvous round, and the world that it receives when the round is complete."""

from __future__ import annotations

import msgspec

from dlrover.spec.node import SERVER, WORKER
from dlrover.spec.numbers import Count, Port, Workers
from dlrover.spec.requests.membership import Members


class Offer(msgspec.Struct, frozen=True):
    """A node's contribution to a round."""

    nproc: Workers
    """Workers that the node will start."""
    addr: str
    """Address at which other nodes reach this one."""
    store_port: Port
    """Port that the node keeps free for the world's store, in case its first worker is rank 0."""
    salt: str = ""
    """Random salt of the world's secrets, in case the node's first worker is rank 0."""


class World(msgspec.Struct, frozen=True):
    """A completed round as one node sees it. Its size does not depend on the world's.

    Ranks are assigned in blocks: this node's workers have ranks ``first_rank`` to
    ``first_rank + nproc - 1``. Rank 0 opens a new store at ``store_addr:store_port`` in each round.
    """

    round: Count
    restart_count: Count
    node_rank: Count
    node_count: Count
    first_rank: Count
    world_size: Count
    store_addr: str
    store_port: Port
    servers: Count = 0
    """Number of processes that are parameter servers; they have the highest ranks. 0: the job has none."""
    global_batch: Count = 0
    """Samples per step of all workers chosen for the job; 0: the program's own."""
    salt: str = ""
    """Salt that makes this world's secrets, derived from the job's token, differ from another world's."""
    index: int = -1
    """Index of an instance among those of its role, from 0; it is a world by itself. -1: the job's common world."""
    instances: int = 0
    """Wanted number of instances of that role."""
    instance_role: str = ""
    """Role of an instance."""
    attempt: Count = 0
    """Earlier processes of this node's ranks in this round, whose world has gone on without them."""

    def as_attempt(self, attempt: int) -> World:
        """Return the same world for further processes of the same ranks."""
        return msgspec.structs.replace(self, attempt=attempt)

    @property
    def role(self) -> str:
        """Role of this node: `WORKER` or `SERVER`; empty in a job without servers."""
        if not self.servers:
            return ""
        return SERVER if self.first_rank >= self.workers else WORKER

    @property
    def workers(self) -> int:
        """Number of processes that are not servers; they have the lowest ranks."""
        return self.world_size - self.servers


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """State that an agent reports to a master; enough for a master that has lost its journal."""

    round: Count = 0
    """Highest round that the agent knows; 0 for none."""
    world: World | None = None
    """World of the node's workers, be they running, ended or being stopped."""
    left: Count = 0
    """Highest round whose workers were stopped here, mostly since it was over; 0 for none."""
    left_attempt: Count = 0
    """The world's highest attempt there: a node may take a lost one's place in the round that it has left."""
    nproc: Workers = 1
    """Workers of the node."""
    steps: Count = 0
    """Optimizer steps that the workers completed in ``world``."""
    succeeded: bool = False
    """True if all workers ended with exit code 0."""
    stopping: bool = False
    """True while the workers are being stopped because the world is over."""
    members: Members | None = None
    """The ranks that train in ``world``, by the master's latest order; None if it has sent none."""
    attempts: dict[Count, Count] = {}
    """Attempt of each worker's process, by local rank; empty if each is the first."""
