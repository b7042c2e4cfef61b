"""Saves its state when told to leave, with the help of a child: ``obedient.py OUT``.

What happens is noted in ``OUT``, one file for each thing. The child stands for a data loader: it must
still be there when the worker saves. A second child has left the worker's session.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

OUT = Path(sys.argv[1])
RANK = os.environ["RANK"]

CHILD = """
import signal, sys
def leave(number, frame):
    open(sys.argv[1], "w").close()
    sys.exit()
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, leave)
for line in sys.stdin:
    print("batch", flush=True)
"""


def note(name: str, text: str = "") -> None:
    (OUT / f"{name}-{RANK}").write_text(text)


def save(number: int, frame: object) -> None:
    note("signalled", signal.Signals(number).name)
    time.sleep(0.5)
    note("batch", ask())
    note("saved")
    sys.exit()


def ask() -> str:
    """A batch of the loader; empty if it is gone."""
    loader.stdin.write("next\n")
    loader.stdin.flush()
    return loader.stdout.readline()


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, save)
loader = subprocess.Popen(
    [sys.executable, "-c", CHILD, str(OUT / f"child-signalled-{RANK}")],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
)
subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True)
assert ask() == "batch\n"
note("ready")
while True:
    time.sleep(1)
