"""``python -m dlrover.platform.enter FILE... -- COMMAND``: enter control groups, then become a command.

A process that is in its groups from its first instruction on uses nothing outside of them. Each FILE is a
group's ``cgroup.procs``.
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
