"""A program of the original. See docs/from-dlrover.md; made by scripts/original-names."""

import sys

from dlrover.original.programs import estimator


def main() -> int:
    """Run the program; return its exit code."""
    return estimator()


if __name__ == "__main__":
    sys.exit(main())
