"""A Checkpointer and the process that it belongs to: a fork is another process, and memory ends with the job."""

import logging
import os
from collections.abc import Callable

import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.errors import ConfigurationError
from tests.support.children import Child

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(60)]


def state(value: float) -> dict:
    return {"w": torch.full((1000,), value)}


def refusal(use: Callable[[], object]) -> str:
    try:
        use()
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_does_not_use_the_connection_of_its_parent(directory) -> None:
    saves = Checkpointer(directory, linger=0.0)
    saves.save(1, state(1.0))

    def use() -> list[str]:
        uses = (lambda: saves.save(2, state(2.0)), saves.wait, lambda: saves.load(state(0.0)))
        said = [refusal(use) for use in uses]
        saves.close()
        return said

    child = Child(use)
    refused = child.result()
    try:
        assert all(refused)
        assert (
            f"belongs to process {os.getpid()}, and this one, {child.pid}, is a fork" in refused[0]
        )
        found = state(0.0)
        record = saves.load(found)
        assert (record.step, record.source, float(found["w"][0])) == (1, "memory", 1.0)
    finally:
        saves.close()


def test_wait_warns_once_if_all_steps_are_in_memory_only(directory, caplog) -> None:
    caplog.set_level(logging.WARNING)
    saves = Checkpointer(directory, linger=0.0)
    saves.wait()
    assert "in memory only" not in caplog.text
    for step in (1, 2):
        saves.save(step, state(step))
        saves.wait()
    saves.close()
    assert caplog.text.count("in memory only") == 1
    assert "Step 1 is in memory only, which ends with the job" in caplog.text


def test_wait_does_not_warn_if_a_step_was_stored(directory, caplog) -> None:
    caplog.set_level(logging.WARNING)
    saves = Checkpointer(directory, linger=0.0, interval=2)
    for step in (2, 3):
        saves.save(step, state(step))
        saves.wait()
    saves.close()
    assert "in memory only" not in caplog.text
