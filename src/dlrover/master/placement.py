"""The placement of embedding tables. Each change is journalled before it takes effect."""

from __future__ import annotations

import hmac
import logging

from msgspec.structs import replace

from dlrover.embedding.machine.placement import Placement
from dlrover.errors import ProtocolError
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.placement import PlacementReply, PlacementRequest

logger = logging.getLogger(__name__)


class PlacementService:
    """Placement of one job's tables."""

    def __init__(self) -> None:
        self.placement = Placement()
        self._secret = b""

    def use_token(self, token: str) -> None:
        """Derive the secret of servers and clients from the job's token."""
        self._secret = hmac.digest(token.encode(), b"embedding", "sha256")

    def handle(self, request: PlacementRequest) -> PlacementReply | Unanswered:
        """Answer a request that is in the journal or changes nothing; one that fails is refused alone."""
        try:
            reply = self.placement.handle(request)
        except ProtocolError as error:
            return Unanswered(refused=str(error))
        except Exception as error:
            logger.exception("The master cannot handle a request of a server: %.1000r", request)
            return Unanswered(refused=f"The master cannot handle the request: {error!r}.")
        return replace(reply, secret=self._secret)
