"""Probes of the host's memory and disk."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from dlrover.spec.check import Component, ProbeResult

MEMORY_BYTES = 32 << 20
"""Bytes per copy; more than processor caches hold."""
MEMORY_SECONDS = 0.25
"""Duration of the repeated copies; the fastest counts."""
DISK_BYTES = 16 << 20
_PATTERN = bytes(range(256)) * 4096


def memory() -> ProbeResult:
    """Measure the rate at which one thread reads and writes the host's memory."""
    source, target = bytearray(MEMORY_BYTES), memoryview(bytearray(MEMORY_BYTES))
    best = float("inf")
    until = time.perf_counter() + MEMORY_SECONDS
    while True:
        began = time.perf_counter()
        target[:] = source
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended >= until:
            break
    figure = 2 * MEMORY_BYTES / best / 1e9
    return ProbeResult(component=Component.MEMORY, figure=figure, unit="GB/s")


def disk(directory: Path) -> ProbeResult:
    """Measure the write rate to the disk of ``directory``, synced; read the data back and compare it.

    Raises:
        OSError: the directory is not writable, or the data read back differs.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        began = time.perf_counter()
        for _ in range(DISK_BYTES // len(_PATTERN)):
            file.write(_PATTERN)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        file.seek(0)
        while block := file.read(len(_PATTERN)):
            if block != _PATTERN:
                raise OSError(5, "the data read back is not the data written")
    return ProbeResult(component=Component.DISK, figure=DISK_BYTES / seconds / 1e6, unit="MB/s")
