"""``--nproc-per-node``: a number, or a word for the devices of this machine.

torch knows the devices, but the launcher never imports it: a short process of the workers'
interpreter counts them instead.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping

from dlrover.errors import ConfigurationError, kind_of
from dlrover.training.worker.progress import MAX_SLOTS

PROBE_TIMEOUT = 60.0
"""Seconds that the interpreter has to answer. Importing torch from a cold network disk takes many."""

ACCELERATORS = "accelerators"
"""Word for the current accelerator's devices, 0 without one; for `probe_devices` only."""

_FLAG = "--nproc-per-node"

_MISSING, _UNKNOWN, _UNAVAILABLE = "missing", "unknown", "unavailable"

# Prints the number of devices, or one of the words above, as its last line. It removes the current
# directory from sys.path: a file torch.py beside the script is not torch.
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
    """Return the number of workers per node that ``--nproc-per-node text`` asks for, at least 1.

    ``probe`` counts the devices that a word stands for, as `probe_devices` does.

    Raises:
        ConfigurationError: ``text`` is neither a whole number nor a word, or asks for no worker or too many.
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
    if count > MAX_SLOTS:
        raise ConfigurationError(f"{_FLAG} {text}: a node runs at most {MAX_SLOTS} workers.")
    return count


def probe_devices(
    word: str,
    python: str,
    environ: Mapping[str, str] | None = None,
    timeout: float = PROBE_TIMEOUT,
) -> int:
    """Return how many devices of the kind ``word`` the interpreter ``python`` can use here.

    ``cpu`` counts the processors that this process may run on, ``gpu`` CUDA (and ROCm) devices, ``xpu``
    Intel devices, and the name of a torch plug-in's backend (``npu``) its devices. ``auto`` counts the
    current accelerator's devices, or processors without an accelerator or without torch. torchrun
    counts in the same way.

    ``environ`` is the interpreter's environment (None: this process's), ``timeout`` its time limit in
    seconds.

    Raises:
        ConfigurationError: there is no such device, no torch, or no answer in time.
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
    """Return the last line that `_PROGRAM` prints for ``word``."""
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
        raise kind_of(error)(
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
