"""The interface between the master and whatever runs its nodes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from dlrover.errors import ConfigurationError
from dlrover.rpc.messages import ScaleReply
from dlrover.spec.node import FoundNode, LaunchNode, NodeLimits


class OnExit(Protocol):
    """Callback for a node's end, with the node's id and the reason in words."""

    def __call__(
        self,
        node_id: int,
        reason: str,
        /,
        *,
        exit_code: int = 0,
        refused: bool = False,
        removed: bool = False,
    ) -> None:
        """Report the end.

        ``exit_code``: the agent's, if known; ``refused``: the node can never start; ``removed``: something else ended
        the node, such as a preemption.
        """


OnWait = Callable[[int, str], None]
"""Callback with a node's id and, in words, what keeps the node from starting; empty once nothing does."""

PLATFORMS = {
    "kubernetes": "dlrover.kubernetes.platform.platform:KubernetesPlatform",
    "local": "dlrover.platform.local:LocalPlatform",
    "ray": "dlrover.ray.platform:RayPlatform",
}
"""Platforms by name, as ``module:class``; each module is imported on first use."""


class Progress(NamedTuple):
    """The progress of a job's training."""

    steps: int
    """Optimizer steps of all rounds, including repeated ones."""
    restarts: int
    goodput: float | None
    """Productive seconds / all seconds, 0 to 1; None before the first step."""
    seconds_left: float | None = None
    """Seconds until the training completes all its steps; None while unknown."""


class RoleSize(NamedTuple):
    """The size of one role: the wanted number of nodes and whether the job has all its nodes."""

    requested: int
    """The number that a user last requested; initially the number from the job's submission."""
    wanted: int
    """The number that the job wants now: ``requested``, or what a plan has changed it to."""
    complete: bool
    """True if the running world has exactly the wanted nodes of all roles and no node is still leaving."""
    waits_for: str
    """What the job waits for; empty if nothing."""
    plans: int
    """Number of times that a plan has changed ``wanted``."""
    reason: str
    """Reason for the last change."""


class PlacedNode(NamedTuple):
    """A node requested from the platform, as its job sees it."""

    node_id: int
    node_rank: int
    standing: Literal["idle", "trains", "leaves", "gone"]
    """``idle``: the node is starting, waits for a round, or has finished. ``leaves``: the node was called
    off, or trains only until another node takes its place."""
    cpu_factor: float
    """CPU multiplier, relative to the job's request."""
    memory_factor: float
    """Memory multiplier, relative to the job's request."""
    why: str
    """Why the node is gone or what kept it from starting; empty if unknown."""


AskScale = Callable[[int, str, Literal["user", "plan"], str, tuple[float, float]], ScaleReply]
"""Callback that requests a number of nodes. Arguments: the number, the reason, the requester, the role, and
the CPU and memory multipliers for new nodes, relative to the job's request. Returns the outcome."""

AskMigrate = Callable[[str, float, float, str], str]
"""Callback that requests a replacement for a node. Arguments: the node's handle, the replacement's CPU and
memory multipliers relative to the job's request, and the reason. Returns why that is impossible now; empty
if accepted."""


class PlatformJob(Protocol):
    """A master's job, as its platform sees it."""

    @property
    def on_node_exit(self) -> OnExit:
        """Reports a node's end."""

    @property
    def on_node_wait(self) -> OnWait:
        """Reports what keeps a node from starting."""

    @property
    def ask_scale(self) -> AskScale:
        """Requests a number of nodes."""

    @property
    def ask_migrate(self) -> AskMigrate:
        """Requests a replacement for a node."""

    def progress(self) -> Progress:
        """Return the progress of the training."""

    def size(self, role: str) -> RoleSize:
        """Return the size of a role."""

    def placed(self) -> Mapping[str, PlacedNode]:
        """Return every node requested so far, by handle."""


class Setup(NamedTuple):
    """What a master passes to its platform: the argument of each platform class's async ``create``."""

    job_dir: Path
    port: int
    """The port that the master listens on."""
    env: Mapping[str, str]
    lifeline_fd: int
    """File descriptor that closes when the process that owns the master dies; -1 for none."""
    job: PlatformJob
    node_size: NodeLimits = NodeLimits()
    """The size of each node, on a platform whose nodes share one machine."""


class Platform(Protocol):
    """Creates nodes. The master calls all methods on its event loop; they must not block."""

    def launch(self, node: LaunchNode) -> str:
        """Start a node and return its handle, which identifies it to later master processes as well.

        Raises:
            InfrastructureError: the node cannot be started.
        """

    def adopt(self, node_id: int, handle: str) -> None:
        """Watch a node that an earlier master process launched; report its exit if it is gone."""

    def find(self) -> list[FoundNode]:
        """Return the job's running nodes, by node id, whichever master launched them."""

    def kill(self, handle: str) -> None:
        """End a node; do nothing if it is gone."""

    async def close(self) -> None:
        """Finish the operations in progress as the master exits; nodes keep running."""


def scaled_by(platform: Platform | None) -> str:
    """Return the command that scales the job if ``dlrover scale`` must not be used; else an empty string."""
    return str(getattr(platform, "scaled_by", ""))


def platform_class(name: str) -> Any:
    """Return the platform class called ``name``.

    Raises:
        ConfigurationError: no platform has that name.
    """
    if name not in PLATFORMS:
        raise ConfigurationError(
            f"Platform {name} is unknown; known platforms are {', '.join(sorted(PLATFORMS))}."
        )
    module, _, attribute = PLATFORMS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
