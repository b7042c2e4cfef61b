"""Waits for a file: ``wait_for_file.py PATH``."""

import sys
import time
from pathlib import Path

while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
