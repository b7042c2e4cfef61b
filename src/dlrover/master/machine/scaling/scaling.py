"""Wanted number of nodes of each role, its origin, and the surplus nodes that leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dlrover.master.machine import inputs
from dlrover.master.machine.deadlines import Deadlines
from dlrover.spec.job import JobSpec
from dlrover.spec.node import (
    FIRST_SERVER,
    FIRST_SPARE,
    SERVER,
    WORKER,
    Size,
    index_in_role,
    is_server,
    is_spare,
)

MOST_NODES = 100_000
"""Maximum number of nodes of a role that can be requested."""


@dataclass
class Wanted:
    """Wanted nodes of a role whose number can change."""

    nodes: int
    #: bounds of a plan's choice
    least: int
    most: int
    #: number that a user last requested, or that the job was submitted with
    requested: int = field(init=False)
    #: True if a user has set the number
    by_user: bool = False
    #: reason of the last change
    reason: str = ""
    #: number of changes made by plans
    plans: int = 0
    #: CPU and memory multipliers, relative to the job's request, for nodes that the last change launches
    factors: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        self.requested = self.nodes


@dataclass
class Scaling:
    """Wanted numbers of a job's managed nodes. Change them only through its methods.

    A user's number stays: no plan changes it. Until a user sets one, a plan may choose any number within the
    role's bounds of the submitted job.
    """

    job: JobSpec
    #: wanted nodes by role; with servers only if the job has some
    roles: dict[str, Wanted] = field(init=False)
    #: True while the actual nodes may differ from the wanted ones
    due: bool = False
    #: nodes that drain, and when each is given up if it has not left
    leaving: Deadlines = field(default_factory=Deadlines)
    #: wanted spares, beside the nodes of all roles
    spares: int = field(init=False)

    def __post_init__(self) -> None:
        job, others = self.job, self.job.other_nodes
        self.spares = job.spares
        self.roles = {
            WORKER: Wanted(
                job.managed_nodes - others, job.min_nodes - others, job.max_nodes - others
            )
        }
        if job.servers:
            self.roles[SERVER] = Wanted(job.servers, job.min_servers, job.max_servers)

    # ---- queries

    @property
    def wanted(self) -> int:
        """Wanted managed nodes that are not servers; 0 if the job's nodes come by themselves."""
        return self.workers + self.job.other_nodes

    @property
    def workers(self) -> int:
        """Wanted nodes of role worker."""
        return self.roles[WORKER].nodes

    @property
    def servers(self) -> int:
        """Wanted servers."""
        return self.roles[SERVER].nodes if SERVER in self.roles else 0

    @property
    def size(self) -> Size:
        """All wanted nodes."""
        return Size(self.wanted, self.servers)

    @property
    def world(self) -> Size:
        """Wanted nodes of the world."""
        workers = 1 if self.job.chief else self.wanted
        return Size(workers, self.servers if self.job.world_servers[1] else 0)

    @property
    def least(self) -> Size:
        """Minimum size of a world."""
        job, wanted = self.job, self.wanted
        fewest = job.world_nodes[0]
        workers = min(fewest, wanted) if wanted else fewest
        return Size(workers, min(job.world_servers[0], self.servers))

    @property
    def most(self) -> Size:
        """Maximum size of a world."""
        servers = max(self.job.max_servers, self.servers) if self.job.world_servers[1] else 0
        workers = 1 if self.job.chief else max(self.job.max_nodes, self.wanted)
        return Size(workers, servers)

    @property
    def ranks(self) -> Iterator[int]:
        """Wanted rank of each wanted node."""
        yield from range(self.wanted)
        yield from range(FIRST_SPARE, FIRST_SPARE + self.spares)
        yield from range(FIRST_SERVER, FIRST_SERVER + self.servers)

    def of_role(self, role: str) -> int:
        """Return the wanted number of nodes of a role; for a role that cannot be scaled, 1."""
        return self.roles[role].nodes if role in self.roles else 1

    def wants(self, node_rank: int) -> bool:
        """Return whether the job wants a node with this wanted rank."""
        if is_spare(node_rank):
            most = self.spares
        else:
            most = self.servers if is_server(node_rank) else self.wanted
        return index_in_role(node_rank) < most

    def factors(self, node_rank: int) -> tuple[float, float]:
        """Return the CPU and memory multipliers, relative to the job's request, for a new node."""
        of_role = self.roles.get(self.job.place(node_rank)[0])
        return of_role.factors if of_role is not None else (1.0, 1.0)

    def role_name(self, role: str) -> str:
        """Return the role for events; empty if all of the job's nodes have it."""
        return role if self.job.other_nodes or self.job.servers else ""

    def refusal(self, request: inputs.ScaleRequested) -> str:
        """Return why the job cannot have that many nodes, as one sentence; empty if it can."""
        unit = self.job.node_unit
        if not self.job.managed_nodes:
            return (
                "The job's nodes come by themselves: start or stop dlrover-run on a machine to change "
                "their number."
            )
        if request.role not in self.roles:
            return self._fixed(request.role)
        if not 1 <= request.nodes <= MOST_NODES:
            return (
                f"{request.nodes} nodes: must be from 1 to {MOST_NODES}; `dlrover stop` ends a job."
            )
        if request.role == WORKER and (request.nodes + self.job.other_nodes) % unit:
            return f"{request.nodes} nodes: must be a multiple of --node-unit, {unit}."
        of_role = self.roles[request.role]
        if request.source == "plan" and of_role.by_user:
            kind = "nodes" if request.role == WORKER else "servers"
            return f"A user has set the number of {kind} to {of_role.nodes}; a plan does not change it."
        return ""

    def _fixed(self, role: str) -> str:
        if role == SERVER:
            return f"The job was started without nodes of role {SERVER}; it cannot get any while it runs."
        known = " and ".join(self.roles)
        return (
            f"Role {role} keeps its number of nodes while the job runs; only {known} can be scaled."
        )

    # ---- changes

    def take(self, request: inputs.ScaleRequested) -> tuple[int, int]:
        """Set the wanted number as far as possible; return the role's number before and after."""
        if self.refusal(request):
            same = self.roles[request.role].nodes if request.role in self.roles else 0
            return same, same
        of_role, nodes = self.roles[request.role], request.nodes
        before = of_role.nodes
        if request.source == "plan":
            nodes = max(of_role.least, min(nodes, of_role.most))
        else:
            of_role.by_user, of_role.requested = True, nodes
        of_role.factors = request.factors
        if nodes != before:
            self.due, of_role.nodes, of_role.reason = True, nodes, request.reason
            of_role.plans += request.source == "plan"
        return before, nodes

    def keep(self, found: Iterable[int]) -> None:
        """Raise the wanted numbers to include nodes found by a master without a journal."""
        for node_rank in found:
            beyond = index_in_role(node_rank) + 1
            if is_spare(node_rank):
                continue
            if is_server(node_rank) and SERVER in self.roles:
                self.roles[SERVER].nodes = max(self.servers, beyond)
            elif self.wanted and not is_server(node_rank):
                self.roles[WORKER].nodes = max(self.workers, beyond - self.job.other_nodes)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        assert bool(self.wanted) == bool(self.job.managed_nodes), (
            "who launches the nodes has changed"
        )
        assert bool(self.servers) == bool(self.job.servers), "the servers are gone, or new"
        assert not self.spares or self.wanted, "spares of nodes that come by themselves"
        assert self.workers >= 0, "nodes of other roles are not wanted"
        changed = self.due or self.leaving or any(of.by_user for of in self.roles.values())
        assert self.wanted or not changed
        least, most = self.least, self.most
        assert least.workers <= most.workers
        assert least.servers <= most.servers
