"""The driver: from prompts to samples, batch by batch. Its cursor is the next batch."""

from __future__ import annotations

import json
import time
from pathlib import Path

import model

from dlrover.roles import Queue, RoleGroup, current_worker, weights

PROMPTS = 16
"""Prompts of one batch."""

worker = current_worker()
settings = worker.config
out = Path(settings["out"])
out.mkdir(parents=True, exist_ok=True)
rollout, reference, reward = (RoleGroup(name) for name in ("rollout", "reference", "reward"))
samples = Queue("samples", size=settings["ahead"])

for number in range(worker.cursor or 0, settings["steps"]):
    current = weights.latest().version
    prompts = model.prompts(number, PROMPTS)
    began = time.time()
    groups = rollout.call_batch("generate", PROMPTS, prompts).result()
    made = {
        "batch": number,
        "current": [current.epoch, current.step],
        "versions": [group["version"] for group in groups],
        "by": [group["by"] for group in groups],
        "between": [began, time.time()],
    }
    answers = [group["answers"] for group in groups]
    scored = reward.call_batch("score", PROMPTS, prompts, answers)
    known = reference.call_batch("log_probabilities", PROMPTS, prompts, answers)
    sample = {
        **made,
        "prompts": prompts,
        "answers": answers,
        "logs": [group["logs"] for group in groups],
        "rewards": scored.result(),
        "reference": known.result(),
    }
    samples.put(sample, cursor=number + 1)  # both at one instant, so no batch comes twice
    with (out / "batches.jsonl").open("a") as file:
        file.write(json.dumps(made) + "\n")

newest = weights.latest()
while newest.version.step < settings["steps"]:
    newest = weights.latest(newer_than=newest.version)
final = model.build(settings)
newest.load_into(final)
import torch  # noqa: E402

questions = model.prompts(10**6, 256)
answered = model.generate(final, torch.tensor(questions), greedy=True).tolist()
score = sum(map(model.reward, questions, answered)) / len(questions)
result = {"reward": score, "version": str(newest.version), "learned": newest["learned"]}
(out / "result.json").write_text(json.dumps(result))
print(f"{settings['steps']} steps: reward {score:.3f}", flush=True)
