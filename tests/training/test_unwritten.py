"""What a rank writes on its way to the others changes no file: those that are there are of later steps."""

import builtins
import gzip
import io
import os
import pathlib
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest

from dlrover.training.replicas.unwritten import Unwritten

_REPLACED = (
    (builtins, ("open",)),
    (io, ("open",)),
    (os, ("open", "mkdir", "rename", "replace", "link", "symlink", "remove", "unlink", "rmdir")),
    (shutil, ("copyfile", "copymode", "copystat", "rmtree")),
    (tempfile, ("mkdtemp",)),
    (pathlib.Path, ("touch",)),
)


@pytest.fixture
def way(monkeypatch, tmp_path):
    """A rank on its way; ``old`` and ``folder`` are of later steps."""
    for place, names in _REPLACED:
        for name in names:
            monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("old", "folder/part", "cache/one"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name)
    os.symlink("folder", "latest")
    on_its_way = [True]
    unwritten = Unwritten(lambda: on_its_way[0])
    unwritten.install()
    yield Way(on_its_way, unwritten)
    on_its_way[0] = False


class Way:
    def __init__(self, on_its_way: list[bool], unwritten: Unwritten) -> None:
        self.on_its_way, self.unwritten = on_its_way, unwritten

    def end(self) -> None:
        self.on_its_way[0] = False
        self.unwritten.end()


def _files() -> dict[str, str | bytes]:
    every = sorted(path for path in Path().rglob("*") if path.is_symlink() or path.is_file())
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in every
    }


def _saved(path: str, mode: str = "wb") -> None:
    with open(path, mode) as file:
        pickle.dump("weights of the beginning", file)


def _zipped() -> None:
    with gzip.open("old", "wb") as file:
        file.write(b"weights of the beginning")


def _renamed_from_a_temporary_file() -> None:
    with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
        file.write(b"weights of the beginning")
    os.replace(file.name, "old")


def _renamed_from_a_temporary_folder() -> None:
    folder = tempfile.mkdtemp(dir=".")
    Path(folder, "part").write_text("weights of the beginning")
    assert Path(folder, "part").read_text() == "weights of the beginning"
    os.rename(folder, "new")


def _made_anew() -> None:
    shutil.rmtree("folder")
    os.makedirs("folder")
    Path("folder/part").write_text("weights of the beginning")


@pytest.mark.parametrize(
    "change",
    [
        lambda: _saved("old"),
        lambda: _saved("new"),
        _zipped,
        lambda: Path("old").write_text("weights of the beginning"),
        lambda: _saved("old", "ab"),
        lambda: _saved("new", "xb"),
        lambda: Path("done").touch(),
        lambda: (_saved("new"), os.replace("new", "old")),
        lambda: (_saved("new"), Path("new").rename("old")),
        lambda: (_saved("new"), shutil.move("new", str(Path("old").absolute()))),
        lambda: (_saved("new"), shutil.copy2("new", "old"), os.remove("new")),
        lambda: shutil.copyfile(src="cache/one", dst="old"),
        lambda: shutil.move("old", "older"),
        _renamed_from_a_temporary_file,
        _renamed_from_a_temporary_folder,
        _made_anew,
        lambda: Path("old").unlink(),
        lambda: (os.remove("latest"), os.symlink("old", "latest")),
        lambda: (os.mkdir("made"), _saved("made/part"), shutil.rmtree("made")),
    ],
)
def test_files_are_afterwards_what_they_were_before(way, change):
    before = _files()
    change()
    assert _files() == before
    assert not [
        path for path in Path().iterdir() if path.name not in ("folder", "cache", "old", "latest")
    ]
    way.end()
    _saved("old")
    assert _files() != before


def test_caches_and_temporary_files_are_written(way):
    Path("cache/two").write_text("fetched")
    assert Path("cache/two").read_text() == "fetched"
    os.replace("cache/two", "cache/one")
    assert Path("cache/one").read_text() == "fetched"
    number, name = tempfile.mkstemp(dir=".")
    os.close(number)
    os.unlink(name)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        Path(folder, "part").write_text("scratch")
        assert Path(folder, "part").read_text() == "scratch"
    with open(os.devnull, "w") as file:
        file.write("nothing")
    assert sorted(os.listdir()) == ["cache", "folder", "latest", "old"]


def test_a_file_that_is_open_at_the_end_goes_on_where_it_is(way):
    with open("old", "w", buffering=1) as log, open("new", "w+") as other:
        log.write("header\n")
        other.write("header\n")
        way.end()
        log.write(" and later steps\n")
        other.write("later steps\n")
        assert log.name == "old"
    assert Path("old").read_text() == "old and later steps\n"
    assert Path("new").read_text() == "header\nlater steps\n"


def test_an_array_in_a_file_keeps_what_is_in_it_and_is_written_later(way):
    numpy = pytest.importorskip("numpy")
    for name in ("old", "new"):
        array = numpy.memmap(name, mode="w+", shape=(4,), dtype="uint8")
        if name == "old":
            assert bytes(array[:3]) == b"old"
        way.end()
        array[1] = ord("x")
        array.flush()
        assert Path(name).read_bytes()[1:2] == b"x"
        way.on_its_way[0] = True


def test_a_file_whose_folder_is_gone_at_the_end_stays_without_a_name(way, caplog):
    with open("missing/log", "w") as log:
        log.write("header\n")
        way.end()
        log.write("later\n")
    assert "missing/log cannot be written" in caplog.text
