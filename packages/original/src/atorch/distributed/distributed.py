"""The process group, as in ATorch; groups of a hybrid strategy are made by `auto_accelerate`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from dlrover import config
from dlrover.errors import ConfigurationError

INSTEAD = (
    "the method parallel_mode of auto_accelerate, or torch.distributed.device_mesh.init_device_mesh"
)
GROUPS = {"create_parallel_group", "parallel_group", "parallel_group_size", "parallel_rank"}


def init_distributed(
    backend: str = "nccl",
    *,
    set_cuda_device_using_local_rank: bool = False,
    timeout: timedelta | None = None,
    **_: Any,
) -> bool:
    """Set the process group up as the launcher's variables say, unless it is; return True."""
    if set_cuda_device_using_local_rank and torch.cuda.is_available():
        torch.cuda.set_device(_local_rank())
    if not distributed.is_initialized():
        distributed.init_process_group(backend, timeout=timeout)
    return True


def reset_distributed() -> None:
    """Destroy the process group, if there is one."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def rank() -> int | None:
    """Return this process's rank; None without a process group."""
    return distributed.get_rank() if distributed.is_initialized() else None


def local_rank() -> int | None:
    """Return this process's rank on its node; None without a process group."""
    return _local_rank() if distributed.is_initialized() else None


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _local_rank() -> int:
    return int(config.environ().get("LOCAL_RANK", "0"))


def __getattr__(name: str) -> Any:
    if name not in GROUPS:
        raise AttributeError(f"module 'atorch.distributed.distributed' has no attribute {name!r}")

    def refused(*_: Any, **__: Any) -> Any:
        raise ConfigurationError(f"atorch's {name} does not exist here: use {INSTEAD}.")

    return refused
