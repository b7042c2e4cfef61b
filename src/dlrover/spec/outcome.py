"""How a job ended: what the last screen shows and what ``--json`` prints."""

import msgspec

from dlrover.spec.failure import Failure, Verdict
from dlrover.spec.goodput import Goodput


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a job, as its master saw it."""

    exit_code: int
    """What the launcher exits with; see `dlrover.errors.ExitCode`."""
    reason: str
    """One sentence: why the job ended."""
    failure: Failure | None = None
    """The root cause, with its texts bounded; None when no worker's failure ended the job."""
    verdict: Verdict | None = None
    """What `failure` means; None exactly when `failure` is."""
    others: tuple[str, ...] = ()
    """One line for each other failed rank of that round: at most 8, then ``and N more``."""
    restarts: int = 0
    """Rounds that were started after a failure."""
    steps: int = 0
    """Optimizer steps that the job had completed."""
    seconds: float = 0.0
    """Wall time from the submission of the job to its end."""
    goodput: Goodput | None = None
    """What the job's time went into; None where the master is elsewhere."""
    released: bool = False
    """Not the job ended but one node's part in it: the job goes on with fewer."""
    set_aside: tuple[str, ...] = ()
    """One sentence for each sample that was set aside: at most 3, then ``And N more``."""
    job_dir: str = ""
    """Where the job's journal, logs and memory checkpoints lie."""
