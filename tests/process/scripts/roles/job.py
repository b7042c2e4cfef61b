"""A driver sends numbers to workers, and what they made of them to a trainer, which keeps each once.

Tests run this file on local processes, on Ray and on Kubernetes.
"""

import os

from dlrover.roles import Job

common = {"config": {"out": os.environ["OUT"]}, "shutdown_timeout": 5, "max_restarts": 20}
common["resources"] = {"cpu": 0.25, "memory": "128Mi"}
job = (
    Job("numbers")
    .role("trainer", "trainer.py", kind="elastic", instances=2, **common)
    .role("rollout", "rollout:Rollout", instances=2, **common)
    .role("main", "main.py", kind="driver", **common)
)
