"""Faults, one class for each: inject it, and heal it where that is possible; and their schedule."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import psutil

from dlrover._util import start
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.testing.chaos import network
from dlrover.testing.chaos.targets import Targets, TargetWorker, choose, savers_of

MIB = 1 << 20
GIB = 1 << 30
LARGEST = 4 * GIB
"""Most bytes of a file system that may be filled: it must be made for this purpose."""
SLOW_PERIOD = 0.2
"""Seconds of one period of a slowed worker, which runs for a part of it."""
STEP = re.compile(r"step-(\d+)")
"""Pattern of a stored step in a checkpoint directory."""


class Planned(NamedTuple):
    """A scheduled fault."""

    at: float
    """Least seconds since the first step; the fault also waits until the job trains again."""
    verb: str
    draw: float
    """Number between 0 and 1 that selects the target among the possible ones."""


class VerbSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What faults need to know besides the job's processes."""

    checkpoint_dir: Path | None = None
    """Directory of the program's Flash Checkpoints."""
    memory_mb: int = 512
    """MiB that the memory hog takes."""
    slow_share: float = 0.3
    """Share of the time that a slowed worker runs, between 0 and 1."""
    hog_environ: dict[str, str] = {}
    """Environment of the memory hog."""
    own_networks: bool = False
    """True if each node has a network of its own (`dlrover.testing.chaos.network`)."""


class Injected(msgspec.Struct, frozen=True):
    """Target of an injected fault; -1 where it has no such number."""

    target: str
    """The target in words."""
    node: int = -1
    rank: int = -1
    pid: int = -1


class Verb:
    """One kind of fault; most work everywhere and need no healing. An instance serves for one fault only."""

    restarts: ClassVar[bool] = False
    """True if the job must restart its workers."""
    lasting: ClassVar[bool] = False
    """True if the fault lasts until it is healed."""
    ends_when_seen: ClassVar[bool] = False
    """True if it is healed as soon as the job has noticed it, else when the job trains again."""
    master: ClassVar[bool] = False
    """True if it strikes the master, which does not interrupt training."""

    def __init__(self, settings: VerbSettings) -> None:
        self._settings = settings

    def check(self) -> None:
        """Raise `ConfigurationError` if this fault is not possible here."""

    def inject(self, targets: Targets, draw: float) -> Injected:
        """Strike the target that ``draw``, between 0 and 1, selects.

        Raises:
            InfrastructureError: there is no target.
        """
        raise NotImplementedError

    def heal(self) -> None:
        """Undo the fault, if there is anything to undo."""


class _KillRank(Verb):
    """SIGKILL to a worker."""

    restarts = True

    def inject(self, targets: Targets, draw: float) -> Injected:
        worker = choose(draw, targets.workers())
        worker.process.kill()
        return _struck(worker)


class _KillNode(Verb):
    """SIGKILL to an agent and all its descendants; the memory checkpoints are lost."""

    restarts = True

    def inject(self, targets: Targets, draw: float) -> Injected:
        node = choose(draw, targets.nodes())
        _each(node.stop(), psutil.Process.kill)
        return Injected(f"node {node.id}, pid {node.agent.pid}", node.id, pid=node.agent.pid)


class _KillMaster(Verb):
    """SIGKILL to the job's master."""

    master = True

    def inject(self, targets: Targets, draw: float) -> Injected:
        master = targets.master()
        if master is None:
            raise InfrastructureError("The job has no master that could be killed.")
        master.kill()
        return Injected(f"master, pid {master.pid}", pid=master.pid)


class _Hang(Verb):
    """SIGSTOP to a worker: it makes no progress, and says nothing."""

    lasting = True
    _worker: TargetWorker | None = None

    def inject(self, targets: Targets, draw: float) -> Injected:
        self._worker = choose(draw, targets.workers())
        self._worker.process.suspend()
        return _struck(self._worker)

    def heal(self) -> None:
        if self._worker is not None:
            _each([self._worker.process], psutil.Process.resume)


class _Slow(Verb):
    """SIGSTOP and SIGCONT to a worker in turns, so that it runs only a part of the time."""

    lasting = True
    _thread: threading.Thread | None = None

    def inject(self, targets: Targets, draw: float) -> Injected:
        worker = choose(draw, targets.workers())
        self._healed = threading.Event()
        self._thread = threading.Thread(target=self._slow, args=(worker.process,), daemon=True)
        self._thread.start()
        return _struck(worker)

    def _slow(self, process: psutil.Process) -> None:
        share = self._settings.slow_share
        with contextlib.suppress(psutil.NoSuchProcess):
            while not self._healed.is_set():
                process.suspend()
                self._healed.wait(SLOW_PERIOD * (1 - share))
                process.resume()
                self._healed.wait(SLOW_PERIOD * share)

    def heal(self) -> None:
        if self._thread is not None:
            self._healed.set()
            self._thread.join()


class _Partition(Verb):
    """Pulled network cable of a node, plugged in again when the job has given the node up.

    Where nodes have no networks of their own, all processes of the node are stopped instead: none of them
    answers any more, and its connections stay open. Its checkpoint savers are killed: the node that takes
    its place would reach their memory, which on another machine is out of reach.
    """

    lasting = True
    ends_when_seen = True
    _stopped: tuple[psutil.Process, ...] = ()
    _cut: int = -1

    def inject(self, targets: Targets, draw: float) -> Injected:
        node = choose(draw, targets.nodes())
        if self._settings.own_networks:
            network.cut(node.id)
            self._cut = node.id
        else:
            savers = node.savers()
            self._stopped = tuple(node.stop())
            _each(savers, psutil.Process.kill)
        return Injected(f"node {node.id}, pid {node.agent.pid}", node.id, pid=node.agent.pid)

    def heal(self) -> None:
        _each(self._stopped, psutil.Process.resume)
        if self._cut >= 0:
            network.join(self._cut)


class _CorruptCheckpoint(Verb):
    """Inverted bytes in the newest stored step; all workers and memory checkpoints are lost."""

    restarts = True

    def check(self) -> None:
        if self._settings.checkpoint_dir is None:
            raise ConfigurationError(
                "corrupt-checkpoint needs --checkpoint-dir, the directory of the program's Checkpointer."
            )

    def inject(self, targets: Targets, draw: float) -> Injected:
        assert self._settings.checkpoint_dir is not None
        workers = [worker.process for worker in targets.workers()]
        struck = [*workers, *savers_of(self._settings.checkpoint_dir)]
        _each(struck, psutil.Process.suspend)  # so that no newer step is stored meanwhile
        try:
            step = newest_step(self._settings.checkpoint_dir)
            _flip(max(step.iterdir(), key=lambda path: path.stat().st_size))
        except (OSError, InfrastructureError):
            _each(struck, psutil.Process.resume)
            raise
        _each(struck, psutil.Process.kill)
        return Injected(f"{step.name}, {len(workers)} ranks")


class _FillDisk(Verb):
    """Full file system under the checkpoint directory; its space is freed afterwards."""

    lasting = True
    _filling: Filling | None = None

    def check(self) -> None:
        directory = self._settings.checkpoint_dir
        if directory is None:
            raise ConfigurationError(
                "fill-disk needs --checkpoint-dir, a directory on a small file system of its own."
            )
        check_small(directory)

    def inject(self, targets: Targets, draw: float) -> Injected:
        assert self._settings.checkpoint_dir is not None
        self._filling = Filling(self._settings.checkpoint_dir)
        return Injected(f"{self._filling.nbytes // MIB} MiB of {self._settings.checkpoint_dir}")

    def heal(self) -> None:
        if self._filling is not None:
            self._filling.close()


class _MemoryHog(Verb):
    """Process that takes much memory, but at most nine tenths of what is available."""

    lasting = True
    _process: subprocess.Popen[bytes] | None = None

    def inject(self, targets: Targets, draw: float) -> Injected:
        node = choose(draw, targets.nodes())
        room = psutil.virtual_memory().available * 9 // 10
        nbytes = min(self._settings.memory_mb * MIB, room)
        self._process = subprocess.Popen(
            [*start.command("dlrover.testing.chaos.hog"), str(nbytes)],
            env=self._settings.hog_environ,
            start_new_session=True,
        )
        return Injected(f"{nbytes // MIB} MiB", node.id, pid=self._process.pid)

    def heal(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


VERBS: dict[str, Callable[[VerbSettings], Verb]] = {
    "kill-rank": _KillRank,
    "kill-node": _KillNode,
    "kill-master": _KillMaster,
    "hang": _Hang,
    "slow": _Slow,
    "partition": _Partition,
    "corrupt-checkpoint": _CorruptCheckpoint,
    "fill-disk": _FillDisk,
    "memory-hog": _MemoryHog,
}
"""Every fault by its name."""
DEFAULT = ("kill-rank", "kill-node", "kill-master", "hang", "slow")
"""Faults that are injected if none is named."""


def newest_step(directory: Path) -> Path:
    """Return the directory of the newest stored step.

    Raises:
        InfrastructureError: there is no older step for a load to fall back to.
    """
    found = [path for path in directory.iterdir() if STEP.fullmatch(path.name)]
    if len(found) < 2:
        raise InfrastructureError(f"There are no two steps in {directory}.")
    return max(found, key=lambda path: int(path.name.partition("-")[2]))


def _flip(path: Path) -> None:
    """Invert 64 bytes in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        content = file.read(64)
        file.seek(-len(content), 1)
        file.write(bytes(byte ^ 0xFF for byte in content))


def _each(
    processes: list[psutil.Process] | tuple[psutil.Process, ...],
    act: Callable[[psutil.Process], None],
) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            act(process)


def _struck(worker: TargetWorker) -> Injected:
    pid = worker.process.pid
    return Injected(f"rank {worker.rank}, pid {pid}", worker.node, worker.rank, pid)


# ---- the schedule: decided before the job starts, and equal for equal seeds


def in_order(verbs: Sequence[str], seed: int) -> list[Planned]:
    """Schedule each verb once, one after the other."""
    chance = random.Random(seed)  # noqa: S311 - a plan, not a secret
    return [Planned(0.0, verb, chance.random()) for verb in verbs]


def at_random(verbs: Sequence[str], every: float, duration: float, seed: int) -> list[Planned]:
    """Schedule a random verb every ``every`` seconds, for ``duration`` seconds."""
    chance = random.Random(seed)  # noqa: S311
    return [
        Planned(count * every, chance.choice(verbs), chance.random())
        for count in range(1, int(duration / every) + 1)
    ]


# ---- a full disk: a nameless file takes the space and vanishes with its process


def check_small(directory: Path) -> None:
    """Refuse a file system that may serve another purpose.

    Raises:
        ConfigurationError: it is too large, or the directory does not exist.
    """
    try:
        facts = os.statvfs(directory)
    except OSError as error:
        raise ConfigurationError(
            f"--checkpoint-dir {directory}: {error.strerror}; fill-disk takes an existing directory."
        ) from error
    size = facts.f_blocks * facts.f_frsize
    if size > LARGEST:
        raise ConfigurationError(
            f"--checkpoint-dir {directory} lies on a file system of {size / GIB:.1f} GiB; fill-disk "
            f"takes one of at most {LARGEST // GIB} GiB, such as a tmpfs mounted for it."
        )


class Filling:
    """File that takes all free space on a directory's file system until it is closed."""

    def __init__(self, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - kept open
        self.nbytes = 0
        self._fill(os.statvfs(directory))

    def _fill(self, facts: os.statvfs_result) -> None:
        """Allocate pieces, halving their size when they no longer fit."""
        piece = facts.f_bavail * facts.f_frsize
        while piece >= facts.f_frsize:
            if self._take(piece):
                self.nbytes += piece
            else:
                piece //= 2

    def _take(self, piece: int) -> bool:
        try:
            os.posix_fallocate(self._file.fileno(), self.nbytes, piece)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return False
        return True

    def close(self) -> None:
        """Free the space."""
        self._file.close()
