"""``python -m dlrover.roles``: the coordinator of a job of several roles."""

import sys

from dlrover.roles.coordinator.app import main

if __name__ == "__main__":
    sys.exit(main())
