"""Where the time of a role's instances went."""

from __future__ import annotations

import msgspec


class Use(msgspec.Struct, frozen=True):
    """Seconds of all instances of a role, by what they did."""

    starting: float = 0.0
    working: float = 0.0
    """Also the seconds in phases that the program names."""
    idle: float = 0.0
    away: float = 0.0
    """From the end of an instance's process to the start of its next one."""

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.starting + self.working + self.idle + self.away

    def plus(self, other: Use) -> Use:
        """Return the sum."""
        return Use(
            self.starting + other.starting,
            self.working + other.working,
            self.idle + other.idle,
            self.away + other.away,
        )


def of_life(seconds: float, worked: float, idle: float) -> Use:
    """Return the use of a life that lasted ``seconds``; it started in those that were neither work nor idle."""
    working = min(worked, seconds)
    idle = min(idle, seconds - working)
    return Use(seconds - working - idle, working, idle)
