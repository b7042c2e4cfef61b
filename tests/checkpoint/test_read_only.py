"""An evaluation that reads the directory of a training on the same machine."""

import os

import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.saver import state as saver_states
from dlrover.errors import CheckpointsLostError, ConfigurationError, InfrastructureError
from tests.waiting import until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]


def state(step: int) -> dict:
    return {"w": torch.full((100,), float(step)), "step": step}


def files(directory) -> dict[str, int]:
    """All but those that change with the clock of the saver."""
    found = {entry.name: entry.stat().st_mtime_ns for entry in directory.iterdir()}
    return {name: at for name, at in found.items() if not name.startswith(("lease.beat", "saver"))}


def test_it_sees_the_newest_stored_step_and_disturbs_nothing(directory):
    training = Checkpointer(directory, linger=0.0)
    training.save(1, state(1), to="storage")
    training.wait()
    training.save(2, state(2))
    until((directory / "saved").exists)
    before = files(directory)
    evaluation = Checkpointer(directory, read_only=True)
    for _ in range(2):
        seen = state(0)
        record = evaluation.load(seen)
        assert (record.step, record.source, seen["step"]) == (1, "storage", 1)
    record, seen = evaluation.read()
    assert (record.step, seen["w"][0].item()) == (1, 1.0)
    with pytest.raises(ConfigurationError, match="read_only=True"):
        evaluation.save(3, state(3))
    assert files(directory) == before
    training.save(3, state(3), to="storage")
    training.wait()
    assert evaluation.load(seen).step == 3
    evaluation.wait()
    evaluation.close()
    assert training.load(state(0)).source == "memory"
    training.close()


def test_nothing_stored_is_nothing_to_read_and_nothing_is_made(directory):
    evaluation = Checkpointer(directory, read_only=True)
    assert evaluation.load(state(0)) is None
    assert not directory.exists()
    training = Checkpointer(directory, linger=5.0)
    training.save(1, state(1))
    assert evaluation.load(state(0)) is None, "memory is the training's"
    training.save(2, state(2), to="storage")
    training.wait()
    assert evaluation.load(state(0)).step == 2, "also if the directory is younger than the reader"
    evaluation.close()
    training.close()


def test_a_damaged_step_is_an_error_that_advises_nothing_and_renames_nothing(directory):
    training = Checkpointer(directory, linger=0.0)
    training.save(1, state(1), to="storage")
    training.wait()
    training.close()
    (directory / "step-1" / "manifest.json").write_bytes(b"{")
    evaluation = Checkpointer(directory, read_only=True)
    with pytest.raises(CheckpointsLostError) as caught:
        evaluation.load(state(0))
    evaluation.close()
    assert "Remove" not in str(caught.value)
    assert (directory / "step-1").exists()


@pytest.mark.slow
def test_a_model_that_ties_what_was_saved_apart_gets_the_last_of_it(directory):
    """Read beside one another, one would be found damaged by the bytes of the other."""
    training = Checkpointer(directory, linger=0.0)
    saved = {str(n): torch.full((1 << 20,), float(n)) for n in range(16)}
    training.save(1, saved, to="storage")
    training.wait()
    training.close()
    tied = torch.zeros(1 << 20)
    evaluation = Checkpointer(directory, read_only=True)
    assert evaluation.load(dict.fromkeys(saved, tied)).source == "storage"
    evaluation.close()
    assert tied.eq(15).all()


@pytest.mark.parametrize("to", ["memory", "storage"])
@pytest.mark.parametrize("moved", [False, True], ids=["as saved", "in another order"])
def test_a_backward_pass_that_needs_the_values_before_a_load_fails(directory, to, moved):
    training = Checkpointer(directory, linger=0.0)
    training.save(1, {"a": torch.ones(3), "b": torch.ones(2)}, to=to)
    training.wait()
    value = torch.zeros(3, requires_grad=True)
    loss = (value * value).sum()
    state = {"b": torch.zeros(2), "a": value} if moved else {"a": value, "b": torch.zeros(2)}
    training.load(state, step=None if to == "memory" else 1)
    training.close()
    assert value.eq(1).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_job_is_refused_whichever_ranks_it_has(monkeypatch):
    monkeypatch.setattr(saver_states, "PREDECESSOR_WAIT", 0.1)
    mine = saver_states.SaverState()
    mine.attach(4, os.getpid(), "training")
    for rank in (0, 4):
        with pytest.raises(InfrastructureError, match=r"as rank 4; two jobs .* read_only=True"):
            mine.attach(rank, os.getpid(), "evaluation")
    mine.attach(5, os.getpid(), "training")
