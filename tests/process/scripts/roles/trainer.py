"""The trainer: two ranks; rank 0 takes one batch a step and adds it up. Its state is saved after each step."""

import json
import os
from pathlib import Path

import numpy as np

from dlrover.roles import Queue, current_worker, weights

worker = current_worker()
out = Path(worker.config["out"])
(out / f"trainer-{worker.index}-{os.getpid()}").touch()
if worker.index:
    import threading

    threading.Event().wait()
file = out / "state.json"
step, total, learned = json.loads(file.read_text()) if file.exists() else (0, 0, [])
worker.resumed(step)
samples = Queue("samples", size=3)


def publish():
    weights.publish({"step": np.array([float(step)]), "total": np.array([float(total)])}, step)


if not weights.versions() or weights.versions()[-1].step < step:
    publish()
while True:
    items = samples.get(timeout=1e6)
    step, total = step + 1, total + sum(items[0]["squares"])
    learned.append(items[0]["batch"])
    samples.ack(items, step=step)
    new = out / "state.new"
    new.write_text(json.dumps([step, total, learned]))
    new.replace(file)
    publish()
