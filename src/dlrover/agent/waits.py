"""What a node waits for, for how long, and what it tells its user meanwhile. Pure."""

from __future__ import annotations

from dlrover.agent.machine import Stage
from dlrover.errors import ExitCode
from dlrover.spec.job import Limits
from dlrover.spec.outcome import Outcome

FIRST_NOTICE = 5.0
"""Seconds of a wait after which it is told."""
NOTICE_INTERVAL = 30.0
"""Seconds between two lines on one wait."""

_MEANWHILE = {
    Stage.JOINED: "no workers run here until it is back",
    Stage.RUNNING: "the workers train on as far as they can",
    Stage.FAILED: "a worker has failed, and the master decides what follows",
    Stage.SUCCEEDED: "the workers have ended well",
    Stage.STOPPING: "the workers are being stopped",
}


class Waits:
    """A node's wait for its master, and for its round. Times are monotonic seconds."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._known = False
        # since when the master has been away, None while it is there
        self._away: float | None = now
        # since when the node has waited for the world of a round that it joined
        self._joined: float | None = None
        self._told_at = -NOTICE_INTERVAL
        self._told = False

    def heard(self, now: float, address: str) -> str:
        """The master has said something; what the user is told if that ends a wait that was told."""
        away, self._away, self._known = self._away, None, True
        told, self._told = self._told, False
        return (
            f"The master answers at {address}, after {now - (away or now):.0f} s." if told else ""
        )

    def lost(self, now: float) -> None:
        """There is no connection to the master, since now or an earlier moment."""
        if self._away is None:
            self._away = now

    def joined(self, now: float) -> None:
        """The node has joined a round."""
        self._joined = now if self._joined is None else self._joined

    def started(self) -> None:
        """The round's world is there."""
        self._joined = None

    def expired(self, now: float, address: str) -> Outcome | None:
        """What the node leaves with if the master has been away for too long."""
        name, limit = self._limit()
        if self._away is None or now - self._away <= limit:
            return None
        answered = "came back" if self._known else "answered"
        reason = f"No DLRover master {answered} at {address} within {limit:g} s ({name})."
        return Outcome(exit_code=ExitCode.INFRASTRUCTURE, reason=reason)

    def notice(self, now: float, stage: Stage, node: int, address: str) -> str:
        """A line on what the node waits for, now and then; empty if there is nothing to tell."""
        since = self._away if self._away is not None else self._joined
        if since is None or now - since < FIRST_NOTICE or now - self._told_at < NOTICE_INTERVAL:
            return ""
        name, limit = self._limit() if self._away is not None else self._join_limit()
        if now - since > limit:
            return ""  # it ends at the next look
        self._told_at, self._told = now, self._away is not None
        if self._away is None:
            return (
                f"node {node} has joined, and waits for the other nodes: {now - since:.0f} s of "
                f"{limit:g} s ({name}); dlrover status on the master's machine names them"
            )
        waited = f"{now - since:.0f} s of {limit:g} s ({name})"
        if not self._known:
            return f"waiting for the master at {address}: {waited}"
        meanwhile = _MEANWHILE.get(stage, "the node leaves")
        return f"node {node} waits for the master at {address}: {waited}; {meanwhile}"

    def _join_limit(self) -> tuple[str, float]:
        return "join_timeout", self._limits.join_timeout

    def _limit(self) -> tuple[str, float]:
        if self._known:
            return "master_timeout", self._limits.master_timeout
        return "connect_timeout", self._limits.connect_timeout
