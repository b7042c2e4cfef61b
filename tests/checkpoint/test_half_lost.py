"""Memory of which a part is gone with its node: what a load says, and what it does."""

import logging
from pathlib import Path

import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.loading import memory_step
from dlrover.checkpoint.machine.saves import Numbering, SaveId
from dlrover.checkpoint.saver.protocol import HeldGeneration, JoinSaver
from dlrover.checkpoint.storage import first_save
from dlrover.errors import CheckpointsLostError
from tests.waiting import until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]


def state(step: int) -> dict:
    return {"w": torch.full((100,), float(step)), "step": step}


def held(rank: int, number: int, size: int = 4) -> HeldGeneration:
    return HeldGeneration(rank, 0, SaveId(0, number, number, 7), size)


def test_the_newest_save_that_is_not_whole_is_named_with_its_ranks():
    everyone = [[held(0, 4), held(0, 3)], [held(1, 4)]]
    lost = memory_step.newest_lost(everyone)
    assert lost.sentence == "Step 4 was saved to memory, and the parts of ranks 2, 3 are gone."
    assert memory_step.newest_lost([[held(0, 4, size=1)], [held(0, 3)]]) is None
    assert memory_step.newest_lost([[], []]) is None


def half_lost(directory: Path, *steps: int, stored: int | None = None, whole: bool = True) -> None:
    """Rank 0 of two saves these steps, and rank 1, on another node, unless not ``whole``; it is gone."""
    saves = Checkpointer(directory, linger=5.0)
    if stored is not None:
        saves.save(stored, state(stored), to="storage")
        saves.wait()
    session = saves._joined.session + 1
    saves._client.join(JoinSaver(session, 2, (0,)))
    saves._numbering = Numbering(session, saves._numbering._newest)
    saves._world.size = 2
    for step in steps:
        saves.save(step, state(step), to="memory")
    if whole:
        other = [SaveId(0, number, number, session) for number in range(10)]
        first_save.record(saves._store, saves._identity, "job", JoinSaver(session, 2, (1,)), other)
    saves._world.size = 1
    saves.close()


@pytest.mark.slow
def test_the_job_does_not_start_from_scratch_in_silence(directory, caplog):
    half_lost(directory, 399, 400)
    saves = Checkpointer(directory, linger=5.0)
    with pytest.raises(
        CheckpointsLostError, match="Step 400 was saved to memory, and the part of rank 1"
    ):
        saves.load(state(0))
    assert [item.save.step for item in saves._client.look().held] == [399, 400], (
        "what is left stays"
    )
    saves.close()
    saves = Checkpointer(directory, linger=0.0, start_afresh=True)
    assert saves.load(state(0)) is None
    saves.close()
    assert "The training starts from scratch, as start_afresh says" in caplog.text
    saves = Checkpointer(directory, linger=0.0)
    assert saves.load(state(0)) is None, "what was given up is no loss"
    saves.close()


@pytest.mark.slow
def test_a_job_that_falls_back_to_storage_says_what_it_has_lost(directory, caplog):
    half_lost(directory, 398, 399, 400, stored=250)
    saves = Checkpointer(directory, linger=0.0)
    assert saves.load(state(0)).step == 250
    saves.close()
    assert "is gone. The training goes back to step 250" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(1,), (1, 2)])
def test_saves_that_not_all_ranks_have_made_are_no_loss(directory, caplog, steps):
    caplog.set_level(logging.INFO)
    half_lost(directory, *steps, whole=False)
    saves = Checkpointer(directory, linger=0.0)
    assert saves.load(state(0)) is None
    saves.close()
    assert (
        "is gone. There was never a save of all ranks: the training starts from scratch"
        in caplog.text
    )


@pytest.mark.slow
def test_a_job_whose_memory_is_all_lost_does_not_start_from_scratch_in_silence(directory, caplog):
    saves = Checkpointer(directory, linger=60.0)
    assert saves.load(state(0)) is None
    saves.save(1, state(1))
    saves.close()
    until((directory / "saved").exists)
    directory.kill_savers()
    for _ in range(2):
        saves = Checkpointer(directory, linger=0.0)
        with pytest.raises(CheckpointsLostError, match="nothing is left"):
            saves.load(state(0))
        saves.close()


@pytest.mark.slow
def test_a_record_that_cannot_be_written_stops_no_save_and_is_no_fresh_start(directory, caplog):
    saves = Checkpointer(directory, linger=5.0)
    session = saves._joined.session + 1
    (directory / f".saved.{session:016x}.0.1.2").mkdir()
    saves._client.join(JoinSaver(session, 2, (0,)))
    saves._numbering = Numbering(session, saves._numbering._newest)
    saves._world.size = 2
    saves.save(1, state(1))
    until(lambda: saves._client.look().unrecorded)
    saves.save(2, state(2))
    assert "It is not recorded in" in caplog.text
    saves._world.size = 1
    with pytest.raises(CheckpointsLostError, match=r"It is not recorded in .*: Is a directory"):
        saves.load(state(0))
    saves.close()
