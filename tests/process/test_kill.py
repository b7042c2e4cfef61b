"""Whatever one process is killed, at any step: the job ends as if nothing had happened."""

import random

import psutil
import pytest

from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(60)]

STEPS = 30
SHAPES = {"one node": ["--nproc-per-node=2"], "two nodes": ["--local-nodes=2"]}
KINDS = ["worker", "agent", "zygote", "node", "master"]
CASES = [
    pytest.param(seed, KINDS[seed % 5], list(SHAPES)[seed // 5 % 2], id=f"{seed}")
    for seed in range(20)
]


def victims(launch, kind: str, chance: random.Random) -> list[psutil.Process]:
    """One process of a kind; of a node its agent and all under it."""
    if kind != "node":
        return [chance.choice(launch.of_kind(kind))]
    agent = chance.choice(launch.of_kind("agent"))
    agent.suspend()  # so that it starts nothing while we look
    return [agent, *agent.children(recursive=True)]


@pytest.mark.long
@pytest.mark.parametrize(("seed", "kind", "shape"), CASES)
def test_a_kill_changes_nothing(train, undisturbed, seed: int, kind: str, shape: str) -> None:
    chance = random.Random(seed)
    training = train(STEPS, 0.05, *SHAPES[shape])
    launch = training.launch
    training.wait_for_step(chance.randrange(1, STEPS - 5))
    for victim in victims(launch, kind, chance):
        victim.kill()
    launch.succeed(40)
    assert training.losses == undisturbed
    assert len(launch.events_of(events.MasterRecovered)) == (kind == "master")
    assert len(launch.events_of(events.RestartDecided)) == (kind != "master")
    assert len(launch.events_of(events.Recovered)) == (kind != "master")
