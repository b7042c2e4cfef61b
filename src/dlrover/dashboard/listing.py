"""The jobs of this machine's state directories, with what their files tell."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dlrover._util import decoding
from dlrover.dashboard.inspect import roles
from dlrover.errors import DLRoverError
from dlrover.roles.client import load_config
from dlrover.roles.coordinator.jobs import directory_of
from dlrover.rpc.client import connect
from dlrover.spec.jobdir import (
    JobDir,
    MasterAddress,
    MasterConfig,
    decode,
)
from dlrover.spec.outcome import Outcome
from dlrover.spec.words import counted

MOST = 200
"""Most jobs of a source in the list, unless ``--jobs`` says another number."""
ANSWER_TIME = 1.5
"""Seconds that a master has to tell the status of its job for the list."""


class JobList:
    """Jobs below state directories, and those in directories that were named. Each has an id for its address.

    Only the latest ``most`` jobs are known.
    """

    def __init__(
        self, states: Iterable[Path], named: Iterable[Path] = (), most: int = MOST
    ) -> None:
        self._states = tuple(states)
        self._named = tuple(map(_real, named))
        self._most = most
        self.more = False
        """True if there were more jobs than that."""
        self._read: dict[Path, tuple[tuple[float, float], dict[str, Any]]] = {}

    def paths(self) -> dict[str, Path]:
        """Return the directories of all jobs by id, the latest first."""
        found = dict.fromkeys((*self._named, *self._below()))
        dated = {path: when for path in found if _is_text(path) and (when := _began(path))}
        self.more = len(dated) > self._most
        latest = sorted(dated, key=lambda path: dated[path], reverse=True)[: self._most]
        return {job_id(path): path for path in latest}

    def find(self, job: str) -> JobDir | None:
        """Return the directory of the job, or of the role of a job, with an id; None if there is none."""
        every = self.paths()
        below = (role for path in every.values() for role in (path / "roles").glob("*"))
        path = every.get(job) or next((role for role in below if job_id(role) == job), None)
        return None if path is None else JobDir(path)

    def jobs(self) -> list[dict[str, Any]]:
        """Return a row for each job."""
        return [self._row(name, path) for name, path in self.paths().items()]

    def _below(self) -> Iterator[Path]:
        """Yield the job directories of the states, and below them those of the earlier runs in each."""
        for state in self._states:
            with contextlib.suppress(OSError):
                for path in (state / "jobs").iterdir():
                    yield _real(path)
                    yield from map(_real, path.glob("run-*"))
            yield _real(state / "last")

    def _row(self, name: str, path: Path) -> dict[str, Any]:
        job_dir = JobDir(path)
        seen = (_began(path), _changed(job_dir.outcome))
        known = self._read.get(path)
        if known is None or known[0] != seen:
            known = self._read[path] = (seen, _content(job_dir))
        return {"id": name, "dir": str(path), "began": _began(path), **known[1]}


async def ask_masters(rows: list[dict[str, Any]]) -> None:
    """Add to the rows of jobs without an outcome what their masters say."""
    await asyncio.gather(*(_ask(row) for row in rows if not row["phase"]))


async def _ask(row: dict[str, Any]) -> None:
    job_dir = JobDir(Path(row["dir"]))
    row["phase"] = "interrupted"  # without a master and an outcome
    damaged = (UnicodeDecodeError, OverflowError, msgspec.DecodeError)
    away = (DLRoverError, OSError, asyncio.TimeoutError, *damaged)
    with contextlib.suppress(*away):
        address = decoding.json(job_dir.master.read_bytes(), MasterAddress)
        row["reason"] = f"its master does not answer at {address.address}"
        if job_dir.roles.exists():
            of_roles = await asyncio.wait_for(roles.ask(job_dir), ANSWER_TIME)
            restarts = sum(role.restarts for role in of_roles.roles)
            row |= {"phase": of_roles.phase, "reason": "", "restarts": restarts}
            row["seconds"] = of_roles.seconds
            return
        async with connect(job_dir, ANSWER_TIME) as master:
            status = await master.status()
        row |= {
            "phase": status.phase,
            "reason": status.waiting_for,
            "seconds": status.seconds,
            "steps": status.total_steps,
            "nodes": sum(node.node_rank >= 0 for node in status.nodes),
            "restarts": status.restarts,
        }


def _content(job_dir: JobDir) -> dict[str, Any]:
    row: dict[str, Any] = {"name": job_dir.path.name, "phase": "", "problem": "", "nodes": ""}
    try:
        if job_dir.roles.exists():
            of_roles = load_config(job_dir).job
            row |= {"name": of_roles.name, "nodes": counted(len(of_roles.roles), "role")}
        else:
            job = decode(job_dir.job, job_dir.job.read_bytes(), MasterConfig).job
            least, most = job.min_nodes, job.max_nodes
            row |= {"name": job.name, "nodes": str(most) if least == most else f"{least}:{most}"}
    except DLRoverError as error:
        row["problem"] = str(error)
    except (OSError, msgspec.DecodeError) as error:
        row["problem"] = f"job.json cannot be read: {error}"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        outcome = decoding.json(job_dir.outcome.read_bytes(), Outcome)
        ratio = outcome.goodput.goodput_ratio if outcome.goodput is not None else None
        row |= {
            "phase": "succeeded" if outcome.exit_code == 0 else "failed",
            "reason": outcome.verdict.title if outcome.verdict else outcome.reason,
            "seconds": outcome.seconds,
            "steps": outcome.steps,
            "restarts": outcome.restarts,
            "goodput": ratio,
        }
    return row


def _real(path: Path) -> Path:
    """Return a path without links; one that leads in a circle stays."""
    return Path(os.path.realpath(path))


def _is_text(path: Path) -> bool:
    """Return whether a path can be part of a page: a file's name may be any bytes."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _began(path: Path) -> float:
    """Return when the latest run in a job directory began, in seconds since the epoch; 0.0: there is none."""
    return _changed(JobDir(path).roles) or _changed(JobDir(path).job)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def roles_pages(job_dir: JobDir, names: Iterable[str]) -> dict[str, str]:
    """Return the id of each role whose own job has begun, by the role's name."""
    own = {name: directory_of(job_dir.path, name) for name in names}
    return {name: job_id(role.path) for name, role in own.items() if role.job.exists()}


def job_id(path: Path) -> str:
    """Return an id that a part of an address can hold: the directory's name and a hash of its path."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in path.name)
    return f"{plain[:80]}~{hashlib.sha256(str(path).encode()).hexdigest()[:6]}"
