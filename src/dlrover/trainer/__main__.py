"""A program of the original. See docs/from-dlrover.md; made by scripts/original-names."""

import sys

from dlrover.cli import launcher
from dlrover.original.programs import estimator, run


def main() -> int:
    """Run the program; return its exit code."""
    return run(launcher, estimator)


if __name__ == "__main__":
    sys.exit(main())
