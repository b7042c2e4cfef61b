"""Embedding servers that are killed at any time: no slot but theirs loses anything, and nothing since before the last save."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path

import pytest

from dlrover.spec import events
from tests.process.test_embedding import servers

pytestmark = pytest.mark.torch
FIRST = 8
"""Steps before the first kill."""


def steps(out: Path) -> list[list[float]]:
    """Return the complete lines: when a step began and ended, slots with the rows of a save, and updates lost."""
    lines = (out / "steps").read_text().split("\n")[:-1] if (out / "steps").exists() else []
    return [[float(word) for word in line.split()] for line in lines]


def kill(launch, out: Path, victims: list[int], chance: random.Random) -> float:
    """Kill servers; return the seconds until a step that began later has ended."""
    launch.until(lambda: all(servers(launch, index) for index in victims), 30, "servers")
    if chance.random() < 0.4:
        launch.until((out / "saving").exists, 30, "a save")
    pids = [servers(launch, index)[0] for index in victims]
    killed = time.time()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    launch.until(lambda: any(step[0] > killed for step in steps(out)), 60, "the next step")
    return next(step[1] for step in steps(out) if step[0] > killed) - killed


def killed_in_turn(run, seed: int) -> list[float]:
    """Kill one or two servers a few times, while slots move, while a save is written, or the same server twice."""
    chance = random.Random(seed)
    out = run.directory / f"out-{seed}"
    out.mkdir()
    launch = run(
        "--embedding-servers=2", run.scripts / "embedding_kills.py", out, seed, name=f"run-{seed}"
    )
    launch.until(lambda: len(steps(out)) >= FIRST, 60, "the first steps")
    moving = seed % 3 == 0
    if moving:
        run.dlrover("scale", "--job-dir", launch.job_dir, "--role", "ps", "--nodes", 3)
    times = []
    for round_ in range(3):
        victims = chance.sample([0, 1], chance.choice([1, 1, 2]))
        times.append(kill(launch, out, victims, chance))
        if round_ == 0 and seed % 2:
            times.append(kill(launch, out, victims[:1], chance))
        done = len(steps(out))
        launch.until(lambda done=done: len(steps(out)) >= done + chance.randrange(20), 60, "steps")
    (out / "end").touch()
    launch.succeed()
    restored = [event.body for event in launch.events_of(events.SlotsRestored)]
    assert {event.server for event in restored} <= {0, 1}
    assert restored
    assert all(event.slots for event in restored)
    return times


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_server_loses_its_slots_since_the_last_save(run) -> None:
    killed_in_turn(run, 3)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_servers_are_killed_with_fifty_seeds(run) -> None:
    times, lost = [], []
    for seed in range(50):
        times += killed_in_turn(run, seed)
        lost += [step[2:] for step in steps(run.directory / f"out-{seed}") if step[2]]
    found = {
        "kills": len(times), "median, s": statistics.median(times), "worst, s": max(times),
        "slots with the rows of a save": int(sum(each[0] for each in lost)),
        "updates lost": int(sum(each[1] for each in lost)), "load": os.getloadavg()[0],
    }  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")
    assert lost
