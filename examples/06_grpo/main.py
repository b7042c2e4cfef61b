"""The driver: from prompts to samples, batch by batch. Its cursor is the next batch."""

from __future__ import annotations

import json
import time
from pathlib import Path

import model

from dlrover.roles import Queue, RoleGroup, current_worker, weights

PROMPTS = 16
"""Prompts of one batch."""
AHEAD = 4
"""Batches that may wait for the trainer."""

worker = current_worker()
settings = worker.config
out = Path(settings["out"])
out.mkdir(parents=True, exist_ok=True)
rollout, reference, reward = (RoleGroup(name) for name in ("rollout", "reference", "reward"))
samples = Queue("samples", size=AHEAD)

for number in range(worker.cursor or 0, settings["steps"]):
    current = weights.latest().version
    prompts = model.prompts(number, PROMPTS)
    began = time.time()
    groups = rollout.call_batch("generate", PROMPTS, prompts).result()
    answers = [group["answers"] for group in groups]
    scored = reward.call_batch("score", PROMPTS, prompts, answers)
    known = reference.call_batch("log_probabilities", PROMPTS, prompts, answers)
    sample = {
        "batch": number,
        "prompts": prompts,
        "answers": answers,
        "logs": [group["logs"] for group in groups],
        "rewards": scored.result(),
        "reference": known.result(),
    }
    record = {
        "batch": number,
        "current": [current.epoch, current.step],
        "versions": [group["version"] for group in groups],
        "seconds": time.time() - began,
        "time": time.time(),
        "pid": worker.pid,
    }
    samples.put(sample, cursor=number + 1)  # both at one instant, so no batch comes twice
    with (out / "batches.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")

newest = weights.latest()
while newest.version.step < settings["steps"]:
    newest = weights.latest(newer_than=newest.version)
final = model.build(settings)
final.load_state_dict(newest.state_dict())
import torch  # noqa: E402

questions = model.prompts(10**6, 256)
answered = model.generate(final, torch.tensor(questions), greedy=True).tolist()
score = sum(map(model.reward, questions, answered)) / len(questions)
(out / "result.json").write_text(json.dumps({"reward": score, "version": str(newest.version)}))
print(f"{settings['steps']} steps: reward {score:.3f}", flush=True)
