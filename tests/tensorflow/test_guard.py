"""What the guard does with a function's own errors, in a program that runs alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

from dlrover.data import Records
from dlrover.tensorflow import resilient
from dlrover.tensorflow.cluster import Present
from dlrover.tensorflow.watch import ClusterChangedError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_an_error_that_is_its_own_cause_is_raised_once() -> None:
    calls = []

    @resilient
    def train() -> None:
        calls.append(1)
        error = ValueError("the program's own")
        raise error from error

    with pytest.raises(ValueError, match="the program's own"):
        train()
    assert len(calls) == 1


def test_records_made_outside_are_read_again_after_a_loss_before_the_first_checkpoint(
    tmp_path: Path,
) -> None:
    records = Records(range(50))
    read: list[list[int]] = []

    @resilient(checkpoint=tmp_path)
    def train(cluster: Present) -> None:
        cluster.resume(None, records=records)
        read.append([])
        for sample in records:
            read[-1].append(sample)
            if len(read) < 3 and len(read[-1]) == 10:
                raise ClusterChangedError("ps 0 is gone.")

    train()
    assert read == [[*range(10)], [*range(10)], [*range(50)]]
