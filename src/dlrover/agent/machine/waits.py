"""A node's waits, their time limits, and the notices about them to the user. Pure."""

from __future__ import annotations

from dlrover.agent.machine.node import Stage
from dlrover.errors import ExitCode
from dlrover.spec.job import Limits
from dlrover.spec.outcome import Outcome

FIRST_NOTICE = 5.0
"""Seconds of a wait before its first notice."""
NOTICE_POLL = 0.5
"""Minimum seconds between two checks for a due notice."""
NOTICE_INTERVAL = 30.0
"""Seconds between two notices."""

_MEANWHILE = {
    Stage.JOINED: "no workers run here until it is back",
    Stage.RUNNING: "the workers train on as far as they can",
    Stage.FAILED: "a worker has failed, and the master decides what follows",
    Stage.SUCCEEDED: "the workers have ended well",
    Stage.STOPPING: "the workers are being stopped",
}


class Waits:
    """A node's waits for its master and for its round. Times are monotonic seconds."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._known = False
        # time since which the master has been away; None while it is connected
        self._away: float | None = now
        # time since which the node has waited for the world of the round that it joined
        self._joined: float | None = None
        self._noticed_at = -NOTICE_INTERVAL
        self._noticed = False

    def answered(self, now: float, address: str) -> str:
        """Note a message of the master; return a notice if this ends a wait with an earlier notice."""
        away, self._away, self._known = self._away, None, True
        noticed, self._noticed = self._noticed, False
        return (
            f"The master answers at {address}, after {now - (away or now):.0f} s."
            if noticed
            else ""
        )

    def lost(self, now: float) -> None:
        """Note that the master is not connected; an earlier start of the wait remains."""
        if self._away is None:
            self._away = now

    def joined(self, now: float) -> None:
        """Note that the node has joined a round; an earlier start of the wait remains."""
        self._joined = now if self._joined is None else self._joined

    def started(self) -> None:
        """Note that the round's world has arrived."""
        self._joined = None

    def expired(self, now: float, address: str) -> Outcome | None:
        """Return the outcome with which the node leaves if the master was away too long, else None."""
        name, limit = self._limit()
        if self._away is None or now - self._away <= limit:
            return None
        answered = "came back" if self._known else "answered"
        reason = f"No DLRover master {answered} at {address} within {limit:g} s ({name})."
        return Outcome(exit_code=ExitCode.INFRASTRUCTURE, reason=reason)

    def quiet(self, now: float) -> float:
        """Return the seconds until a notice may be due, also about a wait that begins meanwhile."""
        since = self._away if self._away is not None else self._joined
        first = (now if since is None else since) + FIRST_NOTICE
        return max(NOTICE_POLL, max(first, self._noticed_at + NOTICE_INTERVAL) - now)

    def notice(self, now: float, stage: Stage, node: int, address: str) -> str:
        """Return a line about the current wait; empty if no notice is due."""
        since = self._away if self._away is not None else self._joined
        if since is None or now - since < FIRST_NOTICE or now - self._noticed_at < NOTICE_INTERVAL:
            return ""
        name, limit = self._limit() if self._away is not None else self._join_limit()
        if now - since > limit:
            return ""  # the next check ends the wait
        self._noticed_at, self._noticed = now, self._away is not None
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
