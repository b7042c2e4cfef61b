"""The text that launchers, schedulers, containers and kernels add to a program's output.

Pure: reads nothing but the text. A log mixes the lines of many processes, each with the prefix of the
program that passed it on. A launcher's report of its own end only repeats how its workers ended.
"""

from __future__ import annotations

import re
import signal

LINE_LIMIT = 2000
"""Maximum characters of a line that are examined: some patterns take time quadratic in its length."""

_SCREEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(
    r"""^(?: \[(?:rank|default)\d+\]:[ ]?                             # torch, torchrun
          | \((?:[\w.:]+[ ])?pid=\d+[^)\n]*\)[ ]?                     # Ray
          | \d{4}-\d\d-\d\dT[\d:.]+Z[ ](?:std(?:out|err)[ ][FP][ ])?   # containers
          | \d{1,5}:[ ](?=[ ]|Traceback|\w+Error)                     # srun --label
         )+""",
    re.VERBOSE | re.MULTILINE,
)
# Torch prints this with every error of the device.
_BOILERPLATE = re.compile(
    r"^.*(?:Compile with .?TORCH_USE_CUDA_DSA|CUDA kernel errors might be asynchronously|"
    r"For debugging consider passing CUDA_LAUNCH_BLOCKING|Device-side assertion tracking was not enabled).*$\n?",
    re.MULTILINE,
)
_BLANK_LINES = re.compile(r"\n\s*\n\s*\n")
_WARNING = re.compile(r"^.*Warning: .*$\n?", re.MULTILINE)

CARRIERS = frozenset(
    {
        "ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException",
        "RayTaskError", "RemoteTraceback", "RemoteError", "TrainingFailedError", "RendezvousClosedError",
        "SignalException", "SystemExit",
    }
)  # fmt: skip
"""Exceptions with which a launcher passes on how a worker ended."""
LAUNCHER_FILE = re.compile(
    r"""/torch/distributed/(?:elastic|launch|run|launcher)\b
      | /(?:accelerate/commands|deepspeed/launcher|horovod/runner|paddle/distributed/launch)/
      | /s?bin/(?:torchrun|accelerate|deepspeed|horovodrun|paddlejob|ray)$
    """,
    re.VERBOSE,
)

_WORDS = {
    "Segmentation fault": signal.SIGSEGV,
    "Killed": signal.SIGKILL,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Aborted": signal.SIGABRT,
    "Floating point exception": signal.SIGFPE,
    "Terminated": signal.SIGTERM,
    "Hangup": signal.SIGHUP,
}
_SIGNALS = re.compile(
    rf"""\bSignal[ ](?P<a>\d+)[ ]\(SIG\w+\)[ ]received                    # torchrun
       | <Signals\.(?P<b>SIG\w+):[ ]\d+>                                  # subprocess
       | \b(?:terminated|killed|died|exited)[ ](?:with|by|on|due[ ]to)[ ](?:signal:?[ ]?)?(?P<c>(?-i:SIG[A-Z]+))\b
       | \b(?:terminated|killed|died|exited)[ ](?:with|by|on|due[ ]to)[ ]signal:?[ ]?(?P<d>\d+)   # mpirun
       | \bSignal:[ ][\w ]+\((?P<e>\d+)\)                                 # Open MPI
       | \bCaught[ ]signal[ ](?P<f>\d+)\b                                 # UCX
       | \bReceived[ ](?P<g>\d+)[ ]death[ ]signal                         # torchrun's agent
       | \b(?:exit|return)(?:ed|s)?[ _]?(?:with[ ])?(?:exit[ ]|return[ ])?(?:code|status)\s*(?:[:=]\s*)?-(?P<h>\d+)
       | \bcode[ ]-(?P<i>\d+)[ ]log\b                                     # Paddle
       | \b(?:exit(?:ed)?[ _]?(?:with[ ])?(?:exit[ ])?)?(?:code|status)\s*(?:[:=]\s*)?(?P<j>1(?:3[0-9]|4[0-3]))\b
       | ^(?:.*:[ ]|.*[ ]line[ ]\d+:[ ]+\d+[ ])?(?P<word>{"|".join(map(re.escape, _WORDS))})(?:[ ]\(core[ ]dumped\)|[ ]{{2,}}.*)?\s*$
    """,
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)  # fmt: skip
_OUT_OF_MEMORY = re.compile(r"\boom-kill|\binvoked oom-killer|\bkilled process \d+", re.IGNORECASE)
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SHELL_BASE = 128
"""Offset that a shell adds to the number of the signal that ended a program."""


def plain(text: str) -> str:
    """Return a log without the prefixes of its lines and without the text that accompanies every error."""
    text = short(_BLANK_LINES.sub("\n\n", _SCREEN.sub("", text)))
    return _BOILERPLATE.sub("", _PREFIX.sub("", text))


def short(text: str) -> str:
    """Return a text whose lines have about `LINE_LIMIT` characters at most."""
    return "\n".join(_short(line) for line in text.split("\n"))


def _short(line: str) -> str:
    if len(line) <= LINE_LIMIT:
        return line
    return f"{line[: LINE_LIMIT // 4]} ... {line[-LINE_LIMIT * 3 // 4 :]}"


def without_warnings(text: str) -> str:
    """Return ``text`` without the lines that Python's ``warnings`` printed."""
    return _WARNING.sub("", text)


def signal_in(text: str) -> int:
    """Return the signal that ended a program, as its launcher or the kernel reports it; 0 without a report.

    Launchers ask the other workers to stop, so signals sent for that purpose count only if there is no other.
    """
    numbers = [number for number in map(_number, _SIGNALS.finditer(text)) if number]
    if not numbers and _OUT_OF_MEMORY.search(text):
        return signal.SIGKILL
    own = [number for number in numbers if number not in _FROM_OUTSIDE]
    return next(iter([*own, *numbers]), 0)


def _number(found: re.Match[str]) -> int:
    """Return the number of a signal; 0 if there is no such signal."""
    kind, said = str(found.lastgroup), str(found[str(found.lastgroup)])
    if kind == "word":
        return next(int(number) for word, number in _WORDS.items() if word.lower() == said.lower())
    if not said.isdigit():
        return int(getattr(signal, said.upper(), 0))
    number = int(said) - SHELL_BASE if kind == "j" else int(said)
    return number if number in frozenset(signal.Signals) else 0
