"""Does not leave when it is told to: ``stubborn.py OUT``."""

import os
import signal
import sys
import time
from pathlib import Path

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
Path(sys.argv[1], f"ready-{os.environ['RANK']}").touch()
while True:
    time.sleep(1)
