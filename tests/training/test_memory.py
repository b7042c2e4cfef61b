"""What is measured of a device's memory, and when it is decided on; the device is a stand-in."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dlrover.planning import tuning  # noqa: E402
from dlrover.training import memory  # noqa: E402
from dlrover.training.memory import DeviceMemory, MicroBatchTuner  # noqa: E402

pytestmark = pytest.mark.torch


class Counters:
    """A device of 1,000 bytes, of which others have 100."""

    peak, allocated, reserved, resets = 0, 200, 300, 0

    def reset_peak_memory_stats(self) -> None:
        self.resets += 1
        self.peak = self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak

    def memory_allocated(self) -> int:
        return self.allocated

    def memory_reserved(self) -> int:
        return self.reserved

    def get_memory_info(self) -> tuple[int, int]:
        return 900 - self.reserved, 1000


def test_what_is_measured() -> None:
    device = DeviceMemory()
    device._counters = counters = Counters()
    device.begin()
    counters.peak = 280
    assert device.measured(4) == tuning.Memory({4: 280}, 200, 900)
    device.begin()
    counters.peak = 360
    assert device.measured(8) == tuning.Memory({4: 280, 8: 360}, 200, 900)


def test_a_device_that_does_not_count() -> None:
    class Other(Counters):
        def reset_peak_memory_stats(self) -> None:
            raise NotImplementedError

    device = DeviceMemory()
    device._counters = Other()
    device.begin()
    assert device.measured(4) is None


def test_decisions_wait_until_the_last_one_has_taken_effect(caplog) -> None:
    device = DeviceMemory()
    device._counters = counters = Counters()
    tuner = MicroBatchTuner(4, 64, memory=device)
    changes = []
    for step in range(1, 500):
        counters.peak = 200 + 20 * tuner._now
        change = tuner.step((0, 10 * step), (0, 10 * step + 1000))
        if change is not None:
            changes.append((step, change))
    # 20 bytes a sample, and 610 that can be used: 8, 16, then 30.
    steps = memory.STEPS
    assert changes[0] == (steps, (8, (0, 1000 + 10 * steps)))
    second = steps + 100 + steps - 1
    assert changes[1] == (second, (16, (0, 1000 + 10 * second)))
    third = second + 100 + steps - 1
    assert changes[2:] == [(third, (30, (0, 1000 + 10 * third)))]
    assert "The micro-batch has 8 samples from now on, 4 until now: a sample takes" in caplog.text
