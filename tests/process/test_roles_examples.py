"""The examples of several roles as users run them: they learn, and no kill changes what they learn from."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlrover.cli.roles import status
from dlrover.spec.jobdir import JobDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.torch, pytest.mark.timeout(400)]
ROLES = (sys.executable, "-m", "dlrover.cli.main", "roles")
EXAMPLES = Path(__file__).parents[2] / "examples"
CHANCE = 1 / 6
"""Reward of the untrained model of example 06."""


class Grpo:
    """Example 06, started."""

    def __init__(self, run, steps: int, step_time: float = 0.0, name: str = "grpo") -> None:
        self.steps = steps
        self.out = run.directory / name / "out"
        env = {"GRPO_OUT": self.out, "GRPO_STEPS": steps, "GRPO_STEP_TIME": step_time}
        self.launch = run(
            EXAMPLES / "06_grpo" / "job.py", "--job-dir", run.directory / name / "job",
            launcher=ROLES, name=name, env={key: str(value) for key, value in env.items()},
        )  # fmt: skip
        self.launch.is_ours = True

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.out / name
        return (
            [json.loads(line) for line in path.read_text().split("\n")[:-1]]
            if path.exists()
            else []
        )

    def instances(self) -> dict[str, list[int]]:
        """Pids of the processes that are members of each role now."""
        found = status(JobDir(self.launch.job_dir)).status
        assert found is not None
        return {
            role.name: [i.pid for i in role.instances if i.state in ("serving", "stale")]
            for role in found.roles
        }

    def kill(self, role: str, index: int = 0) -> None:
        pids = self.instances()[role]
        if pids:
            with_pid = psutil.Process(pids[index % len(pids)])
            with_pid.send_signal(signal.SIGKILL)

    def check(self) -> float:
        """Check that the weights in the end have learned each batch once; return their reward."""
        result: dict[str, Any] = json.loads((self.out / "result.json").read_text())
        assert sorted(result["learned"]) == list(range(self.steps))
        assert all(len(batch["versions"]) == 16 for batch in self.lines("batches.jsonl"))
        return float(result["reward"])


def test_grpo_learns_and_each_batch_counts_once_although_its_processes_are_killed(run) -> None:
    grpo = Grpo(run, 60, step_time=0.3)
    grpo.launch.until(lambda: len(grpo.lines("learned.jsonl")) >= 5, 120, "the first steps")
    for role in ("rollout", "trainer"):
        before = len(grpo.lines("learned.jsonl"))
        grpo.kill(role)
        grpo.launch.until(lambda n=before: len(grpo.lines("learned.jsonl")) > n + 3, 120, role)
    grpo.launch.end_with(0, 200)
    assert grpo.check() > 2 * CHANCE


def test_the_evaluation_sees_the_training_become_better(run) -> None:
    out = run.directory / "sft"
    launch = run(
        EXAMPLES / "07_sft_evaluation" / "job.py", "--job-dir", run.directory / "run" / "job",
        launcher=ROLES, env={"SFT_OUT": str(out), "SFT_STEPS": "60", "SFT_EVERY": "20"},
    )  # fmt: skip
    launch.is_ours = True
    launch.end_with(0, 200)
    seen = [json.loads(line) for line in (out / "evaluation.jsonl").read_text().splitlines()]
    assert seen[-1]["step"] == 60
    assert seen[-1]["right"] > 0.5
