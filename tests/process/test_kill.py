"""Whatever one process is killed, at any step: the job ends as if nothing had happened."""

import random

import pytest

from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(120)]

STEPS = 30
SHAPES = {"one node": ["--nproc-per-node=2"], "two nodes": ["--local-nodes=2"]}
KINDS = ["worker", "agent", "zygote", "node", "master"]
CASES = [
    pytest.param(seed, KINDS[seed % 5], list(SHAPES)[seed // 5 % 2], id=f"{seed}")
    for seed in range(20)
]


def strike(launch, kind: str, chance: random.Random) -> bool:
    """Kill one process of a kind, of a node all processes. Whether workers are lost by it."""
    if kind == "node":
        agent = chance.choice(launch.of_kind("agent"))
        agent.suspend()  # so that it starts nothing while we look
        family = [agent, *agent.children(recursive=True)]
        for member in family:
            member.kill()
        return True
    victim = chance.choice(launch.of_kind(kind))
    has_workers = kind in ("worker", "agent") or bool(kind == "zygote" and victim.children())
    victim.kill()
    return has_workers


@pytest.mark.long
@pytest.mark.parametrize(("seed", "kind", "shape"), CASES)
def test_a_kill_changes_nothing(train, undisturbed, seed: int, kind: str, shape: str) -> None:
    chance = random.Random(seed)
    training = train(STEPS, 0.03, *SHAPES[shape])
    launch = training.launch
    training.wait_for_step(chance.randrange(1, STEPS - 5))
    workers_lost = strike(launch, kind, chance)
    launch.succeed(40)
    assert training.losses == undisturbed
    assert len(launch.events_of(events.MasterRecovered)) == (kind == "master")
    assert len(launch.events_of(events.RestartDecided)) == workers_lost
    assert len(launch.events_of(events.Recovered)) == workers_lost
