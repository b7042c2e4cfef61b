"""A job that cannot be reconciled is tried again, less and less often."""

from __future__ import annotations

import random

import pytest

from dlrover.errors import InfrastructureError
from dlrover.kubernetes.operator.operator import Operator
from tests.kubernetes.memory import MemoryServer


def test_each_failure_of_a_job_doubles_its_delay_up_to_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.0)
    operator = Operator(MemoryServer(), None, "dlrover:1")
    error = InfrastructureError("the API server does not answer")
    delays = [operator._retry("train/digits", error) for _ in range(12)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[60.0] * 6]
    assert operator._retry("train/other", error) == 1.0, "each job has a delay of its own"
    assert operator.stats.failures == 13
    assert "Job train/digits is retried in 60 s: the API server does not answer" in caplog.text
