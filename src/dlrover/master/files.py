"""Files of a job directory that belong to its master, for whoever reads them without being one."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dlrover._util import decoding
from dlrover.errors import kind_of, readable
from dlrover.spec.jobdir import JobDir, MasterConfig, decode
from dlrover.spec.outcome import Outcome


def load_config(job_dir: JobDir) -> MasterConfig:
    """Return the configuration in a job directory.

    Raises:
        ConfigurationError: it cannot be read, or another version of DLRover wrote it.
        InfrastructureError: its volume fails.
    """
    try:
        return decode(job_dir.job, job_dir.job.read_bytes(), MasterConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise kind_of(error)(f"{job_dir.job} cannot be read: {error}.") from error


def read_token(job_dir: JobDir) -> str:
    """Return the token in a job directory.

    Raises:
        ConfigurationError: it cannot be read.
        InfrastructureError: its volume fails.
    """
    with readable(str(job_dir.token)):
        return job_dir.token.read_text().strip()


def read_outcome(path: Path) -> Outcome | None:
    """Return the outcome in a file; None if there is none yet, or it is damaged."""
    try:
        return decoding.json(path.read_bytes(), Outcome)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
