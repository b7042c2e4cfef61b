"""The interface between the master and whatever runs its nodes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from dlrover.errors import ConfigurationError
from dlrover.rpc.messages import ScaleReply
from dlrover.spec.node import FoundNode, LaunchNode, NodeSize


class OnExit(Protocol):
    """Called with a node's id and, in words, how its agent ended."""

    def __call__(
        self, node_id: int, reason: str, /, *, exit_code: int = 0, refused: bool = False
    ) -> None:
        """``exit_code``: the agent's, if it is known; ``refused``: there can be no such node at all."""


OnWait = Callable[[int, str], None]
"""Called with a node's id and, in words, what keeps it from starting; empty: nothing any more."""

PLATFORMS = {
    "kubernetes": "dlrover.kubernetes.platform:KubernetesPlatform",
    "local": "dlrover.platform.local:LocalPlatform",
}
"""Platforms by name, as ``module:class``, so that none is imported before it is asked for."""


class Progress(NamedTuple):
    """How far a job's training is."""

    steps: int
    """Optimizer steps of all rounds, repeated ones included."""
    restarts: int
    goodput: float | None
    """Productive seconds of all seconds, 0 to 1; None before the first step."""
    seconds_left: float | None = None
    """Until the training has made all its steps; None while that is not known."""


class JobSize(NamedTuple):
    """How many nodes of a role a job is to have, and whether it has all its nodes."""

    asked: int
    """What a user last asked for; what the job was submitted with if none has."""
    wanted: int
    """The same, or what a plan has made of it."""
    complete: bool
    """Whether the running world has just the wanted nodes of all roles, and none is still leaving."""
    waits_for: str
    """What the job waits for; empty if for nothing."""
    plans: int
    """How often a plan has changed the number."""
    reason: str
    """Why the number was last changed."""


class PlacedNode(NamedTuple):
    """A node that the platform was asked for, as its job sees it."""

    node_id: int
    node_rank: int
    standing: Literal["idle", "trains", "leaves", "gone"]
    """``idle``: it is being started, waits for a round, or has finished. One that ``leaves`` was called off,
    or trains until another node takes its place."""
    cpu_factor: float
    """How many times the cores that the job asked for it has."""
    memory_factor: float
    """The same of its memory."""
    why: str
    """Why it is gone, and what kept it from starting; empty if nothing says so."""


AskScale = Callable[[int, str, Literal["user", "plan"], str, tuple[float, float]], ScaleReply]
"""Called with a wanted number of nodes, with why, with who says so, with their role, and with how many times the
cores and the memory that the job asked for the new ones are to have; what follows."""

AskMigrate = Callable[[str, float, float, str], str]
"""Called with a node's handle, with how many times the cores and the memory that the job asked for another node is
to have, and with why. The other one takes the place of the first; why that is not possible now, else empty."""


class Setup(NamedTuple):
    """What a master gives its platform. Each class has an async ``create(setup)`` that makes it."""

    job_dir: Path
    port: int
    """Where the master listens."""
    env: Mapping[str, str]
    lifeline_fd: int
    """Closes when the process dies that the master belongs to; -1 for none."""
    on_exit: OnExit
    on_wait: OnWait
    progress: Callable[[], Progress]
    size: Callable[[str], JobSize]
    """Of a role."""
    scale: AskScale
    placed: Callable[[], Mapping[str, PlacedNode]]
    """The nodes that were ever asked for, by handle."""
    migrate: AskMigrate
    node_size: NodeSize = NodeSize()
    """What each node gets, where the platform's nodes share one machine."""


class Platform(Protocol):
    """Makes nodes. All methods are called on the master's event loop and must not block it."""

    def launch(self, node: LaunchNode) -> str:
        """Start a node; the handle by which it is found again, also by another master process.

        Raises:
            InfrastructureError: the node cannot be started.
        """

    def adopt(self, node_id: int, handle: str) -> None:
        """Watch a node that an earlier master process launched. Reports its exit if it is gone."""

    def find(self) -> list[FoundNode]:
        """The job's nodes that run now, whichever master launched them; by node id."""

    def kill(self, handle: str) -> None:
        """End a node. Does nothing if it is gone."""

    async def close(self) -> None:
        """The master leaves: finish what is under way. Nodes go on."""


def scaled_by(platform: Platform | None) -> str:
    """The command that changes the number of nodes, where ``dlrover scale`` must not; else empty."""
    return str(getattr(platform, "scaled_by", ""))


def platform_class(name: str) -> Any:
    """The platform class called ``name``.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in PLATFORMS:
        raise ConfigurationError(
            f"Platform {name} is unknown; known platforms are {', '.join(sorted(PLATFORMS))}."
        )
    module, _, attribute = PLATFORMS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
