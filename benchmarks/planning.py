"""The models and searches of `dlrover.planning` beside published measurements and policies.

Three parts: fits of published and measured throughputs, a simulated cluster under several policies, and the time
that plans take. ``benchmarks/README.md`` explains the figures.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from cluster_policies import Fixed, Optimus, Ours, PolluxLike, Tiresias
from pollux_data import DATA, NAMES, application, workload

from dlrover.planning import allreduce, search
from dlrover.planning.allreduce import Form, RingModel, RingSample, RingShape, fit_ring
from dlrover.planning.cluster import Demand, Option, allocate
from dlrover.planning.efficiency import BatchLimits, GradientNoise, best_batches
from dlrover.planning.parameter_server import ServerSample, ServerShape, fit_servers
from dlrover.planning.plans import RingSpace, ServerSpace, Terms, plan_ring, plan_servers
from dlrover.planning.throughput import TrustRegion
from tests.support.workload import ClusterPolicy, replay

PUBLISHED = {"pollux-like": 2446.1, "tiresias": 3469.7, "optimus, length declared": 5301.9}
"""Mean completion times of workload 6 in the published simulator, in seconds."""

FEW = 4
"""Replicas that an extrapolation is fitted to, at most; it is judged from twice as many on."""

EXTRAPOLATIONS: dict[str, Callable[[RingShape], bool]] = {
    "few replicas": lambda shape: shape.replicas <= FEW,
    "few replicas on two nodes": lambda shape: shape.replicas <= FEW and shape.nodes <= 2,
    "one node": lambda shape: shape.nodes == 1,
}


def per_cent(value: float) -> str:
    """With one digit."""
    return f"{100 * value:.1f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows as Markdown."""
    print(f"| {' | '.join(head)} |")
    print(f"|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


# ---- fits


def published_curves() -> dict[str, Any]:
    """Fit the form of DLRover-RM to each published sweep: relative errors of the throughput."""
    sweeps: dict[str, list[ServerSample]] = {}
    with (DATA.parent / "dlrover_rm" / "curves.csv").open() as file:
        for row in csv.DictReader(file):
            shape = ServerShape(
                int(row["workers"] or 1),
                int(row["servers"]),
                float(row["worker_cpu"] or 1),
                float(row["server_cpu"] or 1),
            )
            sample = ServerSample(shape, 1e5 * float(row["throughput"]))
            sweeps.setdefault(row["sweep"], []).append(sample)
    found = {}
    for name, samples in sweeps.items():
        model = fit_servers(samples)
        predictions = [model.predict(sample.shape) for sample in samples]
        pairs = list(zip(predictions, samples, strict=True))
        errors = [abs(p.throughput / s.throughput - 1) for p, s in pairs]
        left_out = [
            fit_servers([s for s in samples if s is not one]).predict(one.shape).throughput
            / one.throughput
            - 1
            for one in samples
        ]
        found[name] = {
            "points": len(samples),
            "mean_error": float(np.mean(errors)),
            "largest_error": float(np.max(errors)),
            "left_out_error": float(np.mean(np.abs(left_out))),
            "covered": float(np.mean([p.low <= s.throughput <= p.high for p, s in pairs])),
        }
    return found


def judge(model: RingModel, samples: Sequence[RingSample]) -> dict[str, float]:
    """Mean relative error of step times, and the share of them within intervals of 90 %."""
    errors, covered, widths = [], [], []
    for sample in samples:
        prediction = model.predict(sample.shape)
        done = sample.shape.replicas * sample.shape.batch
        errors.append(abs(done / prediction.throughput / sample.step_seconds - 1))
        covered.append(prediction.low <= done / sample.step_seconds <= prediction.high)
        widths.append(prediction.high / prediction.low)
    return {
        "samples": len(samples),
        "mean_error": float(np.mean(errors)),
        "covered": float(np.mean(covered)),
        "width": float(np.median(widths)),
    }


FOLDS = 5


def out_of_sample(samples: Sequence[RingSample], form: Form) -> dict[str, float]:
    """`judge` of fits that have not seen the sizes that they are judged by, weighted over the folds."""
    sizes = sorted({(s.shape.nodes, s.shape.replicas) for s in samples})
    random.Random(0).shuffle(sizes)
    rows = []
    for fold in range(FOLDS):
        left_out = set(sizes[fold::FOLDS])
        parts: dict[bool, list[RingSample]] = {True: [], False: []}
        for sample in samples:
            parts[(sample.shape.nodes, sample.shape.replicas) in left_out].append(sample)
        rows.append(judge(fit_ring(parts[False], form), parts[True]))
    weights = [row["samples"] for row in rows]
    return {key: float(np.average([row[key] for row in rows], weights=weights)) for key in rows[0]}


def outliers(count: int, times: int = 15) -> dict[str, float]:
    """Mean error over all sizes of fits to a few samples, as they are and with one step tripled, by both losses."""
    found: dict[str, list[float]] = defaultdict(list)
    for name in NAMES:
        samples = [s for s in application(name).samples() if s.shape.replicas <= 4 * FEW]
        draw = random.Random(1)
        for _ in range(times):
            few = draw.sample(samples, count)
            number = draw.randrange(count)
            wrong = replace(few[number], step_seconds=3 * few[number].step_seconds)
            tripled = [*few[:number], wrong, *few[number + 1 :]]
            for key, chosen in (("clean", few), ("tripled", tripled)):
                found[key].append(step_error(fit_ring(chosen), samples))
                with mock.patch.object(allreduce, "OUTLIER", math.inf):
                    found[f"{key}, least squares"].append(step_error(fit_ring(chosen), samples))
    return {key: float(np.mean(errors)) for key, errors in found.items()}


def step_error(model: RingModel, samples: Sequence[RingSample]) -> float:
    """Mean relative error of step times."""
    rows = [(s.shape.nodes, s.shape.replicas, s.shape.batch, s.step_seconds) for s in samples]
    nodes, replicas, batch, seconds = np.array(rows).T
    return float(np.mean(np.abs(model.step_time(nodes, replicas, batch) / seconds - 1)))


def measured_steps() -> dict[str, Any]:
    """Fit both forms to the step times of each application: all of them, and few to judge by many."""
    found: dict[str, Any] = {}
    for name in NAMES:
        samples = application(name).samples()
        many = [s for s in samples if s.shape.replicas >= 2 * FEW]
        found[name] = {}
        for form in ("pollux", "ring"):
            rows = {
                "all": judge(fit_ring(samples, form), samples),
                "other sizes": out_of_sample(samples, form),
            }
            for what, chosen in EXTRAPOLATIONS.items():
                few = [s for s in samples if chosen(s.shape)]
                rows[what] = judge(fit_ring(few, form), many)
            found[name][form] = rows
    return found


def show_fits() -> dict[str, Any]:
    """Print and return both."""
    curves, steps = published_curves(), measured_steps()
    table(
        ("published sweep of DLRover-RM", "points", "mean error", "largest", "of a point left out"),
        [
            (
                name,
                str(r["points"]),
                *[per_cent(r[key]) for key in ("mean_error", "largest_error", "left_out_error")],
            )
            for name, r in curves.items()
        ],
    )
    parts = ("all", "other sizes", *EXTRAPOLATIONS)
    table(
        ("measured step times", *[f"{part}: Pollux' form, ours (in 90 %)" for part in parts]),
        [
            (
                name,
                *[
                    f"{per_cent(forms['pollux'][part]['mean_error'])}, "
                    f"{per_cent(forms['ring'][part]['mean_error'])} "
                    f"({per_cent(forms['ring'][part]['covered'])})"
                    for part in parts
                ],
            )
            for name, forms in steps.items()
        ],
    )
    wrong = {str(count): outliers(count) for count in (6, 12, 24)}
    table(
        ("samples, of which one step is tripled", *wrong["6"]),
        [(count, *map(per_cent, errors.values())) for count, errors in wrong.items()],
    )
    return {"curves": curves, "steps": steps, "outliers": wrong}


# ---- cluster


def policies() -> list[Callable[[], ClusterPolicy]]:
    """In the order of the table."""
    return [
        lambda: Ours("declared"),
        lambda: Ours("history"),
        lambda: Ours("unknown"),
        lambda: Ours("unknown", adaptive=False),
        PolluxLike,
        Tiresias,
        Optimus,
        lambda: Fixed("original"),
        lambda: Fixed("static"),
    ]


def show_cluster(number: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Replay a workload under each policy, or under those whose names begin with one of ``names``."""
    rows = []
    for make in policies():
        policy = make()
        if names and not policy.name.startswith(tuple(names)):
            continue
        began = time.process_time()
        found = replay(workload(number), policy)
        rows.append(
            {
                "workload": number,
                "policy": found.policy,
                "average": found.average,
                "median": found.percentile(0.5),
                "p99": found.percentile(0.99),
                "makespan": found.makespan,
                "restarts": found.restarts,
                "used": found.used,
                "published": PUBLISHED.get(found.policy) if number == 6 else None,
                "cpu_seconds": time.process_time() - began,
            }
        )
    table(
        (
            f"workload {number}",
            "average",
            "median",
            "p99",
            "makespan",
            "restarts",
            "published average",
        ),
        [
            (
                row["policy"],
                *[f"{row[key]:,.0f} s" for key in ("average", "median", "p99", "makespan")],
                str(row["restarts"]),
                f"{row['published']:,.0f} s" if row["published"] else "",
            )
            for row in rows
        ],
    )
    return rows


# ---- time


def server_throughput(shape: ServerShape) -> float:
    """Of a made-up parameter-server job."""
    seconds = (
        0.02
        + 0.5e-3 * shape.batch / shape.worker_cpu
        + 0.03 * shape.workers / (shape.servers * shape.server_cpu)
        + 0.002 * shape.workers / shape.servers
    )
    return shape.batch * shape.workers / seconds


def median_time(action: Callable[[], object], times: int) -> float:
    """Seconds of CPU."""
    found = []
    for _ in range(times):
        began = time.process_time()
        action()
        found.append(time.process_time() - began)
    return float(np.median(found))


def one_job() -> dict[str, float]:
    """Seconds of a fit and a plan of one job, of both kinds."""
    draw = random.Random(1)
    sizes = [(1, 1, 4, 4), (2, 1, 4, 4), (4, 2, 4, 4), (4, 2, 8, 4), (4, 4, 8, 8), (8, 4, 8, 8)]
    shapes = [ServerShape(w, p, cw, cp, 512) for w, p, cw, cp in sizes]
    samples = [ServerSample(s, server_throughput(s) * draw.lognormvariate(0, 0.05)) for s in shapes]
    model, cores = fit_servers(samples), (1, 2, 4, 8, 12, 16, 24, 32)
    space = ServerSpace(range(1, 61), range(1, 16), cores, cores, 8 << 30, 64 << 30)
    wide = ServerSpace(range(1, 61), range(1, 16), range(1, 33), range(1, 33))
    terms = Terms(region=TrustRegion(factor=4.0))
    steps = [s for s in application("bert").samples() if s.shape.replicas <= FEW]
    ring = fit_ring(steps)
    here = RingShape(2, 8, 8)
    return {
        "servers: fit of 6 samples": median_time(lambda: fit_servers(samples), 20),
        "servers: plan": median_time(lambda: plan_servers(model, space, shapes[-1]), 20),
        f"servers: plan, more than {search.EXACT:,} sizes": median_time(
            lambda: plan_servers(model, wide, shapes[-1], terms), 3
        ),
        f"all-reduce: fit of {len(steps)} samples": median_time(lambda: fit_ring(steps), 10),
        "all-reduce: plan": median_time(
            lambda: plan_ring(ring, RingSpace(range(1, 17), 4), here), 10
        ),
    }


def many_jobs(count: int) -> dict[str, float]:
    """Seconds of a round over a cluster: the models refitted, all sizes rated, the cluster divided."""
    draw = random.Random(2)
    pools = {
        name: [s for s in application(name).samples() if s.shape.replicas <= 8] for name in NAMES
    }
    names = [draw.choice(NAMES) for _ in range(count)]
    samples = [draw.sample(pools[name], 12) for name in names]
    sizes = np.array([1, 2, 4, *range(8, 65, 4)])
    nodes = np.ceil(sizes / 4)

    began = time.process_time()
    models = [fit_ring(each) for each in samples]
    fitted = time.process_time()
    demands = []
    for number, (name, model) in enumerate(zip(names, models, strict=True)):
        kind = application(name)
        noise = GradientNoise(*kind.gradients(kind.reference_batch, 1), kind.reference_batch)
        limits = BatchLimits(
            kind.reference_batch, kind.most_batch, kind.replica_least, kind.replica_most
        )
        speeds = best_batches(model, noise, limits, nodes, sizes).goodput
        offers = [
            Option(str(n), {"accelerator": float(n)}, float(speed))
            for n, speed in zip(sizes, speeds, strict=True)
        ]
        demands.append(Demand(str(number), offers, remaining=10 ** draw.uniform(3, 8)))
    rated = time.process_time()
    allocate(demands, {"accelerator": 4.0 * count})
    ended = time.process_time()
    return {
        f"{count:,} jobs: fits of 12 samples each": fitted - began,
        f"{count:,} jobs: {len(sizes)} sizes of each rated": rated - fitted,
        f"{count:,} jobs: {4 * count:,} accelerators divided": ended - rated,
        f"{count:,} jobs: all of it": ended - began,
    }


def show_time(jobs: int) -> dict[str, float]:
    """Print and return all of them."""
    times = {**one_job(), **many_jobs(jobs)}
    table(("CPU time, one core", "ms"), [(name, f"{1e3 * t:,.1f}") for name, t in times.items()])
    return times


def main() -> None:
    """Run the parts, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["fits", "cluster", "time"])
    parser.add_argument("--workload", type=int, default=6, choices=range(1, 7))
    parser.add_argument("--policies", nargs="+", default=[], help="beginnings of their names")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results/planning.json"
    )
    args = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {
        "fits": show_fits,
        "cluster": lambda: show_cluster(args.workload, args.policies),
        "time": lambda: show_time(args.jobs),
    }
    found = json.loads(args.output.read_text()) if args.output.exists() else {}
    for part in args.parts:
        key = f"{part}-{args.workload}" if part == "cluster" else part
        found[key] = parts[part]()
    args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
