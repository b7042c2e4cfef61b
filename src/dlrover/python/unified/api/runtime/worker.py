"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.runtime import ActorInfo, JobInfo, Worker, current_worker

__all__ = ["ActorInfo", "JobInfo", "Worker", "current_worker"]
