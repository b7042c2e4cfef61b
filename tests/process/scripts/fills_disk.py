"""Fills the disk of a directory, then prints and ends as it is asked to: ``fills_disk.py DIR END``.

``END`` is ``well``, ``badly`` (with an exception) or ``never``.
"""

import contextlib
import sys
import time
from pathlib import Path

directory, end = Path(sys.argv[1]), sys.argv[2]
with (directory / "filler").open("wb", buffering=0) as filler:
    for size in (4096, 1):
        with contextlib.suppress(OSError):
            while True:
                filler.write(bytes(size))
for number in range(2000):
    sys.stdout.write(f"line {number}\n")
sys.stderr.write("last words\n")
if end == "badly":
    raise ValueError("a bug of the program")
while end == "never":
    time.sleep(1)
