"""Start of a master process: with a new job, a job from its journal, or one that its nodes already run."""

from __future__ import annotations

from dlrover.errors import ConfigurationError
from dlrover.master.diagnosis_rules import built_in
from dlrover.master.journal.history import History
from dlrover.master.machine import inputs
from dlrover.master.service import Master
from dlrover.platform.base import Platform
from dlrover.spec.job import JobSpec


def begin(
    master: Master, job: JobSpec, job_dir: str, history: History, platform: Platform | None
) -> None:
    """Give the machines their first input of this process, and watch nodes that run already.

    An empty journal beside nodes that run, or beside events, has been lost.

    Raises:
        ConfigurationError: the journal is another job's.
    """
    theirs = master.machine.job.name
    if master.replayed and theirs not in ("", job.name):
        raise ConfigurationError(
            f"The journal is of the job {theirs}, not of {job.name}; each job takes a journal of its own."
        )
    master.platform.use(platform)
    if master.replayed:
        master.submit(inputs.MasterStarted(master.replayed, master.last_entry))
        if master.machine.outcome is not None:
            master.ended.set()
        return
    found = [] if platform is None else platform.find()
    earlier = history.recorded
    history.follow(earlier)
    master.submit(inputs.Submitted(job, job_dir, tuple(found), earlier, built_in()))
    for node in found:
        if platform is not None:
            platform.adopt(node.node_id, node.handle)
