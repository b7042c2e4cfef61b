"""The workers' environment, piece by piece; `tests/process` compares the whole with torchrun's."""

from pathlib import Path

import msgspec
import pytest

from dlrover import config
from dlrover.agent.workers.environment import (
    StartOrders,
    secrets,
    worker_arguments,
    worker_environment,
)
from dlrover.agent.workers.logs import AttemptLogs
from dlrover.errors import ConfigurationError
from dlrover.spec.job import Entry, LaunchSpec
from dlrover.spec.world import World

WORLD = World(
    round=3, restart_count=1, node_rank=1, node_count=2, first_rank=4, world_size=6,
    store_addr="10.0.0.1", store_port=5000,
)  # fmt: skip


def launch(**changes: object) -> LaunchSpec:
    return LaunchSpec(entry=Entry.SCRIPT, target="train.py", nproc_per_node=2, **changes)


def test_ranks_are_dealt_in_blocks():
    env = worker_environment(launch(), WORLD, 1, {"A": "b"}, "/e.json")
    assert env["A"] == "b"
    assert (env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"]) == ("5", "1", "1")
    assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_WORLD_SIZE"]) == ("6", "2", "2")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "5000")
    assert env["TORCHELASTIC_RESTART_COUNT"] == "1"


@pytest.mark.parametrize(("visible", "device"), [(None, "1"), ("5,7", "7"), ("a, b", "b")])
def test_virtual_local_rank(visible, device: str):
    base = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    env = worker_environment(launch(virtual_local_rank=True), WORLD, 1, base, "")
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", device)


def test_virtual_local_rank_without_a_device():
    base = {"CUDA_VISIBLE_DEVICES": "3"}
    with pytest.raises(ConfigurationError, match="local rank 1 has no device"):
        worker_environment(launch(virtual_local_rank=True), WORLD, 1, base, "")


@pytest.mark.parametrize(
    ("first_rank", "role", "role_rank", "role_size"),
    [(2, "worker", "3", "4"), (4, "ps", "1", "2")],
)
def test_servers_and_workers_are_told_apart_by_torchruns_variables(
    first_rank: int, role: str, role_rank: str, role_size: str
):
    world = msgspec.structs.replace(WORLD, first_rank=first_rank, servers=2)
    env = worker_environment(launch(role="trainer"), world, 1, {}, "")
    assert (env["RANK"], env["WORLD_SIZE"]) == (str(first_rank + 1), "6")
    assert (env["ROLE_NAME"], env["ROLE_RANK"], env["ROLE_WORLD_SIZE"]) == (
        role,
        role_rank,
        role_size,
    )


def test_the_role_is_as_it_was_given_in_a_job_without_servers():
    env = worker_environment(launch(role="trainer"), WORLD, 1, {}, "")
    assert (env["ROLE_NAME"], env["ROLE_RANK"], env["ROLE_WORLD_SIZE"]) == ("trainer", "5", "6")


def test_the_local_rank_in_arguments():
    spec = launch(args=("--gpu", "${local_rank}", "$other", "$$"))
    assert worker_arguments(spec, 1) == ["--gpu", "1", "$other", "$"]


def test_all_nodes_of_a_world_with_tls_have_a_secret_which_no_other_world_has():
    world = msgspec.structs.replace(WORLD, salt="a")
    other_node = msgspec.structs.replace(world, node_rank=0, first_rank=0)
    assert secrets(world, "token") == secrets(other_node, "token")
    others = [
        (msgspec.structs.replace(world, salt="b"), "token"),
        (msgspec.structs.replace(world, round=4), "token"),
        (world, "another"),
    ]
    found = {secrets(*each)[config.REPLICA_SECRET] for each in [(world, "token"), *others]}
    assert len(found) == 4
    assert secrets(world, "") == {}


def test_the_worker_of_rank_0_alone_has_the_file_of_steps(tmp_path: Path) -> None:
    orders = StartOrders(launch(), {"DLROVER_STEPS_FILE": "steps.jsonl"})
    world = msgspec.structs.replace(WORLD, first_rank=0, node_rank=0)
    logs = AttemptLogs(launch(), tmp_path, {0: 0, 1: 1})
    files = [orders.order(1, rank, world, logs).program.steps_file for rank in (0, 1)]
    logs.stop()
    assert files == ["steps.jsonl", ""]
