"""What ``--nproc-per-node`` means: a number, or a word for the devices of this machine.

torch knows the devices, and the launcher never imports it: a short process of the interpreter that
will run the workers is asked instead.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from dlrover.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PROBE_TIMEOUT = 60.0
"""Seconds that the asked interpreter gets. Importing torch from a cold network disk takes many."""

ACCELERATORS = "accelerators"
"""The word for the current accelerator's devices, 0 where there is none; for `probe_devices` only."""

_FLAG = "--nproc-per-node"

_MISSING, _UNKNOWN, _UNAVAILABLE = "missing", "unknown", "unavailable"

# Prints the number of devices, or one of the words above, as its last line. Entries of sys.path
# that stand for the current directory go: a file torch.py beside the script is not torch.
_PROGRAM = f"""
import importlib.util, sys
sys.path[:] = [entry for entry in sys.path if entry]

def count(word):
    if importlib.util.find_spec("torch") is None:
        return "{_MISSING}"
    import torch
    if word in ("auto", "{ACCELERATORS}"):
        devices = torch.accelerator
    elif word == "gpu":
        devices = torch.cuda
    elif word == "xpu":
        devices = torch.xpu
    elif word == torch.device("privateuseone").type and hasattr(torch, word):
        devices = torch.get_device_module(word)
    else:
        return "{_UNKNOWN}"
    return devices.device_count() if devices.is_available() else "{_UNAVAILABLE}"

print(count(sys.argv[1]))
"""


def resolve_nproc(text: str, probe: Callable[[str], int]) -> int:
    """The number of workers per node that ``--nproc-per-node text`` asks for, at least 1.

    ``probe`` is asked only about words, as `probe_devices` is.

    Raises:
        ConfigurationError: ``text`` is neither a whole number nor a word, or there is no worker.
    """
    try:
        count = int(text)
    except ValueError:
        if not text.isidentifier() or text == ACCELERATORS:
            raise ConfigurationError(
                f"{_FLAG} {text}: neither a whole number nor one of auto, gpu, cpu and xpu."
            ) from None
        count = probe(text)
    if count < 1:
        raise ConfigurationError(f"{_FLAG} {text}: a node needs at least 1 worker.")
    return count


def probe_devices(
    word: str,
    python: str,
    environ: Mapping[str, str] | None = None,
    timeout: float = PROBE_TIMEOUT,
) -> int:
    """How many devices of the kind ``word`` the interpreter ``python`` can use on this machine.

    ``cpu`` counts the processors that this process may run on, ``gpu`` CUDA's (and ROCm's) devices,
    ``xpu`` Intel's, and the name of a backend that is a plug-in to torch (``npu``) its devices.
    ``auto`` counts the current accelerator's devices, and processors where there is none or no
    torch. torchrun counts in the same way.

    ``environ`` is the environment of the asked interpreter (None: this process's), ``timeout`` its
    time limit in seconds.

    Raises:
        ConfigurationError: there is no such device, no torch to ask, or no answer in time.
    """
    if word == "cpu":
        return _processors()
    answer = _ask(word, python, environ, timeout)
    if answer.isdecimal():
        return int(answer)
    if answer in (_MISSING, _UNAVAILABLE) and word in ("auto", ACCELERATORS):
        return _processors() if word == "auto" else 0
    reasons = {
        _MISSING: f"torch, which counts these devices, is not installed for {python}",
        _UNKNOWN: "torch knows no such kind of device; auto, gpu, cpu, xpu or a number is accepted",
        _UNAVAILABLE: f"torch, run by {python}, finds no such device",
    }
    reason = reasons.get(answer, f"{python} answered {answer!r} instead of a number of devices")
    raise ConfigurationError(f"{_FLAG} {word}: {reason}.")


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _ask(word: str, python: str, environ: Mapping[str, str] | None, timeout: float) -> str:
    """The last line that `_PROGRAM` prints about ``word``."""
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM, word],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except OSError as error:
        raise ConfigurationError(
            f"{_FLAG} {word}: cannot start {python} to count the devices ({error.strerror})."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            f"{_FLAG} {word}: {python} did not count the devices within {timeout:g} s; "
            "give the number instead."
        ) from error
    if done.returncode != 0:
        raise ConfigurationError(
            f"{_FLAG} {word}: {python} failed to count the devices ({_last_line(done.stderr)})."
        )
    return _last_line(done.stdout)


def _last_line(text: str) -> str:
    lines = text.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
