"""The stored checkpoints of a job: the directories that its program saves to, and the steps in them."""

from __future__ import annotations

from typing import Any

from dlrover.spec.jobdir import JobDir


def stored(job_dir: JobDir) -> list[dict[str, Any]]:
    """Return the checkpoint directories of a job, each with its stored steps."""
    return []
