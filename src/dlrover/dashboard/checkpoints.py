"""The stored checkpoints of a job: the directories that its program saves to, and the steps in them."""

from __future__ import annotations

from typing import Any

import msgspec

from dlrover.errors import DLRoverError
from dlrover.spec.jobdir import JobDir

PLACES = 8
"""Most directories that are listed."""
STEPS = 50
"""Most steps of a directory: the newest ones."""


def stored(job_dir: JobDir) -> list[dict[str, Any]]:
    """Return the checkpoint directories of a job, each with its stored steps, the newest first."""
    try:
        listed = job_dir.checkpoints.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    places = listed.splitlines()[:PLACES]
    return [{"path": place, **_steps(place)} for place in places]


def _steps(place: str) -> dict[str, Any]:
    try:
        from dlrover.checkpoint.tools import tools  # noqa: PLC0415 - an extra

        found = tools.listing(place)
    except ModuleNotFoundError as error:
        problem = (
            f"The steps are not listed: the module {error.name} is missing, see dlrover[torch]."
        )
        return {"steps": [], "problem": problem}
    except DLRoverError as error:
        return {"steps": [], "problem": str(error)}
    return {"steps": [msgspec.to_builtins(step) for step in found[:STEPS]], "problem": ""}
