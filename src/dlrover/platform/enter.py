"""``python enter.py FILE... -- COMMAND``: enter control groups, then become a command.

What the command uses is counted from its first instruction on. Each FILE is a group's ``cgroup.procs``. It
imports the standard library alone: it delays the start of each node.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(words: list[str]) -> None:
    """Enter the groups and become the command."""
    end = words.index("--")
    for file in words[:end]:
        Path(file).write_text(str(os.getpid()))
    command = words[end + 1 :]
    os.execvp(command[0], command)  # noqa: S606 - the command is the caller's


if __name__ == "__main__":
    main(sys.argv[1:])
