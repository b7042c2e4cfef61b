"""The page of a job without its master: what the cluster's records still tell of it, as parts of a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dlrover.dashboard import content
from dlrover.dashboard.inspect.plans import PlanHistory
from dlrover.errors import ExitCode
from dlrover.rpc.messages import Status
from dlrover.spec import words
from dlrover.spec.brain import PlanRecord, Shape, Story
from dlrover.spec.node import SERVER, WORKER
from dlrover.spec.outcome import Outcome
from dlrover.spec.plan import ScaleKind

Parts = dict[str, Any]
ADVICE = "Read the log of the failed pod under Logs, as long as the pod is there."
_EXIT_CODES = {"succeeded": ExitCode.SUCCESS, "stopped": ExitCode.STOPPED}


class EndedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's record in the cluster has of it after its end."""

    name: str
    phase: str
    began: float
    """Seconds since the epoch."""
    ended: float
    exit_code: int
    reason: str
    size: str
    steps: int = -1
    """-1: not known."""
    restarts: int = -1
    """-1: not known."""
    goodput: float | None = None
    journal_claim: str = ""
    """Volume claim that has its journal; empty: that went with the master's pod."""


def of_elastic_job(job: EndedJob, story: Story | None = None, more: str = "") -> Parts:
    """Return the parts of an ended job's page: of its ElasticJob, and of the Brain's history if that has it.

    ``more`` says why the Brain has nothing.
    """
    outcome = Outcome(exit_code=job.exit_code, reason=job.reason)
    if story is not None and story.outcome is not None:
        outcome = msgspec.structs.replace(story.outcome, reason=job.reason)
    parts = _parts(job, outcome)
    end, report = parts["status"]["outcome"], parts["report"]
    end["advice"] = end["advice"] or (ADVICE if job.exit_code else "")
    if outcome.goodput is None and job.goodput is not None:
        report["goodput"] |= {
            "ratio": job.goodput,
            "words": f"{100 * job.goodput:.1f} %",
            "summary": "Of the time of all nodes, as the master last reported it.",
        }
    if story is not None:
        report |= _history(story)
        more = "the rest is from the Brain's history"
    claim = job.journal_claim
    where = f"is in the volume claim {claim}" if claim else "went with its pod"
    text = (
        f"The job's master has ended, and its journal {where}: events, timeline and checkpoints are not shown "
        "here; the figures are those of the ElasticJob's status"
    )
    return {**parts, "known": {"text": f"{text}; {more}." if more else f"{text}."}}


def of_story(story: Story) -> Parts:
    """Return the parts of the page of a job that the Brain knows, which may still run."""
    row, outcome = story.job, story.outcome
    last = max([row.registered, *(sample.at for sample in story.samples)])
    job = EndedJob(
        name=row.description.name,
        phase=row.state,
        began=row.registered,
        ended=last if row.ended is None else row.ended,
        exit_code=_EXIT_CODES.get(row.state, ExitCode.USER_CODE),
        reason=row.reason or f"The job has {row.state}.",
        size=size(row.shape),
        steps=-1 if outcome is None else outcome.steps,
        restarts=-1 if outcome is None else outcome.restarts,
    )
    if outcome is None and row.ended is not None:
        outcome = Outcome(exit_code=job.exit_code, reason=job.reason)
    parts = _parts(job, outcome)
    parts["report"] |= _history(story)
    lacking = "" if story.outcome is not None else " goodput, incidents,"
    text = (
        f"This is what the Brain's history has of the job:{lacking} events, timeline, checkpoints and logs are "
        "with its master and its pods, not with the Brain."
    )
    return {**parts, "known": {"text": text}}


def _parts(job: EndedJob, outcome: Outcome | None) -> Parts:
    status = Status(
        name=job.name,
        phase=job.phase,
        round=0,
        world_size=0,
        restarts=job.restarts,
        steps=0,
        total_steps=job.steps,
        waiting_for="",
        nodes=(),
        outcome=outcome,
        seconds=max(0.0, job.ended - job.began),
    )
    goodput: Parts = {
        "ratio": None,
        "summary": "No goodput was reported.",
        "seconds": {},
        "notes": [],
    }
    report = {
        "job": job.name,
        "dir": "",
        "phase": job.phase,
        "submitted": job.began,
        "goodput": goodput,
    }
    if outcome is not None and outcome.goodput is not None:
        report["goodput"] = content.of_goodput(outcome.goodput)
        report["incidents"] = content.of_incidents(outcome)
    return {"status": {**content.of_status(status), "processes": job.size}, "report": report}


def _history(story: Story) -> Parts:
    """Return what only the Brain keeps of a job: its plans, its last speed, and the most that a node used."""
    row, facts = story.job, []
    if row.throughput:
        facts.append(("Throughput", f"{row.throughput:,.4g} samples/s", "measured last"))
    if story.nodes:
        memory = max(node.most_memory for node in story.nodes)
        cores = max(node.most_cpu for node in story.nodes)
        facts.append(("Most memory", words.size(int(memory)), f"of a node; {cores:.3g} cores"))
    plans = [_plan(number, plan) for number, plan in enumerate(story.plans, 1)]
    return {"plans": msgspec.to_builtins(plans), "facts": facts}


def _plan(number: int, record: PlanRecord) -> PlanHistory:
    before, wanted = _nodes(record.before), record.plan.groups
    after = wanted[WORKER].count if WORKER in wanted else before
    kind = ScaleKind.GROW if after > before else ScaleKind.SHRINK
    kept = {"applied": "kept", "rolled-back": "does not pay", None: "under way"}
    return PlanHistory(
        number=number,
        time=record.at,
        kind=kind if after != before else ScaleKind.BATCH,
        before=before,
        nodes=after,
        servers=wanted[SERVER].count if SERVER in wanted else 0,
        reason=record.plan.reason,
        predicted=record.plan.effect,
        measured=record.measured or None,
        error=record.error,
        within=record.within,
        unit="samples/s",
        outcome=kept.get(record.state, f"given up: {record.reason}"),
    )


def _nodes(shape: Shape | None) -> int:
    return 0 if shape is None or WORKER not in shape.groups else shape.groups[WORKER].count


def size(shape: Shape | None) -> str:
    """Return a size in words: ``8 workers, 2 ps``."""
    groups: Mapping[str, Any] = {} if shape is None else shape.groups
    return ", ".join(
        words.counted(group.count, kind) if kind == WORKER else f"{group.count} {kind}"
        for kind, group in groups.items()
    )
