"""Records of failed workers: how each ended, what it recorded and wrote, and what its node saw."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlrover._util import cgroup
from dlrover.agent.workers.facts import NodeFacts
from dlrover.agent.workers.logs import AttemptLogs
from dlrover.spec.failure import ENDED_WELL, OWN_ENDS, Failure, FailureKind
from dlrover.training.worker.progress import Board

if TYPE_CHECKING:
    from dlrover.agent.workers.workers import Worker


_CODE = re.compile("-?[0-9]{1,9}")
RANKS_NAMED = 8
"""Ranks that a fact names; the others are only counted."""


class FailureRecords:
    """Makes the records of one node's failed workers.

    Args:
        board: the workers' progress.
        hostname: the node's host.
    """

    def __init__(self, board: Board, hostname: str) -> None:
        self._board = board
        self._hostname = hostname
        self._oom_kills = 0
        self._facts = NodeFacts()

    def begin(self) -> None:
        """Begin with the workers of a round."""
        self._oom_kills = cgroup.oom_kills()
        self._facts.begin()

    def record(
        self,
        worker: Worker,
        status: int,
        node_id: int,
        round_: int,
        logs: AttemptLogs,
        ended_well: Sequence[int] = (),
    ) -> Failure:
        """Return the record of a worker that ended with a wait status other than 0.

        ``ended_well``: ranks that had ended without an error before.
        """
        error = recorded_error(logs.error_file(worker.local_rank))
        signaled = os.WIFSIGNALED(status)
        kind = FailureKind.SIGNAL if signaled else FailureKind.EXIT
        if error and not signaled and error.type not in OWN_ENDS:
            kind = FailureKind.EXCEPTION
        words, path = logs.last_words(worker.local_rank, signaled=signaled)
        return Failure(
            id=uuid.uuid4().hex,
            kind=kind,
            node_id=node_id,
            rank=worker.rank,
            local_rank=worker.local_rank,
            round=round_,
            pid=worker.pid,
            attempt=worker.attempt,
            time=error.time if kind is FailureKind.EXCEPTION and error.time else time.time(),
            exit_code=None if signaled else os.WEXITSTATUS(status),
            signal=os.WTERMSIG(status) if signaled else None,
            exception=error.type,
            handled_signal=error.handled_signal,
            message=error.message,
            traceback=error.traceback,
            stderr_tail=words,
            log_path=str(path),
            steps=self._board.read(worker.local_rank).steps,
            first_step=self._board.began_with(worker.local_rank),
            reading=self._board.reading(worker.local_rank),
            hostname=self._hostname,
            oom_killed=cgroup.oom_kills() > self._oom_kills,
            node_facts=(
                *_about(ended_well),
                *self._facts.gather(logs.directory, worker.pid if signaled else 0),
            ),
        ).bounded()

    def close(self) -> None:
        """Look for facts no more."""
        self._facts.close()


def _about(ended_well: Sequence[int]) -> list[str]:
    ranks = (
        f"rank{'s' if len(ended_well) > 1 else ''} {', '.join(map(str, ended_well[:RANKS_NAMED]))}"
    )
    more = f" and {len(ended_well) - RANKS_NAMED} more" if len(ended_well) > RANKS_NAMED else ""
    return [f"{ranks}{more} {ENDED_WELL}"] if ended_well else []


@dataclass(frozen=True)
class RecordedError:
    """Content of an error file; empty strings for missing fields."""

    type: str = ""
    message: str = ""
    traceback: str = ""
    time: float = 0.0
    handled_signal: int = 0
    """As in `Failure`."""

    def __bool__(self) -> bool:
        return bool(self.type or self.message or self.traceback)

    @property
    def exit_code(self) -> int:
        """Exit code with which the interpreter leaves after it; never 0."""
        given = self.type == "SystemExit" and _CODE.fullmatch(self.message)
        return (int(self.message) & 0xFF if given else 0) or 1


def recorded_error(path: Path) -> RecordedError:
    """Return the exception in an error file, written by our bootstrap or by torch's ``@record``."""
    content = _read_json(path)
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return RecordedError(message=message)
    if not isinstance(message, dict):
        return RecordedError()
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    text = str(message.get("message", ""))
    name, colon, rest = text.partition(": ")
    try:
        when = float(extra.get("time") or extra.get("timestamp") or 0)
    except (TypeError, ValueError):
        when = 0.0
    handled_signal = extra.get("handled_signal")
    if not isinstance(handled_signal, int) or not 0 < handled_signal < signal.NSIG:
        handled_signal = 0
    return RecordedError(
        type=str(message.get("errorType") or name.partition("(")[0]),
        message=rest if colon and name.isidentifier() else text,
        traceback=str(extra.get("py_callstack", "")),
        time=when if math.isfinite(when) else 0.0,
        handled_signal=handled_signal,
    )


def _read_json(path: Path) -> object:
    """Return the JSON value in a file; None if the file is missing or incomplete."""
    try:
        return json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return None
