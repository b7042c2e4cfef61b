"""Detection of overloaded parameter servers from the cores that they use in the running round."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from dlrover.master.machine.inputs import ServersBusy

HOT = 0.8
"""Median share of its cores in the last samples above which a server is hot."""
WINDOW = 3
"""Number of last samples that count."""
UNEVEN = 1.3
"""Ratio of the busiest server's load to the mean above which servers are unbalanced."""
BUSY = 0.5
"""Cores, or share of a server's cores if that is less, below which the busiest server slows no worker."""
GROWTH = 4.0
"""Maximum cores of a migrated server, as a multiple of its present cores."""


@dataclass
class ServerWatch:
    """Load of the servers of one round."""

    round: int = 0
    used: dict[int, deque[float]] = field(default_factory=dict)
    cores: dict[int, float] = field(default_factory=dict)

    def begin(self, round_: int) -> None:
        """Start over: the world has changed, or an earlier finding was acted upon."""
        self.round = round_
        self.used.clear()
        self.cores.clear()

    def note(self, node: int, used: float, cores: float) -> None:
        """Record a sample of a server while its job trains: the cores that it uses and those that it has."""
        self.used.setdefault(node, deque(maxlen=WINDOW)).append(used)
        self.cores[node] = cores

    def knows(self, servers: int) -> bool:
        """Return whether there are enough samples of each of the ``servers``."""
        known = [used for used in self.used.values() if len(used) == WINDOW]
        return len(known) == servers

    def look(self, servers: int, *, rebalance: bool, migrate: bool = True) -> ServersBusy | None:
        """Return the problem of the ``servers``; None if there is none or if samples are missing.

        Args:
            servers: Number of servers.
            rebalance: True if the program may be asked to redistribute its parameters, which costs no nodes.
            migrate: True if a hot server can get a node with more cores; otherwise the job needs more
                servers.
        """
        if not servers or not self.knows(servers) or not all(self.cores.values()):
            return None
        levels = {node: median(used) for node, used in sorted(self.used.items())}
        busiest = max(levels, key=lambda node: levels[node])
        if levels[busiest] < BUSY * min(1.0, self.cores[busiest]):
            return None
        times_mean = levels[busiest] * servers / sum(levels.values())
        if rebalance and times_mean > UNEVEN:
            reason = f"the server on node {busiest} has {times_mean:.1f} times the mean load of the servers"
            return self._found((times_mean - 1) / 2, reason, rebalance=True)
        hot = {node: level for node, level in levels.items() if level > HOT * self.cores[node]}
        if not hot:
            return None
        most = (GROWTH if migrate else 1.0) * self.cores[busiest]
        wanted = {node: min(most, math.ceil(level / HOT)) for node, level in hot.items()}
        factors = {n: w / self.cores[n] for n, w in wanted.items() if w > self.cores[n]}
        names = ", ".join(
            f"the server on node {node} ({level / self.cores[node]:.0%} of its cores)"
            for node, level in hot.items()
        )
        if len(hot) == servers:
            reason = f"all {servers} servers use more than {HOT:.0%} of their cores"
        elif factors:
            gain = max(times_mean, min(factors.values())) / 2 - 0.5
            return self._found(gain, f"hot: {names}; the others are not", factors)
        else:
            reason = f"hot: {names}; no node has more, so more servers are needed"
        return self._found(1 / (2 * servers), reason, more=True)

    def _found(
        self,
        gain: float,
        reason: str,
        migrate: dict[int, float] | None = None,
        *,
        more: bool = False,
        rebalance: bool = False,
    ) -> ServersBusy:
        return ServersBusy(self.round, migrate or {}, more, rebalance, gain, reason)
