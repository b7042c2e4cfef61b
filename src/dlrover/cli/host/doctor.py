"""``dlrover doctor``: check this machine for what a training job needs, and advise what to change.

`collect` reads the facts; `examine` judges them and does no I/O.
"""

from __future__ import annotations

import enum
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import msgspec
from rich.text import Text

from dlrover._util.doors import install
from dlrover.cli.host.probe import Machine, collect
from dlrover.cli.output import Form
from dlrover.config import state_dirs
from dlrover.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

MIB = 1 << 20
GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - a mount, not a temporary file

SLOW_LOOKUP = 0.5
"""Seconds from which a lookup counts as slow; a healthy one takes milliseconds."""
CLOCK_STEP = 0.05
"""Seconds between wall and monotonic clock beyond which the wall clock must have jumped."""
OLDEST_TORCH = (2, 6)
"""Oldest supported PyTorch (the ``torch`` extra in ``pyproject.toml``)."""
NETWORK_FILE_SYSTEMS = re.compile(r"nfs4?|cifs|smb3|9p|afs|ceph|lustre|beegfs|gpfs|fuse\..*")
"""Types on which SQLite's write-ahead mode is not safe (https://sqlite.org/wal.html, section 1)."""


class Level(str, enum.Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """Some jobs will be slow or fail."""
    PROBLEM = "problem"
    """Ordinary jobs will fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One judgement: a full sentence with its figure and, for a warning or a problem, advice."""

    level: Level
    topic: str
    sentence: str


def _low(amount: int, *, problem: int, warning: int) -> Level:
    """Return the level of an amount that should be large."""
    if amount < problem:
        return Level.PROBLEM
    return Level.WARNING if amount < warning else Level.OK


def _size(amount: int) -> str:
    if amount < GIB:
        return f"{amount / MIB:.0f} MiB"
    return f"{amount / GIB:.1f} GiB" if amount < 1024 * GIB else f"{amount / GIB / 1024:.1f} TiB"


def _finding(level: Level, topic: str, fact: str, advice: str) -> Finding:
    """Return a finding; it includes the advice unless the level is OK."""
    return Finding(level, topic, f"{fact}." if level is Level.OK else f"{fact}: {advice}.")


def _python(machine: Machine) -> Finding:
    return Finding(Level.OK, "python", f"Python {machine.python} runs from {machine.executable}.")


def _kernel(machine: Machine) -> Finding:
    level = Level.OK if machine.memfd else Level.PROBLEM
    fact = f"The kernel is {machine.kernel}"
    advice = (
        "it, or a sandbox, refuses memfd_create, by which agent and workers share memory; allow it"
    )
    return _finding(level, "kernel", fact, advice)


def _torch(machine: Machine) -> Finding:
    topic = "pytorch"
    if machine.torch is None:
        advice = f"a job that imports it fails; install it with {install('torch')}"
        fact = f"PyTorch is not installed for {machine.executable}"
        return _finding(Level.WARNING, topic, fact, advice)
    oldest = ".".join(map(str, OLDEST_TORCH))
    old = tuple(int(part) for part in re.findall(r"\d+", machine.torch)[:2]) < OLDEST_TORCH
    level = Level.PROBLEM if old else Level.OK
    fact = f"PyTorch {machine.torch} is installed"
    return _finding(level, topic, fact, f"{oldest} is the oldest that is supported; upgrade it")


def _accelerators(machine: Machine) -> Finding:
    topic = "accelerators"
    if not machine.accelerators:
        return Finding(
            Level.OK, topic, "No accelerator has a device file in /dev, so workers use the CPU."
        )
    found = "; ".join(f"{a.vendor}: {', '.join(a.files)}" for a in machine.accelerators)
    denied = [file for a in machine.accelerators for file in a.denied]
    if denied:
        advice = "join the group that owns them, or pass them to the container"
        fact = f"This user may not open {', '.join(denied)}"
        return _finding(Level.PROBLEM, topic, fact, advice)
    cpu_only = (machine.torch or "").endswith("+cpu")
    level = Level.WARNING if cpu_only else Level.OK
    advice = f"PyTorch {machine.torch} is built for the CPU alone; install a build for them"
    return _finding(level, topic, f"There are accelerators ({found})", advice)


def _memory(machine: Machine) -> Finding:
    usable = machine.memory_available
    fact = f"{_size(usable)} of {_size(machine.memory_total)} memory is available"
    if machine.memory_limit is not None and machine.memory_limit < machine.memory_total:
        usable = min(usable, machine.memory_limit)
        fact += f", and this process's cgroup may use {_size(machine.memory_limit)} in all"
    level = _low(usable, problem=GIB // 2, warning=4 * GIB)
    advice = (
        "workers, their data loaders and copies of their state in memory have to fit, or the kernel "
        "kills them; free some or raise the limit"
    )
    return _finding(level, "memory", fact, advice)


def _shared_memory(machine: Machine) -> Finding:
    topic = "shared memory"
    use = "PyTorch's DataLoader workers pass batches through it"
    if machine.shm is None:
        return _finding(Level.PROBLEM, topic, f"{SHM} is missing", f"{use}; mount a tmpfs there")
    level = _low(machine.shm.free, problem=128 * MIB, warning=GIB)
    if machine.shm.total < GIB:
        fix = "mount a larger one (docker run --shm-size 8g; an emptyDir of medium Memory in a pod)"
    else:
        fix = "remove the files that ended jobs left in it"
    fact = f"{SHM} has {_size(machine.shm.free)} free of {_size(machine.shm.total)}"
    return _finding(level, topic, fact, f"{use} and die of SIGBUS when it is full; {fix}")


def _state_dir(machine: Machine) -> Finding:
    topic = "state directory"
    fix = "set DLROVER_STATE_DIR or --job-dir to another place"
    if machine.state is None or not machine.state_writable:
        fact = f"This user cannot write to {machine.state_dir}"
        if machine.state is None:
            fact = f"The file system of {machine.state_dir} does not answer"
        return _finding(Level.PROBLEM, topic, fact, f"jobs keep their state and logs there; {fix}")
    level = _low(machine.state.free, problem=128 * MIB, warning=2 * GIB)
    free, total = _size(machine.state.free), _size(machine.state.total)
    fact = f"{machine.state_dir} has {free} free of {total}"
    advice = f"journals, events and logs of jobs grow there; free space, or {fix}"
    if level is Level.OK and NETWORK_FILE_SYSTEMS.fullmatch(machine.state_type):
        level, fact = Level.WARNING, f"{machine.state_dir} is on a network ({machine.state_type})"
        advice = f"the journal's database has no safe locks there; {fix}"
    return _finding(level, topic, fact, advice)


def _open_files(machine: Machine) -> Finding:
    topic = "open files"
    if machine.open_files is None:
        return Finding(Level.OK, topic, "A process may open any number of files.")
    level = _low(machine.open_files, problem=256, warning=4096)
    hard = "unlimited" if machine.open_files_hard is None else machine.open_files_hard
    advice = (
        "the store of rank 0 holds a connection to each worker, and data loaders hold many files; "
        "raise it with ulimit -n 65536"
    )
    fact = f"A process may open {machine.open_files} files (hard limit: {hard})"
    return _finding(level, topic, fact, advice)


def _processes(machine: Machine) -> Finding:
    topic = "processes"
    limits = [n for n in (machine.processes, machine.processes_cgroup) if n is not None]
    if not limits:
        return Finding(Level.OK, topic, "This user may have any number of processes.")
    cgroup = min(limits) == machine.processes_cgroup
    owner = "This process's cgroup" if cgroup else "This user"
    fix = "raise the container's limit (docker run --pids-limit)" if cgroup else "raise ulimit -u"
    advice = f"each worker has tens of threads and more per data loader; {fix}"
    fact = f"{owner} may have {min(limits)} processes and threads"
    return _finding(_low(min(limits), problem=256, warning=4096), topic, fact, advice)


def _core_dumps(machine: Machine) -> Finding:
    topic = "core dumps"
    if machine.core_limit == 0:
        return Finding(Level.OK, topic, "Core dumps are off, so a crash fills no disk.")
    if machine.core_pattern.startswith("|"):
        return Finding(Level.OK, topic, f"Core dumps go to a program ({machine.core_pattern}).")
    most = "all" if machine.core_limit is None else _size(machine.core_limit)
    fact = f"A crash writes up to {most} of a process's memory to the file {machine.core_pattern!r}"
    return _finding(
        Level.WARNING, topic, fact, "turn that off with ulimit -c 0 unless you read them"
    )


def _ports(machine: Machine) -> Finding:
    topic = "ports"
    if machine.ports is None:
        return Finding(Level.OK, topic, "The kernel does not report its range of ephemeral ports.")
    low, high = machine.ports.low, machine.ports.high
    fact = f"{machine.ports.free} of the ephemeral ports {low} to {high} are free"
    advice = (
        "the master and each round's store need some; widen net.ipv4.ip_local_port_range or end "
        "what holds them"
    )
    return _finding(_low(machine.ports.free, problem=64, warning=1024), topic, fact, advice)


def _loopback(machine: Machine) -> Finding:
    level = Level.PROBLEM if machine.loopback_error else Level.OK
    if level is Level.OK:
        return Finding(level, "loopback", "Processes reach each other at 127.0.0.1.")
    fact = f"A connection to 127.0.0.1 failed ({machine.loopback_error})"
    advice = "workers and agent reach their own machine there; bring it up with ip link set lo up"
    return _finding(level, "loopback", fact, advice)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _localhost(machine: Machine) -> Finding:
    lookup, topic = machine.localhost, "localhost"
    advice = "workers of one machine meet there; put '127.0.0.1 localhost' into /etc/hosts"
    if not lookup.answers:
        fact = f"The name localhost has no address ({lookup.error})"
        return _finding(Level.PROBLEM, topic, fact, advice)
    strange = [answer for answer in lookup.answers if not _is_loopback(answer)]
    if strange:
        fact = f"The name localhost leads to {strange[0]}, which is not this machine's loopback"
        return _finding(Level.PROBLEM, topic, fact, advice)
    level = Level.WARNING if lookup.seconds >= SLOW_LOOKUP else Level.OK
    fact = f"The name localhost leads to {lookup.answers[0]} within {lookup.seconds:.3f} s"
    return _finding(level, topic, fact, advice)


def _hostname(machine: Machine) -> Finding:
    lookup, topic = machine.hostname, "host name"
    advice = (
        "gloo asks for it at every start and falls back to the loopback, which other machines cannot "
        "reach; add it to DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME"
    )
    if not lookup.answers:
        fact = f"The host name {lookup.question} has no address ({lookup.error})"
        return _finding(Level.WARNING, topic, fact, advice)
    fact = f"The host name {lookup.question} leads to {lookup.answers[0]}"
    if lookup.seconds >= SLOW_LOOKUP:
        fact += f", after {lookup.seconds:.1f} s"
        return _finding(Level.WARNING, topic, fact, advice)
    if all(map(_is_loopback, lookup.answers)) and not machine.gloo_interfaces:
        advice = (
            "one machine is fine with that; on several, gloo would listen where the others cannot "
            "reach it, so set GLOO_SOCKET_IFNAME"
        )
        return _finding(Level.WARNING, topic, fact, advice)
    return Finding(Level.OK, topic, f"{fact}.")


def _reverse(machine: Machine) -> Finding:
    slowest = max(machine.reverse, key=lambda lookup: lookup.seconds)
    level = Level.WARNING if slowest.seconds >= SLOW_LOOKUP else Level.OK
    fact = f"The reverse lookup of {slowest.question} took {slowest.seconds:.3f} s"
    if slowest.error:
        fact += f" ({slowest.error})"
    advice = (
        "PyTorch's store makes one for each connection and serves no other meanwhile (up to 5 s a "
        "worker); put the address into /etc/hosts or repair the name server"
    )
    return _finding(level, "reverse lookup", fact, advice)


def _interfaces(machine: Machine) -> Finding:
    topic = "network interface"
    missing = [name for name in machine.gloo_interfaces if name not in machine.interfaces]
    if missing:
        fact = f"GLOO_SOCKET_IFNAME names {missing[0]}, which this machine does not have"
        there = ", ".join(machine.interfaces)
        return _finding(Level.PROBLEM, topic, fact, f"gloo fails; set it to one of {there}")
    if machine.gloo_interfaces:
        named = ", ".join(machine.gloo_interfaces)
        return Finding(Level.OK, topic, f"GLOO_SOCKET_IFNAME names {named}, which exists.")
    return Finding(Level.OK, topic, "gloo takes the interface of the host name's address.")


def _flag_variables(machine: Machine) -> Finding:
    fact = "No PET_* variable changes a default of dlrover-run."
    if machine.flag_variables:
        fact = f"Flags of dlrover-run take defaults from {', '.join(machine.flag_variables)}."
    return Finding(Level.OK, "environment", fact)


def _clock(machine: Machine) -> Finding:
    topic = "clock"
    today = datetime.fromtimestamp(machine.wall_clock, timezone.utc)
    if not 2025 <= today.year < 2100:
        advice = "certificates and the order of events depend on it; start time synchronisation"
        return _finding(Level.PROBLEM, topic, f"The clock says {today:%Y-%m-%d}", advice)
    level = Level.WARNING if abs(machine.clock_step) > CLOCK_STEP else Level.OK
    fact = f"The clock moved by {machine.clock_step:+.3f} s within {machine.probe_seconds:.3f} s"
    advice = (
        "something sets it, which puts events out of order; let chronyd or ntpd slew it instead"
    )
    if level is Level.OK:
        fact = f"The clock says {today:%Y-%m-%d %H:%M} UTC and runs evenly"
    return _finding(level, topic, fact, advice)


def _tracing(machine: Machine) -> Finding:
    topic, scope = "tracing", machine.ptrace_scope or 0
    if scope >= 3:
        fact = f"kernel.yama.ptrace_scope is {scope}"
        advice = (
            "not even root can attach py-spy or gdb to a worker that hangs; set it to 1 and reboot"
        )
        return _finding(Level.WARNING, topic, fact, advice)
    if scope and not machine.may_trace:
        need = "need CAP_SYS_PTRACE (sudo; docker run --cap-add SYS_PTRACE)"
        fact = f"py-spy and gdb {need} to attach to a worker (kernel.yama.ptrace_scope is {scope})"
        return Finding(Level.OK, topic, f"{fact}.")
    return Finding(Level.OK, topic, "This user may attach py-spy or gdb to a worker.")


def _native(machine: Machine) -> Finding:
    topic, reason = "compiled library", machine.native_reason
    if machine.native:
        return Finding(Level.OK, topic, f"{reason[0].upper()}{reason[1:]}.")
    fact = f"Python code copies and hashes memory, since {reason}"
    if machine.native_choice == "off":
        return Finding(Level.OK, topic, f"{fact}.")
    level = Level.WARNING
    if machine.native_choice == "require":
        level, fact = Level.PROBLEM, f"DLROVER_NATIVE is require, but {reason}"
    advice = "install a C++ compiler, and then DLRover again with DLROVER_NATIVE=require"
    return _finding(level, topic, fact, advice)


_CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    _python,
    _kernel,
    _torch,
    _native,
    _accelerators,
    _memory,
    _shared_memory,
    _state_dir,
    _open_files,
    _processes,
    _core_dumps,
    _ports,
    _loopback,
    _localhost,
    _hostname,
    _reverse,
    _interfaces,
    _flag_variables,
    _clock,
    _tracing,
)


def examine(machine: Machine) -> list[Finding]:
    """Return one finding for each topic, always in the same order."""
    return [check(machine) for check in _CHECKS]


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """Return 3 if there is a problem, else 0, with or without warnings."""
    problem = any(finding.level is Level.PROBLEM for finding in findings)
    return ExitCode.INFRASTRUCTURE if problem else ExitCode.SUCCESS


# ---- showing

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def render_text(findings: Iterable[Finding]) -> Text:
    """Return a line for each finding, the worst last, and a final line with the counts."""
    order = list(Level)
    ranked = sorted(findings, key=lambda finding: order.index(finding.level))
    width = max((len(finding.topic) for finding in ranked), default=0)
    text = Text()
    for finding in ranked:
        text.append(f"{finding.level.value:<7}", style=_STYLES[finding.level])
        text.append(f"  {finding.topic:<{width}}  ", style="bold")
        text.append(f"{finding.sentence}\n")
    counts = Counter(finding.level for finding in ranked)
    text.append(f"problems: {counts[Level.PROBLEM]}, warnings: {counts[Level.WARNING]}")
    return text


def render_json(machine: Machine, findings: Iterable[Finding]) -> str:
    """Return the findings and the facts behind them as one JSON object."""
    document = {
        "findings": list(findings),
        "native": machine.native,
        "native_reason": machine.native_reason,
        "machine": machine,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def doctor(output: Form, environ: Mapping[str, str], console: Console) -> int:
    """Examine this machine, print the findings, and return the exit code."""
    machine = collect(environ, state_dirs(environ)[0])
    findings = examine(machine)
    if output is Form.JSON:
        console.out(render_json(machine, findings), highlight=False)
    else:
        console.print(render_text(findings), soft_wrap=True)
    return exit_code(findings)
