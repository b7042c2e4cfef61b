"""Outcome of a job: shown on the last screen and printed by ``--json``."""

import msgspec

from dlrover.spec.failure import Failure, Verdict
from dlrover.spec.goodput import Goodput


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """End of a job, as its master saw it."""

    exit_code: int
    """Exit code of the launcher; see `dlrover.errors.ExitCode`."""
    reason: str
    """Why the job ended, in one sentence."""
    failure: Failure | None = None
    """The root cause, with its texts bounded; None if no worker's failure ended the job."""
    verdict: Verdict | None = None
    """Meaning of `failure`; None exactly if `failure` is None."""
    others: tuple[str, ...] = ()
    """One line for each other failed rank of that round: at most 8, then ``and N more``."""
    restarts: int = 0
    """Rounds started after a failure."""
    steps: int = 0
    """Optimizer steps that the job completed."""
    seconds: float = 0.0
    """Wall time from the submission of the job to its end."""
    goodput: Goodput | None = None
    """Use of the job's time; None if the master runs elsewhere."""
    released: bool = False
    """True if only this node left; the job goes on with fewer nodes."""
    skipped: tuple[str, ...] = ()
    """One sentence for each skipped sample: at most 3, then ``And N more``."""
    job_dir: str = ""
    """Directory of the job's journal, logs and memory checkpoints."""
