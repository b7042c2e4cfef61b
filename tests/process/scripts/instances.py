"""Workers that step beside servers that are worlds by themselves: ``instances.py OUT``.

``OUT/starts`` has a line for each process that started: role, rank in it, size of it, rank, world size, restarts,
pid. ``OUT/steps`` has one for each step of worker 0: its pid. Workers end when ``OUT/go`` exists, servers never.
"""

import os
import signal
import sys
import time
from pathlib import Path


def main(out: Path) -> None:
    env = os.environ
    names = (
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "RANK",
        "WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
    )
    note(out / "starts", *(env[name] for name in names), os.getpid())
    while env["ROLE_NAME"] == "ps":
        signal.pause()
    while not (out / "go").exists():
        if env["RANK"] == "0":
            note(out / "steps", os.getpid())
        time.sleep(0.05)


def note(path: Path, *words: object) -> None:
    with path.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
