"""Jobs for tests: what their masters say to a Brain."""

from __future__ import annotations

from typing import Any

from dlrover.rpc.brain import request_id
from dlrover.spec import brain
from dlrover.spec.plan import NodeGroup


def shape(workers: int = 1, servers: int = 0, **more: Any) -> brain.Shape:
    groups = {
        "worker": NodeGroup(count=workers, cpu=4, memory=more.pop("memory", 0), accelerators=1)
    }
    if servers:
        groups = {"worker": NodeGroup(count=workers, cpu=4), "ps": NodeGroup(count=servers, cpu=4)}
    return brain.Shape(groups=groups, batch=more.pop("batch", 64), **more)


def throughput(of: brain.Shape) -> float:
    """What a job does: nearly in proportion to its workers, a little less for each."""
    workers = of.groups["worker"].count
    return workers * of.batch / (0.1 + 0.002 * workers)


def register(job: str, **more: Any) -> brain.RegisterJob:
    more.setdefault("space", brain.Space(workers=brain.Range(1, 16)))
    description = brain.Description(name=more.pop("name", job), **more)
    return brain.RegisterJob(request=request_id(), job=job, description=description)


def samples(job: str, *measured: brain.Shape, **more: Any) -> brain.ReportSamples:
    found = tuple(
        brain.Sample(
            shape=one,
            throughput=more.get("throughput") or throughput(one),
            done=more.get("done", 0.0),
        )
        for one in measured
    )
    return brain.ReportSamples(request=request_id(), job=job, samples=found)


def outcome(job: str, plan: str, measured: float) -> brain.ReportOutcome:
    return brain.ReportOutcome(
        request=request_id(), job=job, plan_id=plan, state="applied", throughput=measured
    )


def end(job: str, **more: Any) -> brain.ReportEnd:
    return brain.ReportEnd(
        request=request_id(), job=job, state=more.pop("state", "succeeded"), **more
    )


def machines(count: int, accelerators: int = 4, cpu: float = 64) -> brain.ReportCluster:
    capacity = {"accelerator": float(accelerators), "cpu": float(cpu)}
    nodes = tuple(brain.ClusterNode(name=f"m{n}", capacity=capacity) for n in range(count))
    return brain.ReportCluster(request=request_id(), nodes=nodes)
