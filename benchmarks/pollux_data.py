"""The measurements that were published with Pollux (OSDI 2021): step times, gradient noise, arrivals of jobs."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import LinearNDInterpolator

from dlrover.planning.allreduce import RingSample, RingShape
from tests.support.workload import Placement, SimulatedJob

DATA = Path(__file__).parent / "data" / "pollux"
NAMES = ("imagenet", "bert", "cifar10", "deepspeech2", "ncf", "yolov3")
EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
"""Epochs of a job in the published simulations."""
REPLICA_MOST = {"yolov3": 8}
"""Largest batch of one replica there, where it is not the largest measured one."""


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def _validation(folder: Path) -> dict[int, Any]:
    """By batch: progress, squared norm and variance of the gradients after each epoch."""
    tables = {}
    for path in folder.glob("validation-*.csv"):
        table = [
            [float(row[name]) for name in ("progress", "grad_sqr", "grad_var")]
            for row in _rows(path)
        ]
        tables[int(path.stem.split("-")[1])] = np.array(table)
    return dict(sorted(tables.items()))


class Measured:
    """A kind of job, by its tables."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.placements: dict[Placement, Any] = {}
        for row in _rows(DATA / "traces" / name / "placements.csv"):
            where = tuple(int(digit) for digit in row["placement"])
            point = [float(row[key]) for key in ("local_bsz", "step_time", "sync_time")]
            self.placements.setdefault(where, []).append(point)
        self.placements = {where: np.array(rows) for where, rows in self.placements.items()}
        names = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        scalability = _rows(DATA / "traces" / name / "scalability.csv")
        self.scalability = np.array([[float(row[key]) for key in names] for row in scalability])
        self._validation = _validation(DATA / "traces" / name)
        batches = np.concatenate(list(self.placements.values()))[:, 0]
        self.reference_batch, self.most_batch = min(self._validation), max(self._validation)
        self.replica_least = int(batches.min())
        self.replica_most = REPLICA_MOST.get(name, int(batches.max()))
        self.epochs = EPOCHS[name]
        self.times = cache(self._times)
        self._progress = [
            0.0,
            *np.min([t[: self.epochs, 0] for t in self._validation.values()], axis=0),
        ]

    def samples(self) -> list[RingSample]:
        """Every measured step."""
        found = []
        for where, rows in self.placements.items():
            found += [_sample(len(where), sum(where), *row) for row in rows]
        return found + [_sample(int(row[0]), int(row[1]), *row[2:]) for row in self.scalability]

    def progress(self, epoch: int) -> float:
        """Steps of the reference batch that make up the first ``epoch`` epochs."""
        return float(self._progress[epoch])

    def gradients(self, batch: int, epoch: int) -> tuple[float, float]:
        """Squared norm and variance, between the two nearest measured batches."""
        known = list(self._validation)
        rows = [self._validation[size][epoch] for size in known]
        square, variance = (
            np.interp(batch, known, [row[index] for row in rows]) for index in (1, 2)
        )
        return float(square), float(variance)

    def _times(self, replicas: Placement, batch: int) -> tuple[float, float]:
        """Of the measured placement if there is one, else between the measured sizes."""
        turned = min(replicas[i:] + replicas[:i] for i in range(len(replicas)))
        rows = self.placements.get(turned)
        if rows is not None:
            return (
                float(np.interp(batch, rows[:, 0], rows[:, 1])),
                float(np.interp(batch, rows[:, 0], rows[:, 2])),
            )
        step, exchange = self._between([min(len(replicas), 16), sum(replicas), batch])[0]
        if np.isnan(step):
            raise ValueError(f"{self.name} was not measured near {replicas} with batch {batch}")
        return float(step), float(exchange)

    @property
    def _between(self) -> LinearNDInterpolator:
        if not hasattr(self, "_interpolator"):
            groups: dict[tuple[float, ...], list[Any]] = {}
            for where, rows in self.placements.items():
                for batch, *times in rows:
                    groups.setdefault((len(where), sum(where), batch), []).append(times)
            points = [[*key, *np.mean(times, axis=0)] for key, times in groups.items()]
            table = np.concatenate([np.array(points), self.scalability])
            self._interpolator = LinearNDInterpolator(table[:, :3], table[:, 3:])
        return self._interpolator


def _sample(nodes: int, replicas: int, batch: float, step: float, exchange: float) -> RingSample:
    return RingSample(RingShape(nodes, replicas, int(batch)), step, max(step - exchange, 1e-6))


@cache
def application(name: str) -> Measured:
    """The tables of one kind of job."""
    return Measured(name)


def workload(number: int = 6) -> list[SimulatedJob]:
    """The jobs of a published workload."""
    return [
        SimulatedJob(
            name=row["name"],
            application=application(row["application"]),
            submitted=float(row["time"]),
            wanted_replicas=int(row["num_replicas"]),
            wanted_batch=int(row["batch_size"]),
        )
        for row in _rows(DATA / "workloads" / f"workload-{number}.csv")
    ]
