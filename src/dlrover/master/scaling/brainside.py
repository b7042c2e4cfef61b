"""The master's side of the Brain: reports measurements, asks for a size. Training never waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover.errors import ConfigurationError, ExitCode
from dlrover.master.machine.scaling.changes import decided, direction, groups_of
from dlrover.rpc import wire
from dlrover.rpc.brain import BrainClient, BrainLink, request_id
from dlrover.spec import brain, events
from dlrover.spec.events import Event
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import BrainSide, TlsFiles
from dlrover.spec.measurements import ModelProfile, NodeUsage, SpeedSample
from dlrover.spec.node import SERVER, Size
from dlrover.spec.outcome import Outcome
from dlrover.spec.plan import NodeGroup, ResourcePlan, ScaleDecision, ScaleKind

if TYPE_CHECKING:
    from dlrover.master.machine.scaling.changes import Question

TOKEN = "DLROVER_BRAIN_TOKEN"  # noqa: S105 - the variable's name
FIRST_TIME = 15.0
"""Seconds that the Brain gets to say how many nodes a job starts with."""
LAST_TIME = 5.0
"""Seconds that the Brain gets at the job's end to accept the last reports."""
KIND = "worker"
NAME_LENGTH = 60


class JobBrain:
    """One job's connection to the Brain. Call all methods on the master's event loop.

    Args:
        side: the Brain's address, and the job's settings for it.
        job: the job.
        secret: a text that no other job has; the job's id at the Brain is derived from it.
        token: the Brain's.
        tls: for the connection.
    """

    def __init__(
        self, side: BrainSide, job: JobSpec, secret: str, token: str, tls: TlsFiles
    ) -> None:
        name = re.sub(r"[^!-~]", "_", job.name)[:NAME_LENGTH]
        self.id = f"{name}-{hashlib.sha256(secret.encode()).hexdigest()[:12]}"
        self.cluster = side.cluster and job.auto_scale
        """True if the Brain chooses the job's size."""
        self._side = side
        self._job = job
        self._profile = ModelProfile()
        self._similar: brain.Similar | None = None
        self._first = ""  # id of the first plan until its effect is measured
        self._client = BrainClient(side.address, token, TlsFiles(ca=tls.ca))
        self._link = BrainLink(self._client, self.id, self._description())
        self._task = asyncio.create_task(self._link.run())

    def _description(self) -> brain.Description:
        job, features = self._job, dict[str, str | float](name=self._job.name, user=_user())
        if self._side.program:
            features["program"] = self._side.program
        if self._profile.parameters:
            features["parameters"] = float(self._profile.parameters)
        return brain.Description(
            name=job.name,
            mode="cluster" if self.cluster else "single-job",
            features=features,
            strategy="ps" if job.servers else "all-reduce",
            origin=self._side.origin,
            space=brain.Space(
                workers=brain.Range(job.min_nodes, job.max_nodes, job.node_unit),
                servers=brain.Range(max(1, job.min_servers), max(1, job.max_servers)),
            ),
        )

    # ---- reports

    def measured(
        self, sample: SpeedSample, profile: ModelProfile, usage: Mapping[int, NodeUsage]
    ) -> None:
        """Report a measured window of the running world; ``usage`` is what its nodes use, by id."""
        if profile.parameters != self._profile.parameters:
            self._profile = profile
            self._report(brain.RegisterJob, description=self._description())
        found = brain.Sample(
            shape=shape_of(sample, self._side.node),
            throughput=sample.throughput,
            compute_seconds=_of_a_pass(sample),
            batches=sample.batches,
        )
        self._report(brain.ReportSamples, samples=(found,))
        used = tuple(
            brain.Usage(node=f"{KIND}-{node}", kind=KIND, cpu=one.cpu, memory=float(one.memory))
            for node, one in usage.items()
        )
        if used:
            self._report(brain.ReportUsage, nodes=used)
        if self._first:
            self._outcome(self._first, "applied", sample.throughput)
            self._first = ""

    def happened(self, event: Event) -> None:
        """Report an event of the job if it concerns the Brain."""
        match event.body:
            case events.PlanMade(plan_id="") as body:
                groups = groups_of(Size(body.nodes, body.servers))
                self._report(
                    brain.ReportPlan,
                    plan_id=self._name(body),
                    plan=ResourcePlan(groups=groups, reason=body.reason, effect=body.effect),
                )
            case events.PlanMeasured() as body:
                state: brain.PlanState = "rolled-back" if body.short else "applied"
                self._outcome(self._name(body), state, body.throughput)
            case events.PlanDropped() as body:
                self._outcome(self._name(body), "refused", 0.0, body.reason)

    def ended(self, outcome: Outcome) -> None:
        """Report the job's end."""
        state, reason = _state(outcome.exit_code), outcome.reason[:2000]
        self._report(brain.ReportEnd, state=state, reason=reason, outcome=outcome)

    def _outcome(
        self, plan_id: str, state: brain.PlanState, throughput: float, reason: str = ""
    ) -> None:
        self._report(
            brain.ReportOutcome, plan_id=plan_id, state=state, throughput=throughput, reason=reason
        )

    def _name(self, body: events.PlanMade | events.PlanMeasured | events.PlanDropped) -> str:
        return body.plan_id or f"{self.id}-{body.number}"

    def _report(self, kind: Callable[..., brain.Report], **fields: Any) -> None:
        self._link.report(kind(request=request_id(), job=self.id, **fields))

    # ---- questions

    async def first(self, job: JobSpec) -> JobSpec:
        """Return the job with the number of nodes to start with, as similar past jobs had."""
        advice = None
        with contextlib.suppress(asyncio.TimeoutError):
            advice = await asyncio.wait_for(self._link.plan(None), FIRST_TIME)
        if advice is None or advice.plan is None or KIND not in advice.plan.groups:
            return job
        size = size_of(advice.plan, Size(0, job.servers))
        fits = job.min_nodes <= size.workers <= job.max_nodes and not size.workers % job.node_unit
        if not fits or not job.min_servers <= size.servers <= job.max_servers:
            return job
        self._first = advice.plan_id
        return msgspec.structs.replace(
            job, managed_nodes=size.workers, servers=size.servers, first_size=advice.reason
        )

    async def size(self, question: Question) -> tuple[bool, ScaleDecision | None]:
        """Return whether the Brain has answered, and the size that it wants; None: the present one."""
        advice = await self._link.plan(shape_of(question.current, self._side.node))
        if advice is None:
            return False, None
        plan, current = advice.plan, question.current.size
        size = current if plan is None else size_of(plan, current)
        allowed = size.workers in question.sizes and size.servers in question.servers
        if plan is None or not allowed:
            return True, None
        batch = _batch_of(plan, question.current)
        if size == current and not batch:
            return True, None
        kind = ScaleKind.BATCH if size == current else direction(current, size)
        return True, decided(kind, size, plan.reason, plan.effect, advice.plan_id, batch)

    async def similar(self) -> brain.Similar | None:
        """Return what the most similar past job has measured; None until the Brain has answered."""
        if self._similar is None:
            self._similar = await self._link.similar()
        return self._similar

    async def close(self) -> None:
        """Send the last reports, unless the Brain is unreachable, and disconnect."""
        await self._link.flush(LAST_TIME)
        self._task.cancel()
        await self._client.close()


def connect(
    side: BrainSide, job: JobSpec, secret: str, tls: TlsFiles, env: Mapping[str, str]
) -> JobBrain | None:
    """Return the job's connection to the Brain; None if none is configured.

    Raises:
        ConfigurationError: its token is missing or cannot be read.
    """
    if not side.address:
        return None
    token = env.get(TOKEN, "")
    if side.token_file:
        token = wire.token_in(side.token_file, "brain_token_file")
    if not token:
        raise ConfigurationError(
            f"The token of the Brain at {side.address} is missing: set brain_token_file or {TOKEN}."
        )
    return JobBrain(side, job, secret, token, tls)


def shape_of(sample: SpeedSample, node: NodeGroup) -> brain.Shape:
    """Return a measured size in the Brain's terms; ``node`` holds the resources of each node."""
    passes = _passes(sample)
    batch = max(1, round(sample.total_batch / (sample.replicas * passes)))
    groups = {KIND: msgspec.structs.replace(node, count=sample.nodes)}
    if sample.servers:
        groups[SERVER] = NodeGroup(count=sample.servers, cpu=sample.server_cpu)
    return brain.Shape(
        groups=groups,
        batch=batch,
        passes=passes,
        per_node=sample.replicas // sample.nodes,
    )


def _passes(sample: SpeedSample) -> int:
    """Return the number of passes that a worker makes in a step."""
    share = -(-sample.total_batch // sample.replicas)
    return max(1, -(-share // sample.batches.pass_most)) if sample.batches is not None else 1


def _of_a_pass(sample: SpeedSample) -> float | None:
    seconds = sample.compute_seconds
    return None if seconds is None else seconds / _passes(sample)


def _batch_of(plan: ResourcePlan, current: SpeedSample) -> int:
    """Return a plan's new global batch, limited to what the program allows; 0 if the batch stays."""
    batches = current.batches
    if plan.batch is None or batches is None or batches.least == batches.most:
        return 0
    batch = min(max(plan.batch, batches.least), batches.most)
    return 0 if batch == current.total_batch else batch


def size_of(plan: ResourcePlan, current: Size) -> Size:
    """Return the node counts of a plan; a role that the plan does not name keeps its count."""
    groups = plan.groups
    workers = groups[KIND].count if KIND in groups else current.workers
    if not current.servers:
        return Size(workers)
    return Size(workers, groups[SERVER].count if SERVER in groups else current.servers)


def _state(exit_code: int) -> brain.JobState:
    if exit_code == ExitCode.SUCCESS:
        return "succeeded"
    stopped = exit_code == ExitCode.STOPPED or exit_code > ExitCode.SIGNAL_BASE
    return "stopped" if stopped else "failed"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return ""
