"""The trainer: GRPO on two ranks with DDP. It goes on from its last memory checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import model
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlrover.checkpoint import Checkpointer
from dlrover.roles import Queue, current_worker, weights

CLIP, KEEP_NEAR, RATE, STEEPEST = 0.2, 0.005, 5e-3, 1.0

torch.set_num_threads(1)
dist.init_process_group("gloo")
worker = current_worker()
settings, first = worker.config, dist.get_rank() == 0
out = Path(settings["out"])
policy = model.build(settings)
wrapped = DistributedDataParallel(policy)
optimizer = torch.optim.AdamW(policy.parameters(), RATE)
state: dict[str, Any] = {"model": policy, "optimizer": optimizer, "step": 0, "learned": []}
checkpointer = Checkpointer(out / "checkpoints", interval=50)
checkpointer.load(state)
worker.resumed(state["step"])  # what was learned and published after it never was


def publish() -> None:
    """Publish the policy, with the numbers of the batches that it has learned."""
    weights.publish({**policy.state_dict(), "learned": state["learned"]}, state["step"])


if first:
    samples = Queue("samples", size=settings["ahead"])
    published = weights.versions()
    if not published or published[-1].step < state["step"]:
        publish()


def received(item: Any) -> tuple[int, list[torch.Tensor]]:
    """Return the number of a batch that rank 0 has, and this rank's half: prompts, answers, log-probabilities, advantages,
    reference."""
    if first:
        rewards = torch.tensor(item["rewards"])
        spread = rewards - rewards.mean(1, keepdim=True)
        advantages = spread / (rewards.std(1, keepdim=True) + 1e-4)
        prompts = torch.tensor(item["prompts"]).repeat_interleave(rewards.shape[1], 0)
        flat = [torch.tensor(item[key]).flatten(0, 1) for key in ("answers", "logs", "reference")]
        whole = [prompts, flat[0], flat[1], advantages.flatten()[:, None], flat[2]]
    shape = torch.tensor([len(whole[0]), item["batch"]] if first else [0, 0])
    dist.broadcast(shape, 0)
    count, kinds = (
        int(shape[0]),
        (torch.int64, torch.int64, torch.float32, torch.float32, torch.float32),
    )
    parts = []
    for place, (kind, width) in enumerate(zip(kinds, (4, 4, 4, 1, 4), strict=True)):
        tensor = whole[place] if first else torch.empty(count, width, dtype=kind)
        dist.broadcast(tensor, 0)
        parts.append(tensor.chunk(dist.get_world_size())[dist.get_rank()])
    return int(shape[1]), parts


while state["step"] < settings["steps"]:
    items = samples.get() if first else None
    batch, parts = received(items[0] if items else None)
    prompts, answers, before, advantages, reference = parts
    logs = wrapped(torch.cat([model.start(prompts), answers[:, :-1]], 1))[:, -model.LENGTH :]
    logs = logs.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    ratio = (logs - before).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    apart = (reference - logs).exp() - (reference - logs) - 1  # estimates the KL divergence
    loss = (KEEP_NEAR * apart - gain).mean()
    optimizer.zero_grad()
    loss.backward()
    # Once most answers are right, a single wrong one in a group counts for much.
    torch.nn.utils.clip_grad_norm_(policy.parameters(), STEEPEST)
    optimizer.step()
    step = state["step"] = state["step"] + 1
    state["learned"].append(batch)
    if first:
        samples.ack(items, step=step)  # leased again if the role goes back behind this step
    checkpointer.save(step, state)
    if first:
        publish()
        rewards = torch.tensor(items[0]["rewards"])
        record = {"step": step, "batch": batch, "reward": float(rewards.mean())}
        with (out / "learned.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        if step % 25 == 0:
            print(f"step {step}: reward {float(rewards.mean()):.3f}", flush=True)
    if settings["step_time"]:
        time.sleep(settings["step_time"])
checkpointer.wait()
dist.destroy_process_group()
