"""What a worker starts with: environment variables and arguments, exactly as under torchrun, and what DLRover adds."""

from __future__ import annotations

import functools
import hmac
import string
from collections.abc import Mapping

from dlrover import accelerators, config, launched
from dlrover.agent.workers import numa
from dlrover.agent.workers.logs import AttemptLogs
from dlrover.agent.workers.zygote import StartOrder
from dlrover.errors import ConfigurationError
from dlrover.spec.job import LaunchSpec, Std
from dlrover.spec.node import SERVER
from dlrover.spec.world import World
from dlrover.training.worker.bootstrap import Program

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Variable that torchrun's ``--virtual-local-rank`` sets; HIP reads it too."""


class StartOrders:
    """Orders to start the workers of one node."""

    def __init__(self, launch: LaunchSpec, base_env: Mapping[str, str]) -> None:
        self.place = ""
        """Name of this node among those on this machine: its checkpoint saver serves no other node."""
        self.relay = ""
        """Address of the relay for the workers' requests; empty without a relay."""
        self.checkpoints = ""
        """File that lists the directories of the program's checkpoints."""
        self.token = ""
        """The job's token, from which the workers' secret is derived; empty without TLS."""
        self.members = ""
        """Address at which the workers learn who trains; empty outside an agent process."""
        self._launch = launch
        self._base_env = base_env

    def take_place(self, node_rank: int) -> None:
        """Note the node's wanted rank, which a spare gets only when it takes a place."""
        _, of, job_dir = self.place.partition(" of ")
        if of:
            self.place = f"{node_rank}{of}{job_dir}"

    def order(self, number: int, local_rank: int, world: World, logs: AttemptLogs) -> StartOrder:
        """Return the order with this number, for the worker ``local_rank`` of a world."""
        error_file = str(logs.error_file(local_rank))
        launch = self._launch
        env = worker_environment(launch, world, local_rank, self._base_env, error_file)
        return StartOrder(
            spawn=number,
            program=Program(
                entry=launch.entry.value,
                target=launch.target,
                args=worker_arguments(launch, local_rank),
                error_file=error_file,
                slot=local_rank,
                modules_file=str(logs.directory / "modules.json") if local_rank == 0 else "",
                steps_file=config.steps_file(env),
                given=launched.Given(
                    node=self.place,
                    round=world.round,
                    relay=self.relay,
                    save_at_breakpoint=launch.save_at_breakpoint,
                    auto_tuning=launch.auto_tuning,
                    rank=rank_in(world, local_rank),
                    world_size=world.world_size,
                    survive=launch.survive,
                    members=self.members,
                    attempt=world.attempt,
                    embedding=launch.embedding,
                    global_batch=world.global_batch,
                    checkpoints=self.checkpoints,
                ),
            ),
            env=env | secrets(world, self.token),
            stdout=str(logs.stdout(local_rank)),
            stderr=str(logs.stderr(local_rank)),
            cpus=self._cpus(local_rank),
            stdout_overflow=logs.overflow(local_rank, Std.OUT),
            stderr_overflow=logs.overflow(local_rank, Std.ERR),
        )

    def _cpus(self, local_rank: int) -> list[int]:
        if not self._launch.numa_binding:
            return []
        topology, devices = self._topology
        return sorted(numa.plan(self._launch.numa_binding, local_rank, topology, devices))

    @functools.cached_property
    def _topology(self) -> tuple[numa.Topology, tuple[int, ...]]:
        """The machine's topology, and the NUMA node of each local rank's device."""
        topology = numa.read_topology()
        count = self._launch.nproc_per_node
        return topology, numa.device_numa_nodes(accelerators.pci_addresses(), count, topology)


def rank_in(world: World, local_rank: int) -> int:
    """Return the rank of a node's worker; an instance is known by its index."""
    return max(world.index, world.first_rank) + local_rank


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
