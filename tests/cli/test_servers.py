"""``--servers``."""

import pytest

from dlrover.cli.run.arguments import parse
from dlrover.errors import ConfigurationError


def options(*argv: str):
    return parse([*argv, __file__], {})


@pytest.mark.parametrize(
    ("text", "bounds"), [("", (0, 0)), ("3", (3, 3)), ("1:3", (1, 3)), ("2:2", (2, 2))]
)
def test_numbers_of_servers(text: str, bounds: tuple[int, int]) -> None:
    made = options("--local-nodes=2", *([f"--servers={text}"] if text else []))
    assert (made.job.min_servers, made.job.max_servers) == bounds


def test_the_roles_of_a_job_with_servers_are_worker_and_ps() -> None:
    made = options("--local-nodes=2", "--servers=1", "--role=trainer")
    assert made.launch.role == "worker"
    assert made.notices == (
        "--role trainer has no effect with --servers: the roles are worker and ps.",
    )
    assert options("--local-nodes=2", "--servers=1").notices == ()
    assert options("--local-nodes=2", "--role=trainer").launch.role == "trainer"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("two", "--servers two: must be a whole number of servers, or two as MIN:MAX."),
        ("1:2:3", "--servers 1:2:3: must be a whole number of servers, or two as MIN:MAX."),
        ("0", "--servers 0: must be 1 or more; leave it out for no servers."),
        ("0:2", "--servers 0:2: must be 1 or more; leave it out for no servers."),
        ("3:2", "--servers 3:2: the minimum, 3, is greater than the maximum, 2."),
    ],
)
def test_refused_numbers(text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        options("--local-nodes=2", "--servers", text)
    assert str(caught.value) == sentence


def test_servers_need_somebody_to_start_them() -> None:
    with pytest.raises(ConfigurationError) as caught:
        options("--nnodes=2", "--servers=2")
    assert str(caught.value) == (
        "--servers 2: DLRover must be able to start nodes; give --local-nodes N, the number of workers' "
        "nodes on this machine, or name the servers in spec.replicaSpecs.ps of an ElasticJob on Kubernetes."
    )


def test_a_node_of_a_job_elsewhere_need_not_know_the_servers() -> None:
    there = {"DLROVER_MASTER_ADDR": "master:1"}
    made = parse(["--server-failover=instance", __file__], there)
    assert made.job.server_failover == "instance"


def test_a_chief_is_one_more_node_and_the_rest_are_instances() -> None:
    made = options("--chief", "--local-nodes=2", "--servers=3", "--evaluators=1")
    job = made.job
    assert (made.local_nodes, job.min_nodes, job.max_nodes, job.other_nodes) == (4, 4, 4, 2)
    assert (job.chief, job.server_failover, made.launch.role) == (True, "instance", "chief")
    assert not options("--local-nodes=2").job.chief


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--evaluators=1"], "--evaluators 1: evaluators run beside a chief; give --chief too."),
        (["--chief", "--evaluators=-1"], "--evaluators -1: must be 0 or a positive number."),
        (
            ["--chief", "--node-unit=2"],
            "--chief: the chief alone is the world, so --nnodes, --node-unit and --auto-scale do not apply.",
        ),
        (
            ["--chief", "--nproc-per-node=2"],
            "--nproc-per-node 2: with --chief, each node has 1 process.",
        ),
    ],
)
def test_refused_options_of_a_chief(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        options("--local-nodes=2", *argv)
    assert str(caught.value) == sentence


def test_a_chief_needs_somebody_to_start_the_others() -> None:
    with pytest.raises(ConfigurationError, match="--chief: DLRover must be able to start nodes"):
        options("--chief")
