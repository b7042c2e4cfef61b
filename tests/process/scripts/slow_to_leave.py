"""Takes a second to leave when told to: ``slow_to_leave.py OUT``. Ends when ``OUT/end`` is there."""

import os
import signal
import sys
import time
from pathlib import Path

OUT = Path(sys.argv[1])
RESTART, RANK = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]


def leave(number: int, frame: object) -> None:
    (OUT / f"leaving-{RESTART}-{RANK}").touch()
    time.sleep(1)
    sys.exit()


signal.signal(signal.SIGTERM, leave)
(OUT / f"ready-{RESTART}-{RANK}").touch()
while not (OUT / "end").exists():
    time.sleep(0.01)
