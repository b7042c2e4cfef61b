"""Detection of overloaded parameter servers from the cores that they use in the running round."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dlrover.master.machine.inputs import ServersBusy
from dlrover.planning.balance import UNEVEN, WINDOW, ServerLoad, advise_servers

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
            return ServersBusy(
                self.round, {}, more=False, rebalance=True, gain=(times_mean - 1) / 2, reason=reason
            )
        advice = advise_servers(list(loads.values()), (GROWTH if migrate else 1.0) * busiest.cpu)
        if advice.more:
            return ServersBusy(
                self.round,
                {},
                more=True,
                rebalance=False,
                gain=1 / (2 * servers),
                reason=advice.reason,
            )
        nodes = {load.name: node for node, load in loads.items()}
        factors = {
            nodes[name]: cores / self.cores[nodes[name]] for name, cores in advice.migrate.items()
        }
        if not factors:
            return None
        gain = max(times_mean, min(factors.values())) / 2 - 0.5
        return ServersBusy(
            self.round, factors, more=False, rebalance=False, gain=gain, reason=advice.reason
        )
