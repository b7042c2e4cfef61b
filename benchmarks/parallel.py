"""The planner of parallel strategies beside published runs: memory, step time, chosen plans, and search times.

``benchmarks/README.md`` explains the figures and names the sources of the data, whose folder this takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import parallel_data as data
from parallel_data import GIB, Run

from dlrover.accelerate import (
    Cluster,
    Observation,
    Strategy,
    Transformer,
    calibrate,
    predict,
    search,
)
from dlrover.planning.parallel import memory as model
from dlrover.planning.parallel.accelerators import ACCELERATORS
from dlrover.planning.parallel.columns import Columns
from dlrover.planning.parallel.predict import Predicted, predict_all
from dlrover.planning.parallel.rules import PlannedJob, obeys

FOLDS = 5
LLAMA_8B = Transformer(32, 4096, 14336, 32, 8, 128256)
LLAMA_70B = Transformer(80, *data.LLAMA_70B)
LLAMA_405B = Transformer(126, *data.LLAMA_405B)
BRIDGE_8B, BRIDGE_70B, BRIDGE_405B = (
    replace(shape, fused=True) for shape in (LLAMA_8B, LLAMA_70B, LLAMA_405B)
)
"""The same as Megatron-LM computes them, whose plans Megatron-Bridge publishes."""
CONSTANTS = {
    "LOGIT_BYTES": (7.0, 9.0, 11.0, 13.0),
    "COPIES": (0.0, 1.0, 2.0),
    "GAPS": (0.03, 0.06, 0.1),
    "GAPS_TENSOR": (0.06, 0.12, 0.18, 0.24),
}
"""Constants of the memory model without ZeRO's stage 3, and what else each could be."""
GATHERED = {"LOGIT_BYTES_GATHERED": (10.0, 12.0, 14.0), "GAPS_GATHERED": (0.05, 0.1, 0.15, 0.2)}
"""The same for stage 3."""

Row = Sequence[str]


def table(head: Row, rows: Iterable[Row]) -> None:
    """Print rows as Markdown."""
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows), end="\n\n")


def share(value: float) -> str:
    """Per cent with one digit."""
    return f"{100 * value:.1f} %"


# ---- memory


def jobs(runs: Sequence[Run]) -> dict[PlannedJob, list[int]]:
    """The runs by job: those of one job are predicted at once."""
    found: dict[PlannedJob, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        found[PlannedJob(run.shape, run.cluster, run.sequence, run.global_batch)].append(index)
    return found


def memories(runs: Sequence[Run]) -> Any:
    """Predicted and measured GiB of each run."""
    pairs = np.zeros((len(runs), 2))
    for job, places in jobs(runs).items():
        of = Columns.of([runs[at].strategy for at in places])
        blocks = model.Blocks(job.model, of, job.sequence)
        full = model.memory(job.model, of, job.sequence, job.global_batch)
        ends = {
            name: model.rank(blocks, job.global_batch, first=name == "first")
            for name in ("first", "last")
        }
        for index, at in enumerate(places):
            run = runs[at]
            found = ends.get(run.stage, full)
            # where a set has both, the reserved memory is compared
            bytes_ = found.total if run.reserved else found.active
            pairs[at] = bytes_[index] / GIB, run.reserved or run.allocated
    return pairs


def inside(runs: Sequence[Run]) -> float:
    """Part of the runs whose memory lies in the predicted interval."""
    pairs = memories(runs)
    sharded = np.array([run.strategy.zero == 3 for run in runs])
    low = np.where(sharded, model.LOW_GATHERED, model.LOW) * pairs[:, 0]
    high = np.where(sharded, model.HIGH_GATHERED, model.HIGH) * pairs[:, 0]
    return float(((low < pairs[:, 1]) & (pairs[:, 1] < high)).mean())


def mean_error(runs: Sequence[Run]) -> float:
    """Mean relative error of the memory."""
    pairs = memories(runs)
    return float(np.abs(pairs[:, 0] / pairs[:, 1] - 1).mean())


def fitted(others: Sequence[Sequence[Run]], grid: dict[str, tuple[float, ...]]) -> dict[str, float]:
    """The constants with the least mean error, over all sets alike."""
    names = list(grid)
    choices = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*grid.values())
    ]

    def error(constants: dict[str, float]) -> float:
        with_constants(constants)
        return float(np.mean([mean_error(runs) for runs in others]))

    before = {name: getattr(model, name) for name in names}
    best = min(choices, key=error)
    with_constants(before)
    return best


def with_constants(constants: dict[str, float]) -> None:
    """Set constants of the memory model."""
    for name, value in constants.items():
        setattr(model, name, value)


def memory_table(sets: dict[str, list[Run]], grid: dict[str, tuple[float, ...]]) -> list[Any]:
    """Errors of each set as shipped, and with constants fitted to the other sets only."""
    shipped = {name: getattr(model, name) for name in grid}
    rows = []
    for name, runs in sets.items():
        ours = memories(runs)
        with_constants(fitted([other for key, other in sets.items() if key != name], grid))
        out = memories(runs)
        with_constants(shipped)
        errors, blind = (pairs[:, 0] / pairs[:, 1] - 1 for pairs in (ours, out))
        rows.append(
            {
                "set": name, "runs": len(runs), "mean": float(np.abs(errors).mean()),
                "median": float(np.median(np.abs(errors))), "bias": float(np.median(errors)),
                "left_out_mean": float(np.abs(blind).mean()),
                "left_out_median": float(np.median(np.abs(blind))),
                "inside": inside(runs),
            }
        )  # fmt: skip
    head = (
        "set",
        "runs",
        "mean",
        "median",
        "bias",
        "mean, left out",
        "median, left out",
        "in the interval",
    )
    keys = ("mean", "median", "bias", "left_out_mean", "left_out_median", "inside")
    table(head, [(r["set"], str(r["runs"]), *(share(r[key]) for key in keys)) for r in rows])
    return rows


def two_kinds(runs: Sequence[Run]) -> dict[str, float]:
    """Errors if it were known whether a run keeps the inputs that tensor parallelism gathers, or gathers them again.

    The table does not say; the nearer of both predictions is taken, so this is no error of a prediction.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(run.model for run in runs):
        here = [run for run in runs if run.model == name]
        pairs, kept = memories(here), np.zeros(len(here))
        for job, places in jobs(here).items():
            of = Columns.of([here[at].strategy for at in places])
            blocks = model.Blocks(job.model, of, job.sequence)
            full = model.memory(job.model, of, job.sequence, job.global_batch)
            part = np.where(of.tp > 1, 4 * job.model.hidden / blocks.kept(experts=False), 0.0)
            kept[places] = full.activations * part / GIB
        both = np.stack([pairs[:, 0], pairs[:, 0] + kept]) / pairs[:, 1] - 1
        found[name] = float(np.abs(both).min(axis=0).mean())
    table(("playbook, the nearer of two kinds", "mean"), [(k, share(v)) for k, v in found.items()])
    return found


def rated(runs: Sequence[Run]) -> list[tuple[Predicted, Any, list[int]]]:
    """Predictions of runs, job by job, with whether each obeys the rules."""
    found = []
    for job, places in jobs(runs).items():
        of = Columns.of([runs[at].strategy for at in places])
        found.append((predict_all(job, of), obeys(job, of), places))
    return found


def fits(runs: Sequence[Run]) -> Any:
    """Whether each run is predicted to fit, and to obey the rules."""
    good = np.zeros(len(runs), dtype=bool)
    for predicted, obeyed, places in rated(runs):
        good[places] = predicted.fits & obeyed
    return good


def failures(runs: Sequence[Run]) -> dict[str, float]:
    """The failed runs that are flagged, and the runs that worked and are flagged."""
    good, failed = fits(runs), np.array([run.failed for run in runs])
    found = {"flagged": float((~good)[failed].mean()), "false": float((~good)[~failed].mean())}
    for name in sorted({run.model for run in runs}):
        here = np.array([run.model == name for run in runs])
        found[f"flagged {name}"] = float((~good)[failed & here].mean())
        found[f"false {name}"] = float((~good)[~failed & here].mean())
    table(("failed runs of the playbook", "flagged", "false alarms"), [
        (name or "all", share(found[f"flagged {name}".strip()]), share(found[f"false {name}".strip()]))
        for name in ("", *sorted({run.model for run in runs}))
    ])  # fmt: skip
    return found


# ---- time


def observations(runs: Iterable[Run]) -> list[Observation]:
    """The runs as the planner takes them."""
    return [
        Observation(run.shape, run.strategy, run.sequence, run.global_batch, run.seconds)
        for run in runs
    ]


def seconds(runs: Sequence[Run], cluster: Cluster) -> Any:
    """Predicted seconds of each run with what a cluster was calibrated to."""
    found = np.zeros(len(runs))
    known = {name: getattr(cluster, name) for name in ("coefficients", "spread", "residuals")}
    moved = [replace(run, cluster=replace(run.cluster, **known)) for run in runs]
    for job, places in jobs(moved).items():
        found[places] = predict_all(job, Columns.of([runs[at].strategy for at in places])).seconds
    return found


def blind(
    runs: Sequence[Run], start: Cluster, groups: Sequence[Any], *, residuals: bool = True
) -> Any:
    """Predicted seconds of each run, calibrated without its group, and the intervals' half widths.

    Without ``residuals``, what the fit misses of whole kinds of runs stays missed.
    """
    found, widths = np.zeros(len(runs)), np.zeros(len(runs))
    for group in dict.fromkeys(groups):
        here = [at for at, other in enumerate(groups) if other == group]
        others = [run for run, other in zip(runs, groups, strict=True) if other != group]
        cluster = calibrate(start, observations(others))
        cluster = cluster if residuals else replace(cluster, residuals=())
        found[here] = seconds([runs[at] for at in here], cluster)
        widths[here] = cluster.spread
    return found, widths


def folds(runs: Sequence[Run]) -> list[int]:
    """A fold for each run, drawn with a fixed seed."""
    order = np.random.default_rng(0).permutation(len(runs))
    found = np.zeros(len(runs), dtype=int)
    found[order] = np.arange(len(runs)) % FOLDS
    return [int(each) for each in found]


def time_table(sets: dict[str, list[Run]], neutral: tuple[float, ...]) -> list[Any]:
    """Errors of each set with the shipped coefficients, and calibrated in folds and without one model.

    The calibrations start from coefficients that the other sets alone led to.
    """
    rows = []
    for name, runs in sets.items():
        measured = np.array([run.seconds for run in runs])
        others = [run for key, other in sets.items() if key != name for run in other]
        start = replace(runs[0].cluster, coefficients=neutral)
        start = calibrate(start, observations(others)) if others else start
        fold, widths = blind(runs, start, folds(runs))
        lone, _ = blind(runs, start, [run.model for run in runs])
        off = [
            np.abs(each / measured - 1)
            for each in (seconds(runs, Cluster(runs[0].cluster.accelerator)), fold, lone)
        ]
        inside = np.abs(np.log(fold / measured)) < np.log1p(widths)
        rows.append(
            {
                "set": name, "runs": len(runs), "shipped": float(np.median(off[0])),
                "folds_mean": float(off[1].mean()), "folds_median": float(np.median(off[1])),
                "model_mean": float(off[2].mean()), "model_median": float(np.median(off[2])),
                "inside": float(inside.mean()),
            }
        )  # fmt: skip
    keys = ("shipped", "folds_mean", "folds_median", "model_mean", "model_median", "inside")
    head = (
        "set",
        "runs",
        "shipped, median",
        "5 folds, mean",
        "median",
        "one model left out, mean",
        "median",
        "in the interval",
    )
    table(head, [(r["set"], str(r["runs"]), *(share(r[key]) for key in keys)) for r in rows])
    return rows


def fp8(folder: Path, neutral: tuple[float, ...]) -> dict[str, Any]:
    """Runs in fp8: llm-foundry's, calibrated from those in bf16 alone, and how much faster torchtitan's are than in bf16."""
    plain, runs = data.foundry(folder, "h100"), data.foundry(folder, "h100", "fp8")
    cluster = calibrate(Cluster("h100-80", coefficients=neutral), observations(plain))
    found = seconds(runs, cluster) / np.array([run.seconds for run in runs]) - 1
    rows = [
        (f"llm-foundry {run.model}, {run.sequence}", share(float(off)))
        for run, off in zip(runs, found, strict=True)
    ]
    gains = []
    for ranks, slow, fast in data.FP8:
        one = Strategy(dp_shard=ranks, micro_batch=2, recompute="selective", compile=True)
        both = [
            predict(
                LLAMA_8B, replace(one, precision=name), Cluster("h100-96", ranks // 8),
                sequence=8192, global_batch=2 * ranks,
            ).tokens_per_second
            for name in ("bf16", "fp8")
        ]  # fmt: skip
        gains.append((both[1] / both[0], fast / slow))
        rows.append(
            (f"torchtitan, {ranks} ranks: gain", "{:.2f}, measured {:.2f}".format(*gains[-1]))
        )
    table(("fp8", "error"), rows)
    return {"llm-foundry": [float(off) for off in found], "torchtitan": gains}


def choices(runs: Sequence[Run], neutral: tuple[float, ...]) -> dict[str, Any]:
    """Speed of the plan that is chosen among the measured ones, as a part of the best one's, by model and nodes."""
    good = [run for run in runs if not run.failed]
    allowed = fits(good)
    start = Cluster("h100-80", coefficients=neutral)
    models = [run.model for run in good]
    left_out, _ = blind(good, start, models)
    terms, _ = blind(good, start, models, residuals=False)
    shipped = seconds(good, Cluster("h100-80"))
    cells: dict[str, list[int]] = defaultdict(list)
    for at, run in enumerate(good):
        cells[f"{run.model} {run.cluster.nodes}"].append(at)
    found = {}
    for cell, places in cells.items():
        fitting = [at for at in places if allowed[at]] or places
        best = min(good[at].seconds for at in places)
        found[cell] = [
            best / good[min(fitting, key=lambda at, of=predicted: of[at])].seconds
            for predicted in (left_out, terms, shipped)
        ]
    means = np.mean(list(found.values()), axis=0)
    measured = np.array([run.seconds for run in good])
    errors = [
        float(np.median(np.abs(predicted / measured - 1)))
        for predicted in (left_out, terms, shipped)
    ]
    table(("model, nodes", "its model left out", "and without residuals", "shipped"), [
        *((cell, *(f"{part:.2f}" for part in parts)) for cell, parts in found.items()),
        ("mean", *(f"{mean:.3f}" for mean in means)),
        ("time, median error", *map(share, errors)),
    ])  # fmt: skip
    names = ("left_out", "left_out_terms", "shipped")
    return {
        "cells": found,
        **dict(zip(names, map(float, means), strict=True)),
        "median_errors": dict(zip(names, errors, strict=True)),
    }


# ---- search


PUBLISHED = [  # source, shape, nodes of 8 H100, sequence, batch, tp, pp, cp, ep of the published plan, its products
    ("Llama 3 405B on 8,192", LLAMA_405B, 1024, 8192, 2048, (8, 16, 1, 1), "bf16"),
    ("Llama 3 405B on 16,384", LLAMA_405B, 2048, 8192, 2048, (8, 16, 1, 1), "bf16"),
    ("Llama 3 405B on 16,384, long", LLAMA_405B, 2048, 131072, 128, (8, 16, 16, 1), "bf16"),
    ("Megatron-Bridge Llama 3 8B on 8, FP8", BRIDGE_8B, 1, 8192, 128, (1, 1, 1, 1), "fp8"),
    ("Megatron-Bridge Llama 3 70B on 64, FP8", BRIDGE_70B, 8, 8192, 256, (4, 8, 1, 1), "fp8"),
    (
        "Megatron-Bridge Llama 3 405B on 1,024, FP8",
        BRIDGE_405B,
        128,
        8192,
        1536,
        (8, 8, 2, 1),
        "fp8",
    ),
]


def searches() -> list[Any]:
    """Place of published plans in the search, what it finds, and its CPU time."""
    rows = []
    for name, shape, nodes, sequence, batch, plan, precision in PUBLISHED:
        started = time.process_time()
        found = search(
            shape,
            Cluster("h100-80", nodes),
            sequence=sequence,
            global_batch=batch,
            limit=10**6,
            precision=precision,
        )
        used = time.process_time() - started
        degrees = [(one.tp, one.pp, one.cp, one.ep) for one, _ in found]
        place = degrees.index(plan) + 1 if plan in degrees else 0
        slower = found[place - 1][1].step_seconds / found[0][1].step_seconds - 1 if place else 0.0
        rows.append(
            {"plan": name, "place": place, "slower": slower, "first": degrees[0], "seconds": used}
        )
    head = (
        "published plan",
        "tp, pp, cp, ep",
        "place",
        "slower than the first",
        "the first",
        "search, CPU s",
    )
    table(head, [
        (row["plan"], str(plan[5]), str(row["place"] or "-"), share(row["slower"]), str(row["first"]), f"{row['seconds']:.2f}")
        for row, plan in zip(rows, PUBLISHED, strict=True)
    ])  # fmt: skip
    return rows


def estimates() -> list[Any]:
    """What the search proposes for two well-known sizes."""
    rows = []
    for shape, nodes, batch in ((LLAMA_70B, 8, 256), (LLAMA_405B, 2048, 2048)):
        for one, predicted in search(
            shape, Cluster("h100-80", nodes), sequence=8192, global_batch=batch, limit=3
        ):
            rows.append(_estimate(shape, nodes, one, predicted))
    keys = list(rows[0])
    table(keys, [[str(row[key]) for key in keys] for row in rows])
    return rows


def _estimate(shape: Transformer, nodes: int, one: Strategy, predicted: Any) -> dict[str, Any]:
    return {
        "parameters": f"{shape.parameters / 1e9:.0f} B", "H100": 8 * nodes,
        "dp": f"{one.dp_replicate} x {one.dp_shard}", "zero": one.zero, "tp": one.tp,
        "pp": f"{one.pp} x {one.virtual}", "cp": one.cp, "micro-batch": one.micro_batch,
        "recompute": one.recompute, "GiB": round(predicted.memory_gib, 1),
        "step (s)": round(predicted.step_seconds, 2),
        "tokens/s": round(predicted.tokens_per_second),
    }  # fmt: skip


PARTS: dict[str, Callable[[Path], Any]] = {}


def part(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Make a function a part of this benchmark."""
    PARTS[function.__name__] = function
    return function


@part
def memory(folder: Path) -> Any:
    """Memory: unsharded parameters, ZeRO's stage 3, and the runs that failed."""
    runs = data.playbook(folder)
    worked = [run for run in runs if not run.failed]
    sets = {
        **{f"playbook {name}": [r for r in worked if r.model == name] for name in data.NANOTRON},
        "SimuMax": data.simumax(folder),
        "Megatron CI, large": data.megatron(folder),
    }
    sets = {name: runs for name, runs in sets.items() if runs}
    titan = data.torchtitan()
    gathered = {
        name: [r for r in titan if r.model == name] for name in ("Llama 3 8B", "Llama 2 7B")
    }
    found = {
        "unsharded": memory_table(sets, CONSTANTS),
        "stage 3": memory_table(
            {f"torchtitan {n}": rows for n, rows in gathered.items()}, GATHERED
        ),
        "two kinds": two_kinds(worked),
        "failures": failures(runs),
    }
    large = [run for run in titan if run.model not in gathered]
    table(("torchtitan, large", "predicted", "measured"), [
        (run.model, f"{a:.1f} GiB", f"{b:.1f} GiB")
        for run, (a, b) in zip(large, memories(large), strict=True)
    ])  # fmt: skip
    return found


@part
def times(folder: Path) -> Any:
    """Step times. What calibrations start from are the other accelerator's coefficients, which saw none of the runs."""
    ampere, hopper = (ACCELERATORS[name].coefficients for name in ("a100-80", "h100-80"))
    return {
        "a100": time_table(
            {
                "vTrain, 64 and 512 GPUs": data.vtrain(folder, "multi"),
                "vTrain, one node": data.vtrain(folder, "single"),
                "llm-foundry A100": data.foundry(folder, "a100"),
            },
            hopper,
        ),
        "h100": time_table({"llm-foundry H100": data.foundry(folder, "h100")}, ampere),
        "b200": time_table({"SimuMax": data.simumax(folder, timed=True)}, ampere),
        "fp8": fp8(folder, ampere),
    }


@part
def plans(folder: Path) -> Any:
    """Chosen plans of the playbook."""
    return choices(data.playbook(folder), ACCELERATORS["a100-80"].coefficients)


@part
def noise(folder: Path) -> Any:
    """Runs of the playbook that differ in nothing, or in ZeRO's stage (0 or 1) alone: what no model can know."""
    runs = [run for run in data.playbook(folder) if not run.failed]
    same: dict[Any, list[Run]] = defaultdict(list)
    for run in runs:
        same[run.model, run.strategy].append(run)
    alike: dict[Any, list[int]] = defaultdict(list)
    for at, run in enumerate(runs):
        alike[run.model, replace(run.strategy, zero=0)].append(at)
    ratios = [
        max(a, b) / min(a, b)
        for places in alike.values()
        for a, b in itertools.combinations([runs[at].seconds for at in places], 2)
    ]
    repeated = [group for group in same.values() if len(group) > 1]
    memories_ = [sorted(run.reserved for run in group) for group in repeated]
    speeds = [sorted(run.seconds for run in group) for group in repeated]
    found = {
        "repeated": len(repeated),
        "memory": float(np.mean([(a[-1] - a[0]) / np.mean(a) for a in memories_])),
        "time": float(np.mean([a[-1] / a[0] for a in speeds])),
        "pairs": len(ratios),
        "pairs_time": float(np.mean(ratios)),
        "pairs_1.5": float(np.mean(np.array(ratios) > 1.5)),
        "oracle": _by_partner(runs, alike),
    }
    table(("noise of the playbook", ""), [(key, f"{value:.3g}") for key, value in found.items()])
    return {**found, "slow": _slow(runs), "vtrain": _affine(data.vtrain(folder, "single"))}


def _slow(runs: Sequence[Run]) -> dict[str, float]:
    """Part of the runs each of whose micro-batches takes 0.4 seconds more than predicted without the model, by pipeline and nodes."""
    start = Cluster("h100-80", coefficients=ACCELERATORS["a100-80"].coefficients)
    predicted, _ = blind(runs, start, [run.model for run in runs], residuals=False)
    groups: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for run, found in zip(runs, predicted, strict=True):
        rounds = run.global_batch / (run.strategy.dp * run.strategy.micro_batch)
        late = run.seconds > max(found + 0.4 * rounds, 1.5 * found)
        groups["pipeline" if run.strategy.pp > 1 else "none", run.cluster.nodes].append(bool(late))
    parts = {f"{kind} {nodes}": float(np.mean(late)) for (kind, nodes), late in groups.items()}
    table(("pipeline, nodes", "slow runs"), [(key, share(each)) for key, each in parts.items()])
    return parts


def _affine(runs: Sequence[Run]) -> float:
    """Mean error of a run of vTrain on the line through the others that differ from it in the number of layers alone."""
    alike: dict[Any, list[tuple[int, float]]] = defaultdict(list)
    for run in runs:
        key = run.shape.hidden, run.global_batch, run.strategy
        alike[key].append((run.shape.layers, run.seconds))
    errors = []
    for rows in (np.array(rows) for rows in alike.values() if len(rows) > 3):
        for at in range(len(rows)):
            line = np.polyfit(*np.delete(rows, at, axis=0).T, 1)
            errors.append(abs(np.polyval(line, rows[at, 0]) / rows[at, 1] - 1))
    table(("vTrain, one node", "off the line"), [(str(len(errors)), share(float(np.mean(errors))))])
    return float(np.mean(errors))


def _by_partner(runs: Sequence[Run], alike: dict[Any, list[int]]) -> float:
    """Speed of the chosen plan as a part of the best one's, if a plan's time is that of the run which differs in ZeRO's stage alone."""
    partner: dict[int, float] = {}
    for places in alike.values():
        for at in places if len(places) > 1 else ():
            others = [np.log(runs[other].seconds) for other in places if other != at]
            partner[at] = float(np.mean(others))
    cells: dict[Any, list[int]] = defaultdict(list)
    for at, run in enumerate(runs):
        cells[run.model, run.cluster.nodes].append(at)
    parts = []
    for places in cells.values():
        known = [at for at in places if at in partner]
        if known:
            best = min(runs[at].seconds for at in places)
            parts.append(best / runs[min(known, key=partner.__getitem__)].seconds)
    return float(np.mean(parts))


@part
def published(_: Path) -> Any:
    """Published plans, and the time of searches."""
    return {"searches": searches(), "estimates": estimates()}


def main() -> None:
    """Print the tables, and write all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with the data sets")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    found = {name: PARTS[name](options.folder) for name in options.parts.split(",")}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
