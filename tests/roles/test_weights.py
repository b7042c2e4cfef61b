"""Weights between processes of roles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dlrover.roles import current_worker, weights, RoleGroup, Queue
from dlrover.roles.runtime import worker
from tests.roles.coordinators import Coordinator, coordinator
from tests.waiting import until


def test_w(tmp_path, monkeypatch):
    import time

    with coordinator(tmp_path) as made:
        for name, value in made.variables("trainer", 0, 1, 1).items():
            monkeypatch.setenv(name, value)
        try:
            big = {"w": np.random.default_rng(0).random(16_000_000), "b": np.arange(3)}
            for step in range(1, 6):
                t = time.perf_counter()
                v = weights.publish({**big, "note": "x"}, step)
                t1 = time.perf_counter()
                w = weights.latest(timeout=5)
                sd = w.state_dict()
                t2 = time.perf_counter()
                assert w.version == v and (sd["w"] == big["w"]).all() and sd["note"] == "x"
                print(v, t1 - t, t2 - t1, current_worker().holding.memory / 1e6)
            t = time.perf_counter()
            big["w"].copy()
            print("copy", time.perf_counter() - t)
            q = Queue("q", 5)
            q.put(*range(20), timeout=1) if False else None
            q.put(1, {"a": np.arange(3)}, "x", cursor={"n": 3})
            got = q.get(2)
            print(list(got), got.numbers, current_worker().cursor, q.status())
            made.restart()
            q.ack(got, step=3)
            print(q.status(), list(q.get()))
            t = time.perf_counter()
            for i in range(500):
                q.put(i)
                q.ack(q.get())
            print("put+get+ack/s", 500 / (time.perf_counter() - t))
        finally:
            worker.leave()
