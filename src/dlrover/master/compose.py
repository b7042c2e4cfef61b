"""A job's configuration, composed from the job as requested and the settings.

`dlrover-run`, `dlrover master` and an ElasticJob each say what is requested; everything else is added here.
"""

from __future__ import annotations

import msgspec

from dlrover.config import Settings
from dlrover.master.diagnosis_rules import load_own
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import BrainSide, MasterConfig
from dlrover.spec.node import NodeLimits


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its user requests it, by a command line or a manifest."""

    job: JobSpec
    """Without what `master_config` adds."""
    platform: str = ""
    """Platform that launches the nodes; empty: they come by themselves."""
    brain: BrainSide = BrainSide()
    """Only what the user says about this job."""
    node_size: NodeLimits = NodeLimits()
    """Each node's share of this machine, on the platform ``local``."""
    most_memory_factor: float = 0.0
    """Largest multiple of the requested memory that the platform can give; 0: unknown."""


def master_config(request: Request, settings: Settings, host: str, port: int) -> MasterConfig:
    """Return the configuration of the master that listens on ``host`` and ``port``.

    Raises:
        ConfigurationError: the rows for the table of causes, or their budgets, are wrong.
    """
    job, size, brain = request.job, request.node_size, request.brain
    on_cluster = request.platform == "kubernetes"
    return MasterConfig(
        job=msgspec.structs.replace(
            job,
            node_check=job.node_check or job.exclude_stragglers,
            limits=settings.limits,
            diagnosis_rules=load_own(settings.diagnosis_rules, settings.limits.cause_budgets),
            one_host=request.platform == "local",
            grows_memory=on_cluster or size.memory > 0,
            most_memory_factor=request.most_memory_factor,
            grows_cpu=on_cluster or size.cpu > 0,
        ),
        host=host,
        port=port,
        platform=request.platform,
        node_size=size,
        tls=settings.tls,
        journal=settings.journal,
        metrics=settings.metrics,
        brain=msgspec.structs.replace(
            brain,
            address=brain.address or settings.brain,
            token_file=settings.brain_token_file,
            cluster=brain.cluster or settings.optimize_mode == "cluster",
        ),
    )
