"""Allowed sizes of an auto-scaled job: its bounds, narrowed by failed trials and by a user's settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.spec.job import JobSpec
from dlrover.spec.node import SERVER, WORKER, Size


@dataclass
class Sizes:
    """Numbers of nodes by role. Change it only through its methods."""

    job: JobSpec
    #: smallest size; a smaller one is out of bounds, not measurable, or made the program fail
    least: Size = field(init=False)
    #: largest size; a larger one is out of bounds, not available, not measurable, or made the program fail
    most: Size = field(init=False)
    #: numbers set by a user, by role
    fixed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open_all()

    def workers(self) -> list[int]:
        """Return the allowed numbers of worker nodes; of all nodes in a job without servers."""
        if WORKER in self.fixed:
            return [self.fixed[WORKER]]
        unit = self.job.node_unit
        return [n for n in range(self.least.workers, self.most.workers + 1) if n % unit == 0]

    def servers(self) -> list[int]:
        """Return the allowed numbers of servers; only 0 in a job without them."""
        if SERVER in self.fixed:
            return [self.fixed[SERVER]]
        return list(range(self.least.servers, self.most.servers + 1))

    @property
    def open(self) -> bool:
        """True if there is more than one size to choose from."""
        job = self.job
        workers = WORKER not in self.fixed and job.min_nodes < job.max_nodes
        least, most = job.world_servers
        return workers or (SERVER not in self.fixed and least < most)

    def fix(self, role: str, nodes: int) -> None:
        """Fix the number of nodes of a role, as a user has set it."""
        self.fixed[role] = nodes

    def missed(self, wanted: Size, had: Size) -> None:
        """Exclude a size that could not be measured; ``had`` is the size before the change.

        All sizes beyond it in the direction of the change are excluded, too.
        """
        unit = self.job.node_unit
        (least, least_servers), (most, most_servers) = self.least, self.most
        if wanted.workers > had.workers:
            most = max(had.workers, wanted.workers - unit)
        elif wanted.workers < had.workers:
            least = min(had.workers, wanted.workers + unit)
        if wanted.servers > had.servers:
            most_servers = max(had.servers, wanted.servers - 1)
        elif wanted.servers < had.servers:
            least_servers = min(had.servers, wanted.servers + 1)
        self.least = Size(min(least, most), min(least_servers, most_servers))
        self.most = Size(most, most_servers)

    def open_all(self) -> None:
        """Allow sizes again that were not available or could not be measured."""
        least, most = self.job.world_servers
        self.least, self.most = Size(self.job.min_nodes, least), Size(self.job.max_nodes, most)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        job = self.job
        assert job.min_nodes <= self.least.workers <= self.most.workers <= job.max_nodes
        least, most = job.world_servers
        assert least <= self.least.servers <= self.most.servers <= most
