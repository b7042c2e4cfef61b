"""The trainer: plain supervised steps; every few steps it publishes its weights and goes on at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import model
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.roles import current_worker, weights

torch.set_num_threads(1)
worker = current_worker()
settings = worker.config
net = model.Model()
optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
state: dict[str, Any] = {"model": net, "optimizer": optimizer, "step": 0}
checkpointer = Checkpointer(Path(settings["out"]) / "checkpoints", interval=100)
checkpointer.load(state)
worker.resumed(state["step"])  # weights published after it are taken back, and evaluated again
while state["step"] < settings["steps"]:
    step = state["step"] = state["step"] + 1
    loss = model.loss_of(net, *model.batch(step, 64))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    checkpointer.save(step, state)
    due = step % settings["every"] == 0
    if due and (not weights.versions() or weights.versions()[-1].step < step):
        weights.publish(net.state_dict(), step)
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
checkpointer.wait()
