"""The original's unified API: what runs in the processes of a role."""

from __future__ import annotations

from typing import Any, NoReturn

from dlrover.errors import ConfigurationError


def _refuse(name: str, instead: str) -> NoReturn:
    raise ConfigurationError(f"{name} does not exist here: use {instead}.")


def current_worker() -> Any:
    """Say what to write instead."""
    _refuse("current_worker", "dlrover.roles.current_worker")


def rpc(name: Any = None, export: bool = False) -> Any:
    """Say what to write instead."""
    _refuse("rpc", "dlrover.roles.rpc")


def export_rpc_method(name: str, func: Any) -> None:
    """Say what to write instead."""
    _refuse("export_rpc_method", "dlrover.roles.rpc")


def export_rpc_instance(ns: str | None, instance: Any) -> None:
    """Say what to write instead."""
    _refuse("export_rpc_instance", "dlrover.roles.rpc on the methods of its class")


def create_rpc_proxy(owner: str, name: str, cls: type) -> Any:
    """Say what to write instead."""
    _refuse("create_rpc_proxy", "dlrover.roles.RoleGroup")


def patch_dataloader_ray() -> None:
    """Say what to write instead."""
    _refuse("patch_dataloader_ray", "dlrover.data.ElasticDataset and its loader")


class RoleGroup:
    """A group that no program can make."""

    def __init__(self, role: str, optional: bool = False) -> None:
        _refuse(type(self).__name__, "dlrover.roles.RoleGroup")


class RoleActor(RoleGroup):
    """A member of a group; the same holds."""


class FutureSequence(RoleGroup):
    """Results of a group; the same holds."""


class DataQueue(RoleGroup):
    """A queue that no program can make."""

    def __init__(self, name: str, size: int = 1000, is_master: bool = False) -> None:
        _refuse("DataQueue", "dlrover.roles.Queue")
