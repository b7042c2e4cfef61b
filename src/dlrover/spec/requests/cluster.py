"""Messages about a framework's own cluster: processes that serve, and the coordinator that uses them.

A process that serves (a TensorFlow worker or parameter server) is a *task*. It enters the cluster at each start, under its
role and its index in that role. The coordinator reads who is there and reports which tasks it uses; a task that is to leave
serves until it is no longer used.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

MAX_TASKS = 10_000
"""Maximum number of tasks in a cluster."""
MAX_NAME = 200
MAX_NOTE = 4 * 1024 * 1024
"""Maximum bytes of a coordinator's note."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Number = Annotated[int, msgspec.Meta(ge=0)]


class ClusterTask(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One start of a process that serves."""

    role: _Name
    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TASKS)]
    start: _Number
    """Number of the start: a later one replaces an earlier one."""
    address: _Name
    """Host and port."""


class EnterCluster(msgspec.Struct, frozen=True, array_like=True, tag="enter"):
    """The task listens."""

    task: ClusterTask


class LeaveCluster(msgspec.Struct, frozen=True, array_like=True, tag="quit"):
    """The task is to end. It may do so once the reply no longer lists it."""

    task: ClusterTask


class UseCluster(msgspec.Struct, frozen=True, array_like=True, tag="use"):
    """The coordinator uses these tasks, and no others."""

    tasks: Annotated[tuple[ClusterTask, ...], msgspec.Meta(max_length=MAX_TASKS)]
    note: Annotated[bytes, msgspec.Meta(max_length=MAX_NOTE)] = b""
    """What the coordinator tells the others; the master only passes it on."""


class LookCluster(msgspec.Struct, frozen=True, array_like=True, tag="cluster"):
    """Request for the cluster."""


ClusterRequest: TypeAlias = EnterCluster | LeaveCluster | UseCluster | LookCluster


class ClusterReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="tasks"):
    """The answer to each request."""

    tasks: tuple[ClusterTask, ...] = ()
    """Tasks that listen, each with its latest start; also those that have ended, until the next start."""
    leaving: tuple[ClusterTask, ...] = ()
    """Those of them that are to end."""
    wanted: dict[str, int] = {}
    """Number of tasks that the job will have, by role."""
    note: bytes = b""
    """The coordinator's latest note."""
