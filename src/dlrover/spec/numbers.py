"""Whole numbers that a peer reports, within limits in which sums of many are exact and fit into a message."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST = 2**53

Count = Annotated[int, Meta(ge=0, le=MOST)]
KnownCount = Annotated[int, Meta(ge=-1, le=MOST)]
"""-1: unknown."""
Workers = Annotated[int, Meta(ge=1, le=2**20)]
"""Workers of a node."""
Port = Annotated[int, Meta(ge=0, le=65535)]
"""0: none."""
