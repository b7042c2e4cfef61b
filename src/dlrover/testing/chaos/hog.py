"""``python -m dlrover.testing.chaos.hog BYTES``: holds so much memory until it is killed."""

from __future__ import annotations

import mmap
import signal
import sys
from pathlib import Path

CHUNK = 16 << 20
"""Bytes that are taken at a time."""


def main(nbytes: int) -> None:
    """Take memory, touch it, and stay. If memory runs out, the kernel ends this process first."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    held = []
    while nbytes > 0:
        chunk = mmap.mmap(-1, min(CHUNK, nbytes))
        for page in range(0, len(chunk), mmap.PAGESIZE):
            chunk[page] = 1
        held.append(chunk)
        nbytes -= len(chunk)
    signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]))
