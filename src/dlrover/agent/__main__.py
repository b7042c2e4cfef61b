"""Entry point of ``python -m dlrover.agent``."""

import sys

from dlrover.agent.app import main

sys.exit(main())
