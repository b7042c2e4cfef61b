"""GRPO as a job of five roles: ``dlrover roles examples/06_grpo/job.py``."""

import os

from dlrover.roles import Job

settings = {
    "steps": int(os.environ.get("GRPO_STEPS", "150")),
    "out": os.path.abspath(os.environ.get("GRPO_OUT", "grpo-out")),
    "ahead": int(os.environ.get("GRPO_AHEAD", "4")),  # batches that may wait for the trainer
    "step_time": float(os.environ.get("GRPO_STEP_TIME", "0")),  # seconds more for each step
    "rollout_time": float(
        os.environ.get("GRPO_ROLLOUT_TIME", "0")
    ),  # and for each call of a rollout
    "model": {"width": 32, "layers": 2, "heads": 2},
}
one_thread = {"OMP_NUM_THREADS": "1"}
common = {"config": settings, "env": one_thread, "max_restarts": 100, "shutdown_timeout": 5}

job = (
    Job("grpo")
    .role("trainer", "trainer.py", kind="elastic", processes=2, **common)
    .role("rollout", "serving:Rollout", instances=2, **common)
    .role("reference", "serving:Reference", **common)
    .role("reward", "serving:Reward", **common)
    .role("main", "main.py", kind="driver", **common)
)
