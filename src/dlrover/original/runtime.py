"""The original's unified API: what runs in the processes of a role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from dlrover import roles
from dlrover.errors import ConfigurationError
from dlrover.roles.runtime.exporting import Marked, exports
from dlrover.roles.runtime.groups import FutureSequence

__all__ = ["FutureSequence"]


def _refuse(name: str, instead: str) -> NoReturn:
    raise ConfigurationError(f"{name} does not exist here: use {instead}.")


def current_worker() -> Any:
    """Return this process: ``job_info`` and ``actor_info``."""
    worker = roles.current_worker()
    return SimpleNamespace(
        job_info=SimpleNamespace(name=worker.job, job_id=worker.job, user_config=worker.config),
        actor_info=SimpleNamespace(
            name=f"{worker.role}-{worker.index}", role=worker.role, rank=worker.index
        ),
    )


def rpc(name: Any = None, export: bool = False) -> Any:
    """Mark a function that other roles may call; one of a module is exported at once, others with ``export``."""
    known = name if isinstance(name, str) else getattr(name, "__name__", "")

    def mark(function: Any) -> Any:
        marked = roles.rpc(name=known)(function)
        if export:
            exports.add(known or function.__name__, function, Marked(known))
        return marked

    return mark


def export_rpc_method(name: str, func: Any) -> None:
    """Let other roles call a function."""
    exports.add(name, func, Marked(name))


def export_rpc_instance(ns: str | None, instance: Any) -> None:
    """Let other roles call the methods of an object; a name before theirs cannot be given."""
    if ns:
        _refuse(f"export_rpc_instance({ns!r})", "@rpc with the whole name on its methods")
    roles.current_worker().serve(instance)


def create_rpc_proxy(owner: str, name: str, cls: type) -> Any:
    """Say what to write instead."""
    _refuse("create_rpc_proxy", "dlrover.roles.RoleGroup")


def patch_dataloader_ray() -> None:
    """Do nothing: the workers of a loader are processes as anywhere."""


class RoleGroup(roles.RoleGroup):
    """The members of a role.

    Args:
        role: Name of the role.
        optional: True if the role may have no members.
    """

    def __init__(self, role: str, optional: bool = False) -> None:
        super().__init__(str(getattr(role, "value", role)), optional=optional)


class RoleActor:
    """A member of a group that no program can make."""

    def __init__(self, *_: Any) -> None:
        _refuse("RoleActor", "dlrover.roles.RoleGroup")


class DataQueue:
    """A queue of the job; what it returns is acknowledged at once.

    Args:
        name: Name of the queue.
        is_master: Without effect: the queue belongs to the job.
        size: Items that may wait.
    """

    def __init__(self, name: str, is_master: bool = False, size: int = 1000) -> None:
        self._queue = roles.Queue(name, size)

    def put(self, *obj: Any) -> None:
        """Add items."""
        self._queue.put(*obj)

    def get(self, batch_size: int = 1) -> list[Any]:
        """Return items, once there are so many."""
        return self._taken(self._queue.get(batch_size))

    def get_nowait(self, max_size: int = 1) -> list[Any]:
        """Return the items that are there."""
        return self._taken(self._queue.get(max_size, wait=False))

    def _taken(self, items: Any) -> list[Any]:
        if items:
            self._queue.ack(items)
        return list(items)
