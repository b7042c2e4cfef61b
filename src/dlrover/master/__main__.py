"""Entry point of ``python -m dlrover.master``."""

import sys

from dlrover.master.app import main

sys.exit(main())
