"""Spares with real processes: they wait warm, take a lost node's place at once, and are replaced."""

from __future__ import annotations

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 30


def bodies(launch, kind: type) -> list[events.EventBody]:
    return [event.body for event in launch.events_of(kind)]


def zygotes_of(launch, node: int) -> list:
    """The zygotes of a node's agent that load modules."""
    (agent,) = (p for p in launch.of_kind("agent") if _argument(p, "--node-id") == str(node))
    return [child for child in agent.children() if ".json" in " ".join(child.cmdline())]


def _argument(process, name: str) -> str:
    words = process.cmdline()
    return words[words.index(name) + 1]


@pytest.mark.torch
def test_a_spare_takes_the_place_of_a_lost_node(run, train, undisturbed) -> None:
    """It is warm although no cache knows the program, shows in the status, and is replaced in the background."""
    cache = {"DLROVER_CACHE_DIR": str(run.directory / "no cache yet")}
    options = ("--local-nodes=2", "--spares=1")
    training = train(STEPS, 0.2, *options, env=cache)
    launch = training.launch
    launch.until(lambda: bodies(launch, events.SpareReady) == [events.SpareReady(2)], 60.0)
    training.wait_for_step(2, 120.0)
    (warm,) = launch.until(lambda: zygotes_of(launch, 2), 60.0, "a warm zygote of the spare")
    shown = {node["id"]: node for node in run.status(launch)["status"]["nodes"]}
    assert (shown[2]["status"], shown[2]["node_rank"], shown[2]["role"]) == ("spare", -1, "spare")
    assert shown[0]["status"] == "running"
    (agent,) = (p for p in launch.of_kind("agent") if _argument(p, "--node-id") == "1")
    agent.kill()
    launch.succeed(150.0)
    assert training.losses == undisturbed
    assert bodies(launch, events.SpareTakesPlace) == [events.SpareTakesPlace(2, 1)]
    assert "Spare node 2 takes the place of node 1." in [e.sentence() for e in launch.events]
    launched = [(e.node, e.replaces, e.role) for e in bodies(launch, events.NodeLaunched)]
    assert launched == [(0, -1, ""), (1, -1, ""), (2, -1, "spare"), (3, -1, "spare")]
    (decided,) = bodies(launch, events.RestartDecided)
    assert len(bodies(launch, events.RoundCompleted)) == 2
    assert decided.node == 1
    assert warm.pid in {start["parent"] for start in training.starts[2:]}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            ["--local-nodes=2", "--spares=-1"],
            "--spares -1: must be auto or a whole number, 0 or more.",
        ),
        (
            ["--local-nodes=2", "--spares=some"],
            "--spares some: must be auto or a whole number, 0 or more.",
        ),
        (
            ["--local-nodes=2", "--spares=3"],
            "--spares 3: must be at most the number of nodes, 2; more could not be used.",
        ),
        (
            ["--standalone", "--spares=1"],
            "--spares 1: the job runs on one node; give --local-nodes N for several on this machine.",
        ),
        (
            ["--local-nodes=2", "--chief", "--spares=1"],
            "--spares 1: with --chief, each node is a world by itself and none waits for another.",
        ),
    ],
)
def test_bad_input(run, options: list[str], problem: str) -> None:
    launch = run(*options, run.scripts / "hello.py")
    _, stderr = launch.end_with(ExitCode.USAGE)
    assert stderr.strip() == f"dlrover-run: {problem}"
