"""A file that a rank does not write on its way is not moved, copied or deleted there either."""

import os
import shutil
from pathlib import Path

import pytest

from dlrover.training.replicas.unwritten import Unwritten


@pytest.fixture
def way(monkeypatch, tmp_path) -> Unwritten:
    """A rank on its way that has not written ``new``; ``old`` is a whole checkpoint."""
    for place, names in (
        (os, ("rename", "replace", "remove", "unlink")),
        (shutil, ("copyfile", "copymode", "copystat")),
    ):
        for name in names:
            monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.chdir(tmp_path)
    for name in ("new", "old", "other"):
        Path(name).write_text(name)
    on_its_way = [True]
    unwritten = Unwritten(lambda: on_its_way[0])
    unwritten.on_its_way = on_its_way
    unwritten.install()
    unwritten.add(Path("new"))
    return unwritten


@pytest.mark.parametrize(
    "move",
    [
        lambda: os.replace("new", "old"),
        lambda: Path("new").rename("old"),
        lambda: shutil.move("new", str(Path("old").absolute())),
        lambda: shutil.copyfile(src="new", dst="old"),
        lambda: Path("new").unlink(),
        lambda: (os.replace("new", "old"), os.remove("old")),
    ],
)
def test_what_is_left_of_an_earlier_process_replaces_no_checkpoint(way, move):
    move()
    assert [Path(name).read_text() for name in ("new", "old")] == ["new", "old"]
    way.on_its_way[0] = False
    os.replace("new", "old")
    assert Path("old").read_text() == "new"


@pytest.mark.parametrize("move", [shutil.copy, shutil.copy2, shutil.move])
def test_a_file_that_was_never_there_is_copied_and_moved_without_an_error(way, move):
    way.on_its_way[0] = False
    os.remove("new")
    way.on_its_way[0] = True
    move("new", "old")
    assert Path("old").read_text() == "old"


def test_a_directory_of_such_files_stays_and_others_do_not(way):
    Path("folder").mkdir()
    with Path("folder/part").open("wb") as file:
        way.add(file)
    os.rename("folder", "checkpoint")
    shutil.copyfile("other", "copy")
    os.remove("other")
    shutil.rmtree("folder")
    found = sorted(os.listdir())
    assert found == ["copy", "new", "old"]
