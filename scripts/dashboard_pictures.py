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
        browser.shoot(ROOT / "docs" / name)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 450.0)
