"""``python -m dlrover.testing.chaos.hog BYTES``: hold ``BYTES`` of memory until killed."""

from __future__ import annotations

import mmap
import signal
import sys
from pathlib import Path

CHUNK = 16 << 20
"""Bytes allocated at a time."""


def main(nbytes: int) -> None:
    """Allocate memory, touch it, and wait. If memory runs out, the kernel kills this process first."""
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
