"""A program of the original. See docs/from-dlrover.md; made by scripts/original-names."""

import sys

from dlrover.cli import command
from dlrover.original.programs import master, run


def main() -> int:
    """Run the program; return its exit code."""
    return run(command, master)


if __name__ == "__main__":
    sys.exit(main())
