"""Facts about a machine that ``dlrover doctor`` judges, and how they are read.

Reading takes bounded time: calls that may block (name servers, network file systems) run in threads.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

from dlrover import accelerators
from dlrover._native import library
from dlrover._util import cgroup, kernel, sockets
from dlrover.config import native

T = TypeVar("T")

LIMIT = 2.0
"""Seconds that `collect` waits for a name server (whose own time-out is 5 s) or a file system."""
SYS_PTRACE = 19
"""Bit of CAP_SYS_PTRACE (``linux/capability.h``)."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Size and free space of a file system, in bytes."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """One question to the resolver: a name or an address."""

    question: str
    seconds: float
    answers: tuple[str, ...] = ()
    error: str = ""
    """Why there are no answers."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Range of ephemeral ports, from which the kernel assigns ports."""

    low: int
    high: int
    free: int
    """Ports of the range without a TCP socket in this network namespace."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Device files of one vendor."""

    vendor: str
    files: tuple[str, ...]
    denied: tuple[str, ...] = ()
    """Files that this user may not open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about a machine as this process sees it. Sizes are bytes; None: absent, or no limit."""

    python: str
    executable: str
    kernel: str
    memfd: bool
    """True if this process may call ``memfd_create``; some sandboxes refuse it."""
    torch: str | None
    """PyTorch's version, from its metadata, without importing it."""
    accelerators: tuple[Accelerator, ...]
    memory_total: int
    memory_available: int
    memory_limit: int | None
    """Least memory limit of this process's cgroups."""
    shm: DiskSpace | None
    state_dir: str
    state: DiskSpace | None
    """Space where ``state_dir`` is or would be made; None: the file system does not answer."""
    state_writable: bool
    state_type: str
    """Type of that file system, as in ``/proc/self/mounts``; empty if unknown."""
    open_files: int | None
    """Soft limit."""
    open_files_hard: int | None
    processes: int | None
    """Soft limit of this user, in threads."""
    processes_cgroup: int | None
    """Least limit of this process's cgroups, in threads."""
    core_limit: int | None
    core_pattern: str
    ports: Ports | None
    loopback_error: str
    """Why a connection to a port of 127.0.0.1 failed; empty if it did not."""
    localhost: Lookup
    hostname: Lookup
    reverse: tuple[Lookup, ...]
    """Reverse lookups of the loopback address and of the host name's first address."""
    interfaces: tuple[str, ...]
    gloo_interfaces: tuple[str, ...]
    """Interfaces that ``GLOO_SOCKET_IFNAME`` names."""
    flag_variables: tuple[str, ...]
    """``PET_*`` variables that are set: defaults for flags of ``dlrover-run``."""
    wall_clock: float
    """Seconds since the epoch."""
    clock_step: float
    """Seconds by which the wall clock outran the monotonic clock during the probe."""
    probe_seconds: float
    ptrace_scope: int | None
    may_trace: bool
    """True if this process has CAP_SYS_PTRACE."""
    native: bool
    """True if the compiled library (`dlrover._native`) is used."""
    native_reason: str
    native_choice: str
    """``DLROVER_NATIVE``."""


def collect(
    environ: Mapping[str, str],
    state_dir: Path,
    *,
    root: Path = Path("/"),
    limit: float = LIMIT,
) -> Machine:
    """Return the facts about this machine, in at most about four times ``limit`` seconds.

    ``state_dir`` need not exist. ``root`` is the directory whose ``dev``, ``proc`` and ``sys`` are read.
    """
    wall, start = time.time(), time.monotonic()
    localhost, hostname, reverse = _names(limit)
    loopback_error = sockets.loopback_problem(limit)
    place = within(limit, [partial(_state_dir, state_dir)])[0] or _StateDir(Path(), None, False)
    seconds, wall_seconds = time.monotonic() - start, time.time() - wall
    memory = psutil.virtual_memory()
    groups = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    compiled = library.load(native(environ))
    open_files, open_files_hard = _rlimit(resource.RLIMIT_NOFILE)
    return Machine(
        python=platform.python_version(),
        executable=sys.executable,
        kernel=f"{platform.system()} {platform.release()}",
        memfd=_has_memfd(),
        torch=_torch_version(),
        accelerators=_accelerators(root / "dev"),
        memory_total=memory.total,
        memory_available=memory.available,
        memory_limit=cgroup.least_limit("memory", ("memory.max", "memory.limit_in_bytes"), *groups),
        shm=_space(root / "dev/shm"),
        state_dir=str(state_dir),
        state=place.space,
        state_writable=place.writable,
        state_type=_mount_type(_text(root / "proc/self/mounts"), place.path),
        open_files=open_files,
        open_files_hard=open_files_hard,
        processes=_rlimit(resource.RLIMIT_NPROC)[0],
        processes_cgroup=cgroup.least_limit("pids", ("pids.max",), *groups),
        core_limit=_rlimit(resource.RLIMIT_CORE)[0],
        core_pattern=_text(root / "proc/sys/kernel/core_pattern"),
        ports=_ports(root / "proc"),
        loopback_error=loopback_error,
        localhost=localhost,
        hostname=hostname,
        reverse=reverse,
        interfaces=tuple(psutil.net_if_addrs()),
        gloo_interfaces=tuple(filter(None, environ.get("GLOO_SOCKET_IFNAME", "").split(","))),
        flag_variables=tuple(sorted(name for name in environ if name.startswith("PET_"))),
        wall_clock=wall,
        clock_step=wall_seconds - seconds,
        probe_seconds=seconds,
        ptrace_scope=_number(_text(root / "proc/sys/kernel/yama/ptrace_scope")),
        may_trace=_may_trace(_text(root / "proc/self/status")),
        native=compiled.library is not None,
        native_reason=compiled.reason,
        native_choice=native(environ),
    )


def _text(path: Path) -> str:
    """Return the file's text without surrounding space; empty if there is no such file to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _space(path: Path) -> DiskSpace | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return DiskSpace(usage.total, usage.free)


class _StateDir(NamedTuple):
    """The state directory, or its nearest parent that exists."""

    path: Path
    space: DiskSpace | None
    writable: bool


def _state_dir(path: Path) -> _StateDir:
    """Return ``path`` or, if it does not exist, its nearest existing parent."""
    path = path.resolve()
    path = next(place for place in (path, *path.parents) if os.path.exists(place))
    return _StateDir(path, _space(path), path.is_dir() and os.access(path, os.W_OK | os.X_OK))


def _mount_type(mounts: str, path: Path) -> str:
    """Return the type of the file system of ``path``: the last one mounted on the nearest parent."""
    types = {}
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        types[re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], base=8)), point)] = kind
    return next((types[str(place)] for place in (path, *path.parents) if str(place) in types), "")


def _rlimit(which: int) -> tuple[int | None, int | None]:
    """Return the soft and the hard limit; None for no limit."""
    soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(which))
    return soft, hard


def _has_memfd() -> bool:
    try:
        os.close(kernel.memfd_create("dlrover"))
    except OSError:
        return False
    return True


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerators(dev: Path) -> tuple[Accelerator, ...]:
    names = sorted(os.listdir(dev), key=lambda name: (len(name), name)) if dev.is_dir() else []
    found = []
    for vendor in accelerators.vendors():
        files = [dev / name for name in names if vendor.device_file.fullmatch(name)]
        denied = [str(file) for file in files if not os.access(file, os.R_OK | os.W_OK)]
        if files:
            found.append(Accelerator(vendor.name, tuple(map(str, files)), tuple(denied)))
    return tuple(found)


def _ports(proc: Path) -> Ports | None:
    numbers = _text(proc / "sys/net/ipv4/ip_local_port_range").split()
    if len(numbers) != 2:
        return None
    low, high = map(int, numbers)
    taken = set()
    for table in ("net/tcp", "net/tcp6"):
        for line in _text(proc / table).splitlines()[1:]:
            taken.add(int(line.split()[1].rpartition(":")[2], base=16))
    return Ports(low, high, high - low + 1 - sum(low <= port <= high for port in taken))


def _may_trace(status: str) -> bool:
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return effective is not None and bool(int(effective[1], base=16) >> SYS_PTRACE & 1)


def _names(limit: float) -> tuple[Lookup, Lookup, tuple[Lookup, ...]]:
    """Look up localhost, the host name, and their addresses in reverse; takes at most twice ``limit`` s."""
    names = ("localhost", socket.gethostname())
    localhost, hostname = _look_up(names, _addresses, limit)
    addresses = tuple(dict.fromkeys(("127.0.0.1", *hostname.answers[:1])))
    return localhost, hostname, tuple(_look_up(addresses, _name, limit))


def _addresses(name: str) -> tuple[str, ...]:
    infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(info[4][0]) for info in infos))


def _name(address: str) -> tuple[str, ...]:
    return (socket.getnameinfo((address, 0), 0)[0],)


def _look_up(
    questions: Sequence[str], resolve: Callable[[str], tuple[str, ...]], limit: float
) -> list[Lookup]:
    """Ask all questions at once; return the answers in order."""

    def ask(question: str) -> Lookup:
        start = time.monotonic()
        try:
            answers, error = resolve(question), ""
        except (OSError, UnicodeError) as reason:
            answers, error = (), str(reason)
        return Lookup(question, time.monotonic() - start, answers, error)

    late = f"no answer within {limit:g} s"
    found = within(limit, [partial(ask, question) for question in questions])
    return [
        lookup or Lookup(question, limit, error=late)
        for question, lookup in zip(questions, found, strict=True)
    ]


def within(limit: float, actions: Sequence[Callable[[], T]]) -> list[T | None]:
    """Return what each action returns, or None where it takes longer than ``limit`` seconds.

    The actions run at the same time, in threads. A system call that does not return cannot be
    interrupted: its thread is left behind and ends with the process.
    """
    results: list[T | None] = [None] * len(actions)

    def run(index: int) -> None:
        results[index] = actions[index]()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(results)
