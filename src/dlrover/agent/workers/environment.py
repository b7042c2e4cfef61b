"""The workers' environment variables and arguments, exactly as under torchrun."""

from __future__ import annotations

import hmac
import string
from collections.abc import Mapping

from dlrover import config
from dlrover.errors import ConfigurationError
from dlrover.spec.job import LaunchSpec
from dlrover.spec.node import SERVER
from dlrover.spec.world import World

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Variable that torchrun's ``--virtual-local-rank`` sets; HIP reads it too."""


def worker_environment(
    launch: LaunchSpec, world: World, local_rank: int, base: Mapping[str, str], error_file: str
) -> dict[str, str]:
    """Return the environment of the worker ``local_rank``; ``base`` is the launcher's environment.

    The worker of rank 0 owns the store, so that each round has a new one:
    ``TORCHELASTIC_USE_AGENT_STORE`` is ``False``.
    """
    rank = str(world.first_rank + local_rank)
    world_size = str(world.world_size)
    role, role_rank, role_size = _place_in_role(launch, world, local_rank)
    environment = {
        **base,
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(world.node_rank),
        "ROLE_RANK": str(role_rank),
        "ROLE_NAME": role,
        "LOCAL_WORLD_SIZE": str(launch.nproc_per_node),
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(world.node_count),
        "ROLE_WORLD_SIZE": str(role_size),
        "MASTER_ADDR": world.store_addr,
        "MASTER_PORT": str(world.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(world.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts),
        "TORCHELASTIC_RUN_ID": launch.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": launch.signals_to_handle,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if launch.virtual_local_rank:
        environment["LOCAL_RANK"] = "0"
        environment[VISIBLE_DEVICES] = _device_of(local_rank, base.get(VISIBLE_DEVICES))
    return environment


def secrets(world: World, token: str) -> dict[str, str]:
    """Return the variable with the savers' shared secret of a world, made of ``token``; none without TLS.

    It is in the environment because a program may itself start the processes that train.
    """
    if not token:
        return {}
    secret = hmac.new(token.encode(), f"{world.salt} {world.round}".encode(), "sha256").hexdigest()
    return {config.REPLICA_SECRET: secret}


def _place_in_role(launch: LaunchSpec, world: World, local_rank: int) -> tuple[str, int, int]:
    """Return a worker's role, its rank in that role, and the number of the world's processes in that role."""
    if world.index >= 0:
        return world.instance_role, world.index, world.instances
    rank = world.first_rank + local_rank
    if not world.role:
        return launch.role, rank, world.world_size
    if world.role == SERVER:
        return SERVER, rank - world.workers, world.servers
    return world.role, rank, world.workers


def worker_arguments(launch: LaunchSpec, local_rank: int) -> list[str]:
    """Return the program's arguments with ``${local_rank}`` replaced as by torchrun."""
    return [string.Template(arg).safe_substitute(local_rank=local_rank) for arg in launch.args]


def _device_of(local_rank: int, visible: str | None) -> str:
    if visible is None:
        return str(local_rank)
    devices = [device.strip() for device in visible.split(",")]
    if local_rank >= len(devices):
        raise ConfigurationError(
            f"--virtual-local-rank: local rank {local_rank} has no device; {VISIBLE_DEVICES} is {visible}."
        )
    return devices[local_rank]
