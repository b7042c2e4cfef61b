"""A checkpoint directory that the nodes do not share is refused at the start, on every rank."""

import errno
import os
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from dlrover.checkpoint.engine import shared
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import IDENTITY, Store, open_store
from dlrover.errors import ConfigurationError
from tests.checkpoint.together import each, worlds

pytestmark = [pytest.mark.torch, pytest.mark.timeout(90)]
SCRIPT = str(Path(__file__).parent / "scripts" / "unshared.py")


def check(*stores: Store) -> list[str]:
    """What each of two ranks raises."""
    raised = each(
        *(
            partial(shared.check, world, store, storage.identity(store))
            for world, store in zip(worlds(2), stores, strict=True)
        )
    )
    assert {type(error) for error in raised} <= {ConfigurationError, type(None)}, raised
    return [str(error or "") for error in raised]


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a", tmp_path / "b"]
    for place in found:
        place.mkdir()
    return found


def test_directories_of_different_names_are_two(places):
    first, second = check(*map(open_store, places))
    assert first == second
    assert f"do not share the checkpoint directory {places[0]}: rank 1 on " in first


def test_a_copy_of_a_directory_is_another_one(places, monkeypatch):
    monkeypatch.setattr(shared, "PATIENCE", 0.05)
    storage.identity(open_store(places[0]))
    shutil.copy(places[0] / IDENTITY, places[1])
    first, second = check(*map(open_store, places))
    assert first == second != ""
    assert [os.listdir(place) for place in places] == [[IDENTITY], [IDENTITY]]


def test_one_directory_under_two_names_is_shared_and_nothing_is_left_in_it(tmp_path):
    store = open_store(tmp_path / "a")
    storage.identity(store)
    store.write(".shared.0123", b"")  # of a start that was killed
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert check(store, open_store(tmp_path / "b")) == ["", ""]
    assert os.listdir(tmp_path / "a") == [IDENTITY]


def test_two_starts_at_once_leave_each_other_alone(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    assert shared._write(store, ".shared.0")
    assert shared._write(store, ".shared.1")
    assert sorted(store.names()) == [".shared.0", ".shared.1"]
    later = shared.time.time() + 2 * shared.KILLED
    monkeypatch.setattr(shared.time, "time", lambda: later)
    assert shared._write(store, ".shared.2")
    assert store.names() == [".shared.2"], "those were killed"


def test_a_name_that_is_seen_late_is_waited_for(tmp_path, monkeypatch, caplog):
    store, late = open_store(tmp_path), iter([False, False, True])
    monkeypatch.setattr(store, "poll", 0.01)
    monkeypatch.setattr(store, "exists", lambda _: next(late))
    assert shared.until_seen(store, "step-2/manifest.json", patience=5.0)
    assert caplog.text.count("Waiting up to 5 s for") == 1
    monkeypatch.setattr(store, "exists", lambda _: False)
    assert not shared.until_seen(store, "step-2/manifest.json", patience=0.02)


def test_on_a_disk_that_can_only_be_read_the_names_decide(tmp_path, monkeypatch):
    storage.identity(open_store(tmp_path))
    (tmp_path / "b").symlink_to(tmp_path)
    stores = open_store(tmp_path), open_store(tmp_path / "b")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for store in stores:
        monkeypatch.setattr(store, "write", refuse)
    assert check(*stores) == ["", ""]


@pytest.mark.slow
def test_every_rank_is_told_before_anything_is_saved(forks, places, tmp_path):
    meeting = tmp_path / "meeting"
    ranks = [forks.start(SCRIPT, meeting, rank, place) for rank, place in enumerate(places)]
    told = [process.communicate(timeout=80)[0] for process in ranks]
    assert told[0] == told[1]
    assert told[0].startswith("ConfigurationError: The nodes do not share the checkpoint directory")


def test_ranks_that_begin_at_once_get_one_identity(tmp_path, monkeypatch):
    """Even where the store lets each of them write it: some know no exclusive creation."""
    url = f"file://{tmp_path}/new"

    def write_twice(store: Store, file: str, data: bytes) -> None:
        time.sleep(0.05)
        store.write(file, data)

    monkeypatch.setattr(type(open_store(url)), "write_once", write_twice)
    ranks = [(world, open_store(url)) for world in worlds(4)]
    found = each(*(partial(shared.identity, *rank, create=True) for rank in ranks))
    assert found == [storage.identity(open_store(url))] * 4


def test_half_a_line_in_the_list_for_people_stops_no_training(tmp_path):
    listed, world, place = tmp_path / "checkpoints.txt", worlds(1)[0], tmp_path / "ckpt"
    place.mkdir()
    listed.write_bytes(b"/half of a charact\xc3\n")
    for _ in range(2):
        shared.note(world, open_store(str(place)), str(listed))
    assert listed.read_text(errors="replace").splitlines()[1:] == [str(place)]
