"""The evaluation: each version of the weights that it can get, on data that is not trained on."""

from __future__ import annotations

import json
from pathlib import Path

import model
import torch

from dlrover.roles import current_worker, weights

torch.set_num_threads(1)
worker = current_worker()
settings = worker.config
out = Path(settings["out"])
out.mkdir(parents=True, exist_ok=True)
net = model.Model().eval()
tokens, answers = model.batch(model.HELD_OUT, 512)
last = settings["steps"] - settings["steps"] % settings["every"]
version = None
while version is None or version.step < last:
    newest = weights.latest(newer_than=version, timeout=86_400)
    newest.load_into(net)
    version = newest.version
    with torch.no_grad():
        right = float((net(tokens).argmax(-1) == answers).all(1).float().mean())
    with (out / "evaluation.jsonl").open("a") as file:
        file.write(json.dumps({"step": version.step, "right": right}) + "\n")
    print(f"version {version}: {right:.1%} right", flush=True)
