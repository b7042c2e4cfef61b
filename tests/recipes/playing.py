"""Plays the recipes: the pods that a controller makes of a manifest, run by real processes.

What a controller makes of a manifest is in `tests.recipes.controllers`; machines with real names, addresses and
DNS are in `tests.recipes.machines`. Only the image is not real: the pods run this machine's files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

import dlrover
from tests.recipes import controllers, machines
from tests.recipes.controllers import Job

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
MANIFESTS = sorted(path.name for path in RECIPES.glob("*.yaml"))
PROGRAM = "01_digits_ddp/train.py"
END = 90.0
"""Seconds that a recipe may train."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((RECIPES / name).read_text()))


def job_of(name: str) -> Job:
    """The pods that the controller of a manifest makes."""
    makers: dict[str, Callable[..., Job]] = {
        "pytorchjob.yaml": controllers.pytorchjob,
        "jobset.yaml": controllers.jobset,
        "trainjob.yaml": controllers.trainjob,
        "volcano.yaml": controllers.volcano,
    }
    return makers[name](*documents(name))


def dlrover_run(directory: Path) -> dict[str, str]:
    """What a process needs to find this ``dlrover-run`` by its name, whatever is installed."""
    directory.mkdir()
    command = directory / "dlrover-run"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dlrover.cli.run.run "$@"\n')
    command.chmod(0o755)
    return {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(dlrover.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "DLROVER_RECOVERY_GRACE": "3",  # a new master waits so long for nodes that may still run
    }


def steps_in(out: Path) -> list[dict[str, Any]]:
    """The steps that a training program has written down."""
    path = out / "losses.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


class Played:
    """A job whose pods run, and are replaced as its controller would."""

    def __init__(self, cluster: machines.Cluster, directory: Path, job: Job) -> None:
        self.out = directory / "volume"
        self.out.mkdir()
        self._cluster = cluster
        self._directory = directory
        self._job = job
        self.running: dict[str, machines.Container] = {}
        self.ended: list[tuple[str, int]] = []
        """Host names of pods, and their exit codes, in the order of their ends."""
        self._image = dlrover_run(directory / "bin")

    def start(self, index: int, *, known: bool = True) -> machines.Machine:
        """Start a pod on a machine of its own; ``known``: DNS tells its name at once."""
        pod = self._job.pods[index]
        machine = self._cluster.machine(pod.hostname, pod.subdomain)
        if known:
            self._cluster.publish(pod.name, machine.address)
        number = len(self._cluster.machines)
        state = {"DLROVER_STATE_DIR": str(self._directory / f"state-{number}")}
        self.running[pod.hostname] = machine.start(
            pod.command, self._image | state | pod.env, ROOT / "examples", self.out, pod.mount
        )
        return machine

    def kill(self, index: int, number: signal.Signals = signal.SIGKILL) -> None:
        """End a pod."""
        self.running[self._job.pods[index].hostname].signal(number)

    def to_its_end(self) -> None:
        """Go on until every pod has ended with 0; those that end otherwise are replaced."""
        end = time.monotonic() + END
        while self.running:
            for index, pod in enumerate(self._job.pods):
                container = self.running.get(pod.hostname)
                code = container.exit_code if container else None
                if container is None or code is None:
                    continue
                self.ended.append((pod.hostname, code))
                del self.running[pod.hostname]
                if code:
                    assert self._job.replaces(code), container.output
                    self.start(index)
            assert time.monotonic() < end, self.report()
            time.sleep(0.05)

    def steps(self) -> list[dict[str, Any]]:
        """The steps that were made so far."""
        return steps_in(self.out)

    def report(self) -> str:
        """What the pods printed."""
        return "\n".join(
            f"--- {container.output}" for m in self._cluster.machines for container in m.containers
        )
