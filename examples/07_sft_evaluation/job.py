"""Supervised fine-tuning with its evaluation in a role of its own: ``dlrover roles examples/07_sft_evaluation/job.py``."""

import os

from dlrover.roles import Job

settings = {
    "steps": int(os.environ.get("SFT_STEPS", "300")),
    "every": int(os.environ.get("SFT_EVERY", "50")),
    "out": os.path.abspath(os.environ.get("SFT_OUT", "sft-out")),
}
common = {
    "config": settings,
    "env": {"OMP_NUM_THREADS": "1"},
    "max_restarts": 100,
    "shutdown_timeout": 5,
}

job = (
    Job("sft")
    .role("trainer", "trainer.py", kind="elastic", **common)
    .role("evaluation", "evaluation.py", **common)
)
