"""The roles that others call: each instance is an object, whose methods with ``rpc`` are called."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import model
import torch

from dlrover.roles import rpc, weights

GROUP = 8
"""Answers for each prompt."""


class Rollout:
    """Generates answers with the newest weights of the trainer."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self._model = model.build(settings).eval()
        self._seconds = settings["rollout_time"]
        self._lock = threading.Lock()
        self._load(weights.latest())
        threading.Thread(target=self._follow, daemon=True).start()

    def _load(self, newest: Any) -> None:
        with self._lock:
            newest.load_into(self._model)
            self._version = newest.version

    def _follow(self) -> None:
        while True:  # a version that the trainer took back is replaced, too
            self._load(weights.latest(newer_than=self._version, timeout=86_400))

    @rpc(idempotent=True)
    def generate(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Return for each prompt a group of answers, their log-probabilities, and what made them."""
        repeated = torch.tensor(prompts).repeat_interleave(GROUP, 0)
        with self._lock, torch.no_grad():
            version = [self._version.epoch, self._version.step]
            time.sleep(self._seconds)
            answers = model.generate(self._model, repeated)
            logs = model.log_probabilities(self._model, repeated, answers)
        return [
            {"answers": group.tolist(), "logs": log.tolist(), "version": version, "by": os.getpid()}
            for group, log in zip(answers.split(GROUP), logs.split(GROUP), strict=True)
        ]


class Reference:
    """The model as it was before the training; it holds the policy near itself."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self._model = model.build(settings).eval()

    @rpc(idempotent=True)
    def log_probabilities(
        self, prompts: list[list[int]], answers: list[list[list[int]]]
    ) -> list[Any]:
        repeated = torch.tensor(prompts).repeat_interleave(GROUP, 0)
        with torch.no_grad():
            logs = model.log_probabilities(
                self._model, repeated, torch.tensor(answers).flatten(0, 1)
            )
        return [group.tolist() for group in logs.split(GROUP)]


class Reward:
    """Says how good answers are."""

    @rpc(idempotent=True)
    def score(self, prompts: list[list[int]], answers: list[list[list[int]]]) -> list[list[float]]:
        return [
            [model.reward(prompt, answer) for answer in group]
            for prompt, group in zip(prompts, answers, strict=True)
        ]
