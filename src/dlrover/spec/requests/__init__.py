"""What processes of a job ask its master by way of their agent."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dlrover.spec.requests.cluster import ClusterReply, ClusterRequest
from dlrover.spec.requests.membership import MembershipReply, MembershipRequest
from dlrover.spec.requests.placement import PlacementReply, PlacementRequest
from dlrover.spec.requests.shards import ShardReply, ShardRequest
from dlrover.spec.requests.strategies import StrategyReply, StrategyRequest

WorkerRequest: TypeAlias = (
    ShardRequest | PlacementRequest | ClusterRequest | StrategyRequest | MembershipRequest
)


class Unanswered(msgspec.Struct, frozen=True, array_like=True, tag="unanswered", kw_only=True):
    """Why there is no reply. One of ``refused`` and ``away`` is set."""

    refused: str = ""
    """Why the request was refused; asking again would not help."""
    away: str = ""
    """Why no master could be reached; ask again."""
    ended: bool = False
    """Whether it was refused because the job has ended."""
    wrong: bool = False
    """Whether it was refused because of the program, whose next start would be refused, too."""


WorkerReply: TypeAlias = (
    ShardReply | PlacementReply | ClusterReply | StrategyReply | MembershipReply | Unanswered
)
