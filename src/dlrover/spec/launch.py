"""Launch specification of a node: the parsed command line of ``dlrover-run``."""

from __future__ import annotations

import enum

import msgspec


class Entry(str, enum.Enum):
    """Kind of training program on the command line."""

    SCRIPT = "script"
    """``python -u target args``."""
    MODULE = "module"
    """``python -u -m target args`` (``-m``)."""
    RUN_PATH = "run_path"
    """``runpy.run_path(target)`` in the launcher's own interpreter (``--run-path``)."""
    COMMAND = "command"
    """``target args``: any program (``--no-python``)."""


class Std(enum.IntFlag):
    """Selection of a worker's output streams; the numbers are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class StdMap(msgspec.Struct, frozen=True):
    """Stream selection for all local ranks, with exceptions in ``by_rank``."""

    default: int = 0
    by_rank: dict[int, int] = {}

    def of(self, local_rank: int) -> Std:
        """Return the streams selected for ``local_rank``."""
        return Std(self.by_rank.get(local_rank, self.default))


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an agent needs to start one node's workers. Set once per job."""

    entry: Entry
    target: str
    args: tuple[str, ...] = ()
    python: str = ""
    """Interpreter for Python entries; empty: the launcher's own."""
    nproc_per_node: int = 1
    role: str = "default"
    run_id: str = "none"
    """torchrun's ``--rdzv-id``; the workers see it as ``TORCHELASTIC_RUN_ID``."""
    max_restarts: int = 0
    """Restarts allowed after failures of the user's program (infrastructure has its own budget)."""
    redirects: StdMap = StdMap()
    tee: StdMap = StdMap()
    local_ranks_filter: tuple[int, ...] = ()
    """Local ranks whose output appears on the console; empty: all."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    log_dir: str = ""
    """Directory of the workers' logs; empty: ``logs`` in the job directory."""
    log_line_prefix_template: str = ""
    """``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE``: ``${role_name} ${rank} ${local_rank}``."""
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    shutdown_timeout: float = 30.0
    """Seconds between SIGTERM and SIGKILL when workers are stopped."""
    virtual_local_rank: bool = False
    save_at_breakpoint: bool = False
    """Default of a `Checkpointer`: persist the newest step in memory when a worker dies."""
    auto_tuning: bool = False
    """Default of an `ElasticDataLoader` and an `ElasticTrainer`: adapt to measurements."""
    numa_binding: str = ""
    """``node``, ``socket``, ``exclusive``, ``core-complex`` or empty for none."""
