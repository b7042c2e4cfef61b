"""The original's logger."""

from __future__ import annotations

import logging

default_logger = logging.getLogger("dlrover")
"""The logger of the package. It prints nothing below a warning unless the program configures ``logging``."""
