"""Squares numbers with the newest weights of the trainer, and says which these were."""

import os
import threading
from pathlib import Path

import numpy as np

from dlrover.roles import current_worker, rpc, weights


class Rollout:
    def __init__(self, settings):
        worker = current_worker()
        known = weights.versions()
        with (Path(settings["out"]) / "rollouts").open("a") as file:
            file.write(f"{worker.index} {os.getpid()} {known[-1].step if known else 0}\n")
        self._load(weights.latest())
        threading.Thread(target=self._follow, daemon=True).start()

    def _load(self, newest):
        state = {"step": np.zeros(1)}
        newest.load_into(state)
        self._version, self._step = newest.version, int(state["step"][0])

    def _follow(self):
        while True:
            self._load(weights.latest(newer_than=self._version, timeout=1e6))

    @rpc(idempotent=True)
    def square(self, numbers):
        return [[number * number, self._step, os.getpid()] for number in numbers]
