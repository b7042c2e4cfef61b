"""The workers' log files, and their copies on the console.

Every worker always writes to files. A background thread copies the output that the launch options
select from the files to the console. So a slow, blocked or closed console does not affect a worker,
and the last lines of a failed worker are available under any options. Output of a Python program that
a full disk does not take goes to memory of the agent, the *overflow*, and from there to the console.
The layout is torchrun's::

    <base>/<run_id>_<random>/attempt_<restart_count>/<local_rank>/{stdout.log,stderr.log,error.json}
    <base>/<run_id>_<random>/attempt_<restart_count>/filtered_{stdout,stderr}.log
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import logging
import os
import string
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dlrover._util import kernel
from dlrover.agent.workers.copying import GrowingFile, LineFormatter, OutputCopier, Pump, Sink
from dlrover.agent.workers.folding import FoldingFormatter, Tracebacks
from dlrover.errors import kind_of
from dlrover.spec.failure import TEXT_LIMIT
from dlrover.spec.job import Std

if TYPE_CHECKING:
    from dlrover.spec.job import LaunchSpec

logger = logging.getLogger(__name__)

STOP_TIMEOUT = 5.0
"""Seconds that `AttemptLogs.stop` gives the console to take the remaining output."""

OUTPUT_TAIL = 4096
"""Bytes of a failed worker's standard output that may explain its end."""
_TRACEBACK = "Traceback (most recent call last):"
_NAMES = {Std.OUT: "stdout", Std.ERR: "stderr"}


class ConsoleMode(enum.Enum):
    """The way in which the console shows one stream of one worker."""

    HIDDEN = "hidden"
    """Not at all; the stream is only in its file."""
    RAW = "raw"
    """Unchanged bytes, as if the worker had inherited the console."""
    PREFIXED = "prefixed"
    """Whole lines, each with a prefix that names the worker."""


def console_mode(launch: LaunchSpec, local_rank: int, stream: Std) -> ConsoleMode:
    """Return how torchrun shows ``stream`` (``Std.OUT`` or ``Std.ERR``) of ``local_rank``.

    With the null device as log directory, everything is shown raw, whatever the other options are.
    """
    if launch.log_dir == os.devnull:
        return ConsoleMode.RAW
    if launch.local_ranks_filter and local_rank not in launch.local_ranks_filter:
        return ConsoleMode.HIDDEN
    if stream in launch.tee.of(local_rank):
        return ConsoleMode.PREFIXED
    if stream in launch.redirects.of(local_rank):
        return ConsoleMode.HIDDEN
    return ConsoleMode.RAW


def line_prefix(launch: LaunchSpec, local_rank: int, rank: int) -> str:
    """Return the prefix of a teed line; unknown names in the template remain as they are."""
    if not launch.log_line_prefix_template:
        return f"[{launch.role}{local_rank}]:"
    template = string.Template(launch.log_line_prefix_template)
    return template.safe_substitute(role_name=launch.role, rank=rank, local_rank=local_rank)


class AttemptLogs:
    """The logs of one attempt: one start of all workers of a node."""

    def __init__(self, launch: LaunchSpec, directory: Path, ranks: Mapping[int, int]) -> None:
        self.directory = directory
        self._launch = launch
        self._ranks = dict(ranks)
        self._copier: OutputCopier | None = None
        self._overflows = {
            (rank, stream): kernel.memfd_create(f"dlrover-{_NAMES[stream]}")
            for rank in ranks
            for stream in _NAMES
        }

    def stdout(self, local_rank: int) -> Path:
        """Return the file for the worker's standard output; the worker's process opens it."""
        return self._path(local_rank, Std.OUT)

    def stderr(self, local_rank: int) -> Path:
        """Return the file for the worker's standard error; the worker's process opens it."""
        return self._path(local_rank, Std.ERR)

    def error_file(self, local_rank: int) -> Path:
        """Return the file in which the worker records its exception (``TORCHELASTIC_ERROR_FILE``)."""
        return self.directory / str(local_rank) / "error.json"

    def overflow(self, local_rank: int, stream: Std) -> str:
        """Return the path of the overflow: memory for output that a full disk does not take."""
        return f"/proc/{os.getpid()}/fd/{self._overflows[local_rank, stream]}"

    def start(self, console_out: BinaryIO, console_err: BinaryIO) -> None:
        """Start copying in a background thread. The files need not exist yet. Call it once."""
        with contextlib.ExitStack() as files:
            pumps = [
                *self._pumps(Std.OUT, console_out, self._launch.duplicate_stdout_filters, files),
                *self._pumps(Std.ERR, console_err, self._launch.duplicate_stderr_filters, files),
            ]
            self._copier = OutputCopier(pumps, files.pop_all())

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """Copy the remaining output, for about ``timeout`` seconds at most. Idempotent.

        Call it when no worker runs any more: later output stays in the files.
        """
        copier, self._copier = self._copier, None
        if copier and not copier.stop(timeout):
            logger.warning(
                "The console did not take all worker output within %g s; it is whole in %s",
                timeout,
                self.directory,
            )
        for fd in self._overflows.values():
            os.close(fd)
        self._overflows = {}

    def stderr_tail(self, local_rank: int, limit: int = TEXT_LIMIT) -> str:
        """Return the last ``limit`` characters of the worker's standard error; empty if unreadable."""
        room = 4 * limit  # bytes: UTF-8 takes up to four per character
        tail = _end_of(self.stderr(local_rank), room)
        if (local_rank, Std.ERR) in self._overflows:
            tail += _end_of(self.overflow(local_rank, Std.ERR), room)
        text = tail.decode(errors="replace")
        return text[max(0, len(text) - limit) :]

    def last_words(self, local_rank: int, *, signaled: bool) -> tuple[str, Path]:
        """Return the end of the worker's standard error, and its file.

        Of standard output instead, if standard error is empty, or only standard output has a traceback and no signal
        ended the worker: the runtime writes why it aborts to standard error, without one.
        """
        errors = self.stderr_tail(local_rank)
        output = _end_of(self.stdout(local_rank), OUTPUT_TAIL).decode(errors="replace")
        printed = not signaled and _TRACEBACK in output and _TRACEBACK not in errors
        if output.strip() and (printed or not errors.strip()):
            return output, self.stdout(local_rank)
        return errors, self.stderr(local_rank)

    def _path(self, local_rank: int, stream: Std) -> Path:
        return self.directory / str(local_rank) / f"{_NAMES[stream]}.log"

    def _pumps(
        self,
        stream: Std,
        console: BinaryIO,
        needles: tuple[str, ...],
        files: contextlib.ExitStack,
    ) -> Iterable[Pump]:
        modes = {rank: console_mode(self._launch, rank, stream) for rank in self._ranks}
        raw = [rank for rank, mode in modes.items() if mode is ConsoleMode.RAW]
        teed = [rank for rank, mode in modes.items() if mode is ConsoleMode.PREFIXED]
        seen = Tracebacks()
        sources = [
            GrowingFile(self._path(rank, stream), self._folder(rank, stream, seen)) for rank in raw
        ]
        sources += self._teed_sources(stream, teed, ())
        for rank in [*raw, *teed]:
            formatter = self._formatter(rank, ()) if rank in teed else None
            sources.append(GrowingFile(Path(self.overflow(rank, stream)), formatter, frees=True))
        yield Pump(f"the console's {_NAMES[stream]}", Sink(console), sources)
        if needles:
            path = self.directory / f"filtered_{_NAMES[stream]}.log"
            file = files.enter_context(path.open("ab", buffering=0))
            yield Pump(str(path), Sink(file), self._teed_sources(stream, teed, needles))

    def _folder(self, local_rank: int, stream: Std, seen: Tracebacks) -> FoldingFormatter | None:
        """Return what folds the tracebacks of a worker's standard error; None where no file keeps them."""
        if stream is not Std.ERR or self._launch.log_dir == os.devnull:
            return None
        path = str(self._path(local_rank, stream))
        return FoldingFormatter(self._ranks[local_rank], path, seen)

    def _teed_sources(
        self, stream: Std, local_ranks: Iterable[int], needles: tuple[str, ...]
    ) -> list[GrowingFile]:
        return [
            GrowingFile(self._path(local_rank, stream), self._formatter(local_rank, needles))
            for local_rank in local_ranks
        ]

    def _formatter(self, local_rank: int, needles: tuple[str, ...]) -> LineFormatter:
        rank = self._ranks[local_rank]
        return LineFormatter(line_prefix(self._launch, local_rank, rank), needles)


class RunLogs:
    """The logs of one agent process: its own directory, with a subdirectory per attempt."""

    def __init__(self, launch: LaunchSpec, base: Path) -> None:
        self._launch = launch
        self._base = base.absolute()  # workers may change their working directory

    @functools.cached_property
    def directory(self) -> Path:
        """Directory of the run, created at the first use.

        Raises:
            ConfigurationError: The directory cannot be created.
            InfrastructureError: Its volume fails.
        """
        prefix = self._launch.run_id.replace(os.sep, "_") + "_"
        try:
            self._base.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=prefix, dir=self._base))
        except OSError as error:
            raise kind_of(error)(
                f"The log directory {str(self._base)!r} cannot be used ({error.strerror}): "
                "--log-dir takes a directory that this user may write to or create."
            ) from error

    def attempt(self, restart_count: int, ranks: Mapping[int, int]) -> AttemptLogs:
        """Create a new directory for the workers in ``ranks`` (local rank -> rank).

        torchrun deletes the files of an earlier start with the same ``restart_count``. Here a round may
        begin without a counted restart, and the earlier files are evidence: they stay, and the new
        directory is named ``attempt_<restart_count>.1``, ``.2`` and so on.
        """
        directory = _make_fresh(self.directory / f"attempt_{restart_count}")
        for local_rank in ranks:
            (directory / str(local_rank)).mkdir()
        return AttemptLogs(self._launch, directory, ranks)


def _make_fresh(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    fresh = next(name for name in itertools.chain([path], numbered) if not name.exists())
    fresh.mkdir(parents=True)
    return fresh


def _end_of(path: Path | str, size: int) -> bytes:
    """Return the last ``size`` bytes of a file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size)
    except OSError:
        return b""
