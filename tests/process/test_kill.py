"""Whatever one process is killed, at any step: the job ends as if nothing had happened."""

import random

import psutil
import pytest

from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(120)]

STEPS = 30
SHAPES = {"one node": ["--nproc-per-node=2"], "two nodes": ["--local-nodes=2"]}
KINDS = ["worker", "agent", "zygote", "node", "master"]
CASES = [
    pytest.param(
        *(seed, KINDS[seed % 5], list(SHAPES)[seed // 5 % 2]),
        id=f"{seed}",
        marks=[pytest.mark.heavy] if seed >= 5 else [],
    )
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


@pytest.mark.parametrize("struck", ["agent", "supervisor"])
def test_what_is_stopped_is_not_left_behind(run, struck: str) -> None:
    """A process that SIGSTOP has stopped cannot notice that those above it are gone."""
    launch = run("--local-nodes", "2", "--no-python", "sleep", "1000")
    workers = launch.wait_for("worker", 2)
    zygotes = launch.of_kind("zygote")
    for process in [*zygotes, *workers]:
        process.suspend()
    if struck == "agent":
        victim = zygotes[0].parent()
        left = [zygotes[0], *zygotes[0].children()]
    else:
        victim, left = launch.process, [*zygotes, *workers]
    victim.kill()
    _, alive = psutil.wait_procs(left, timeout=15)
    assert not alive
