"""``dlrover goodput --html``: a job's page with its present content, as one file."""

from __future__ import annotations

import time

from dlrover.dashboard import checkpoints, content, page
from dlrover.dashboard.inspect import queries
from dlrover.dashboard.inspect.goodput import GoodputReport
from dlrover.errors import ConfigurationError
from dlrover.spec.jobdir import JobDir


def render(job_dir: JobDir, found: GoodputReport) -> str:
    """Return the page of a job, which refers to nothing outside itself."""
    try:
        happened = queries.events(job_dir)
    except ConfigurationError:
        happened = []
    return page.frozen(
        {
            **content.FIXED,
            "frozenAt": time.time(),
            "report": content.of_report(found, happened),
            "status": content.of_status(found.status),
            "checkpoints": checkpoints.stored(job_dir),
        }
    )
