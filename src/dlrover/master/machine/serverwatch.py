"""Which parameter servers have too much to do, by the cores that they keep busy in the running round."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dlrover.planning.balance import UNEVEN, WINDOW, ServerLoad, advise_servers

BUSY = 0.5
"""Cores, or share of a server's cores if that is less, below which the busiest server holds nobody up."""
GROWTH = 4.0
"""How many times its present cores a server may be moved to, at most."""


@dataclass(frozen=True)
class ServerFinding:
    """What is wrong with the servers, and what can be done: one of three things."""

    migrate: Mapping[int, float]
    """How many times its cores each hot server needs, by node."""
    more: bool
    """The job needs more servers."""
    rebalance: bool
    """The program is to divide its parameters anew."""
    gain: float
    """The share of its speed that the job is expected to win."""
    reason: str


@dataclass
class ServerWatch:
    """The servers of one round."""

    used: dict[int, deque[float]] = field(default_factory=dict)
    cores: dict[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Another world, or something was done about what was found."""
        self.used.clear()
        self.cores.clear()

    def note(self, node: int, used: float, cores: float) -> None:
        """Take in a look at a server whose job trains: the cores that it uses, and those that it has."""
        self.used.setdefault(node, deque(maxlen=WINDOW)).append(used)
        self.cores[node] = cores

    def knows(self, servers: int) -> bool:
        """Whether there are enough looks at each of the ``servers``."""
        known = [used for used in self.used.values() if len(used) == WINDOW]
        return len(known) == servers

    def look(self, servers: int, *, rebalance: bool, migrate: bool = True) -> ServerFinding | None:
        """What is wrong; None if nothing is, or some of the ``servers`` are not known well enough.

        Args:
            servers: How many there are.
            rebalance: Whether the program may be asked to divide its parameters anew: that costs no nodes.
            migrate: Whether a node with more cores can be had for a hot server; else the job needs more servers.
        """
        if not servers or not self.knows(servers) or not all(self.cores.values()):
            return None
        loads = {
            node: ServerLoad(f"the server on node {node}", self.cores[node], list(used))
            for node, used in sorted(self.used.items())
        }
        busiest = max(loads.values(), key=lambda load: load.level)
        if busiest.level < BUSY * min(1.0, busiest.cpu):
            return None
        times_mean = busiest.level * servers / sum(load.level for load in loads.values())
        if rebalance and times_mean > UNEVEN:
            reason = f"{busiest.name} has {times_mean:.1f} times the mean load of the servers"
            return ServerFinding(
                {}, more=False, rebalance=True, gain=(times_mean - 1) / 2, reason=reason
            )
        advice = advise_servers(list(loads.values()), (GROWTH if migrate else 1.0) * busiest.cpu)
        if advice.more:
            return ServerFinding(
                {}, more=True, rebalance=False, gain=1 / (2 * servers), reason=advice.reason
            )
        nodes = {load.name: node for node, load in loads.items()}
        factors = {
            nodes[name]: cores / self.cores[nodes[name]] for name, cores in advice.migrate.items()
        }
        if not factors:
            return None
        gain = max(times_mean, min(factors.values())) / 2 - 0.5
        return ServerFinding(factors, more=False, rebalance=False, gain=gain, reason=advice.reason)
