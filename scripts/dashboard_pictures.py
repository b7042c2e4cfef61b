#!/usr/bin/env python3
"""Take the pictures of the dashboard in the documentation anew: python scripts/dashboard_pictures.py [SECONDS].

They show a job of two nodes, one of which is lost after a third of the time, in a headless Chromium
(`scripts/services`). It needs dlrover[dashboard,torch]. Look at each before you commit it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browser import Browser, chromium  # noqa: E402 - below the root
from tests.waiting import until  # noqa: E402

PROGRAM = """
import time
import torch
import torch.distributed as dist
import dlrover.training
from dlrover.checkpoint import Checkpointer

STEPS, SAVE_EVERY = 4000, 40
dist.init_process_group("gloo")
model = torch.nn.Linear(2000, 2000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer, "step": 0}
checkpointer = Checkpointer("checkpoints", interval=200)
checkpointer.load(state)
for step in range(state["step"], STEPS):
    dlrover.training.steps_left(STEPS - step)
    time.sleep(0.25)
    optimizer.step()
    state["step"] = step + 1
    if state["step"] % SAVE_EVERY == 0:
        checkpointer.save(step + 1, state)
"""
PICTURES = {
    "dashboard-light.png": (1200, 1080, "light"),
    "dashboard-dark.png": (1200, 720, "dark"),
    "dashboard-phone.png": (360, 760, "dark"),
}
"""Width, height and colours of each."""


def main(seconds: float) -> None:
    """Run the job for ``seconds``, and take the pictures."""
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        folder = Path(name)
        (folder / "finetune.py").write_text(PROGRAM)
        command = [sys.executable, "-m", "dlrover.cli.run.run", "--local-nodes=2", "--nnodes=1:2",
                   "--dashboard=0", "finetune.py"]  # fmt: skip
        env = os.environ | {"DLROVER_STATE_DIR": str(folder)}
        log = folder / "log"
        with (
            log.open("wb") as out,
            subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=folder) as job,
        ):
            try:
                link = until(lambda: re.search(r"http://\S+token=\S+", log.read_text()), 60)[0]
                browser.open(link)
                browser.until("document.querySelector('.main-cell a')")
                browser.click("finetune")
                time.sleep(seconds / 3)
                agents = [
                    process
                    for process in psutil.Process(job.pid).children(recursive=True)
                    if "dlrover.agent" in process.cmdline()
                ]
                agents[-1].kill()
                time.sleep(2 * seconds / 3)
                take(browser)
            finally:
                job.terminate()


def take(browser: Browser) -> None:
    """Take each picture of the page that is open."""
    for name, (width, height, scheme) in PICTURES.items():
        browser.look(width, height, scheme)
        browser.until(f"innerWidth === {width} && document.querySelector('.buttons')")
        browser.run("document.querySelector('.dir').hidden = true; scrollTo(0, 0)")
        time.sleep(2.0)  # until all is drawn in its new size
        path = ROOT / "docs" / name
        browser.shoot(path)
        path.write_bytes(smaller(path.read_bytes()))


def smaller(png: bytes) -> bytes:
    """Return the same RGB picture without the filters of its lines, which make flat colours larger."""
    chunks, place = [], 8
    while place < len(png):
        size = int.from_bytes(png[place : place + 4], "big")
        chunks.append((png[place + 4 : place + 8], png[place + 8 : place + 8 + size]))
        place += 12 + size
    packed = zlib.decompress(b"".join(data for kind, data in chunks if kind == b"IDAT"))
    width = 3 * int.from_bytes(png[16:20], "big")
    above, plain = bytearray(width), b""
    for start in range(0, len(packed), width + 1):
        line = bytearray(packed[start + 1 : start + 1 + width])
        for x in range(width):
            left, before = (line[x - 3], above[x - 3]) if x >= 3 else (0, 0)
            line[x] = (line[x] + predicted(packed[start], left, above[x], before)) % 256
        above, plain = line, plain + b"\0" + line
    made = png[:33]  # its head, and the size
    for kind, data in ((b"IDAT", zlib.compress(plain, 9)), (b"IEND", b"")):
        made += len(data).to_bytes(4, "big") + kind + data
        made += zlib.crc32(kind + data).to_bytes(4, "big")
    return made


def predicted(filtered: int, left: int, above: int, before: int) -> int:
    """Return what a filter of PNG takes a byte to be."""
    if filtered < 4:
        return (0, left, above, (left + above) // 2)[filtered]
    guess = left + above - before
    return min((left, above, before), key=lambda value: abs(guess - value))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 450.0)
