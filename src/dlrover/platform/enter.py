"""``python enter.py FILE... -- COMMAND``: join control groups, then exec a command.

The groups account for the command's resources from its first instruction. Each FILE is a group's
``cgroup.procs``. This file imports only the standard library, because it delays the start of each node.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(words: list[str]) -> None:
    """Join the groups and exec the command."""
    end = words.index("--")
    for file in words[:end]:
        Path(file).write_text(str(os.getpid()))
    command = words[end + 1 :]
    os.execvp(command[0], command)  # noqa: S606 - the caller supplies the command


if __name__ == "__main__":
    main(sys.argv[1:])
