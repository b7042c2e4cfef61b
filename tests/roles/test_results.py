"""Results of several calls, which come one by one."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from dlrover.roles.runtime import groups
from dlrover.roles.runtime.groups import FutureSequence


class Later(Future[Any]):
    """A future whose result comes so many seconds after the waiting for it began, on a clock of the test."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def result(self, timeout: float | None = None) -> Any:
        waits = self.seconds if timeout is None else min(self.seconds, timeout)
        self.clock[0] += waits
        if waits < self.seconds:
            raise TimeoutError
        return [self.seconds]


@pytest.mark.parametrize("lengths", [None, [1, 1, 1]])
def test_the_time_limit_is_one_of_all_results_together(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int] | None
) -> None:
    clock = [100.0]
    monkeypatch.setattr(groups.time, "monotonic", lambda: clock[0])
    results = FutureSequence([Later(clock, 9.0) for _ in range(3)], lengths)
    assert len(results.result(30.0)) == 3
    began = clock[0]
    with pytest.raises(TimeoutError):
        results.result(10.0)
    assert clock[0] - began == 10.0
    assert len(results.result()) == 3
