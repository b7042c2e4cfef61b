"""Fails on rank 1, in the way that its argument names."""

import os
import resource
import subprocess
import sys
import tempfile
import time


def exception() -> None:
    raise ValueError("the batch is empty")


def odd_name() -> None:
    raise ValueError(f"{os.fsdecode(b'caf' + bytes([233]))} is damaged")


def leave() -> None:
    os.write(2, b"leaving without a word\n")
    os._exit(3)


def killed() -> None:
    subprocess.run(["kill", "-KILL", str(os.getpid())], check=True)


def segfault() -> None:
    import ctypes

    ctypes.string_at(0)


def bus_error() -> None:
    """Read a page of a mapped file that has been cut off."""
    import mmap

    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        mapped[0]


def no_memory() -> None:
    limit = 1 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    bytearray(1 << 40)


def out_of_memory() -> None:
    """Use more memory than the control group allows."""
    held = []
    while True:
        held.append(b"x" * (16 << 20))


def missing_module() -> None:
    import no_such_module_anywhere  # noqa: F401


def stalls() -> None:
    time.sleep(60)


if os.environ["RANK"] == "1":
    globals()[sys.argv[1]]()
else:
    stalls()
