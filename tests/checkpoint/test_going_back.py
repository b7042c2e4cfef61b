"""A training that goes back to a stored step: what it saves from then on is the newest."""

import itertools
from pathlib import Path

import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import formats, storage
from dlrover.checkpoint.storage.stored_step import Manifest
from dlrover.checkpoint.storage.stores import MANIFEST, open_store
from dlrover.checkpoint.tools import tools

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(90)]


def state(step: int) -> dict:
    return {"w": torch.full((100,), float(step)), "step": step}


def went_back(directory: Path, keep: int) -> Checkpointer:
    """Up to step 30, and back to step 10."""
    saves = Checkpointer(directory, keep=keep, linger=5.0)
    for step in (10, 20, 30):
        saves.save(step, state(step), to="storage")
    saves.wait()
    assert saves.load(state(0), step=10).step == 10
    return saves


def resumed(directory: Path) -> int:
    saves = Checkpointer(directory, linger=0.0)
    found = state(0)
    record = saves.load(found)
    saves.close()
    assert found["step"] == record.step
    return record.step


def test_what_is_stored_after_going_back_stays_and_is_resumed_from(directory):
    saves = went_back(directory, keep=3)
    for step in (11, 12):
        saves.save(step, state(step), to="storage")
        saves.wait()
        assert (directory / f"step-{step}").is_dir(), "wait has called it durable"
    saves.close()
    store = open_store(directory)
    assert storage.steps(store) == [12, 11, 10]
    assert storage.tracked(store).step == 12
    assert [item.step for item in tools.listing(directory)] == [12, 11, 10]
    directory.stop_saver()
    assert resumed(directory) == 12


def test_what_was_abandoned_is_not_resumed_from_when_memory_is_lost(directory):
    saves = went_back(directory, keep=4)
    saves.save(11, state(11))
    directory.kill_savers()
    saves.close()
    assert storage.steps(open_store(directory)) == [10, 30, 20]
    assert tools.chosen(directory, None) == 10
    assert resumed(directory) == 10


def test_memory_of_the_new_line_is_resumed_from(directory):
    saves = went_back(directory, keep=3)
    saves.save(11, state(11))
    saves.close()
    assert resumed(directory) == 11


def test_looking_at_an_older_step_changes_nothing(directory):
    went_back(directory, keep=3).close()
    directory.stop_saver()
    assert storage.steps(open_store(directory)) == [30, 20, 10]
    assert resumed(directory) == 30


def test_who_loads_the_newest_step_after_an_older_one_has_abandoned_nothing(directory):
    saves = went_back(directory, keep=3)
    assert saves.load(state(0)).step == 30
    saves.save(40, state(40), to="storage")
    saves.wait()
    saves.close()
    store = open_store(directory)
    assert storage.steps(store) == [40, 30, 20]
    assert len({save.line for save in storage.saves(store).values()}) == 1


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_line_whose_beginning_was_cut_short_is_begun_again(tmp_path, monkeypatch, written):
    store = open_store(tmp_path)
    for number, step in enumerate((10, 20, 30), 1):
        save = SaveId(0, number, step, 1)
        draft = store.draft(save)
        manifest = Manifest(step=step, save=save, world_size=1, replicated=True, files={})
        store.write(draft.path(MANIFEST), formats.encode(manifest))
        store.publish(draft, {MANIFEST})
    write, writes = store.write, itertools.count()

    def fail(file: str, data: bytes) -> None:
        if next(writes) == written:
            raise OSError(5, "Input/output error")
        write(file, data)

    with monkeypatch.context() as patched:
        patched.setattr(store, "write", fail)
        with pytest.raises(OSError, match="Input/output"):
            storage.begin_line(store, 20, 4)
    storage.begin_line(store, 20, 4)
    lines = {step: save.line for step, save in storage.saves(store).items()}
    assert lines == {20: 4, 10: 4, 30: 0}
    assert storage.tracked(store).step == 20


def test_a_stored_step_that_is_newer_than_memory_is_taken(directory):
    saves = Checkpointer(directory, linger=5.0)
    saves.save(1, state(1))
    other = saves._numbering.next(2)
    saves.close()
    elsewhere = Checkpointer(directory / "other", linger=0.0)
    elsewhere._numbering.pass_over(other)
    elsewhere.save(2, state(2), to="storage")
    elsewhere.wait()
    elsewhere.close()
    for name in ("step-2", "latest"):
        (directory / "other" / name).rename(directory / name)
    assert resumed(directory) == 2
