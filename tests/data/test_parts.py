"""Folders that a pipeline fills: what is read while it runs, attempts that are made again, and the end of the stream."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from dlrover.data import Parquet
from dlrover.data.records import Records
from dlrover.data.sources.stream import Address, Stream
from dlrover.errors import ConfigurationError, InfrastructureError
from tests.data.shelf import fast_and_clean

pa = pytest.importorskip("pyarrow")
parts = pytest.importorskip("dlrover.data.sources.parts")
__all__ = ["fast_and_clean"]
pytestmark = pytest.mark.usefixtures("fast_and_clean")


@pytest.fixture
def folder(tmp_path: Path) -> parts.Folder:
    made = parts.Folder(Address(f"parquet://{tmp_path}/rows"))
    assert made.begin()
    return made


def table(*rows: int) -> pa.Table:
    return pa.table({"n": list(rows)})


def read(folder: parts.Folder, **options) -> Records:
    return Records(
        Stream(f"parquet://{folder.path}", decode=lambda message: message.value["n"], **options)
    )


def test_rows_are_read_in_the_order_of_parts_while_others_come_and_to_the_end(folder) -> None:
    folder.add(1, table(3, 4))
    data = read(folder)
    got: list[int] = []
    reader = threading.Thread(target=lambda: got.extend(data))
    reader.start()
    reader.join(0.05)
    assert got == [], "part 0 is missing"
    folder.add(0, table(*range(3)))
    folder.add(2, pa.table({}))
    folder.add(3, table(5))
    assert folder.finish(4) == 6
    reader.join(20)
    assert not reader.is_alive(), "the stream ends with the pipeline"
    assert got == list(range(6))
    data.close()


def test_a_restore_goes_on_behind_the_last_row_that_was_handed_out(folder) -> None:
    folder.add(0, table(*range(3)))
    first = read(folder)
    rows = iter(first)
    got = [next(rows), next(rows)]
    state = first.state_dict()
    first.close()
    folder.add(1, table(*range(3, 5000)))
    folder.finish(2)
    again = read(folder)
    again.load_state_dict(state)
    assert [*got, *again] == list(range(5000))
    again.close()
    shutil.rmtree(folder.path)
    lost = read(folder)
    lost.load_state_dict(state)
    with pytest.raises(InfrastructureError, match="has lost messages"):
        next(iter(lost))


def test_another_attempt_adds_what_is_missing_and_no_other_rows(folder) -> None:
    folder.add(0, table(0, 1))
    (folder.path / ".part-000001.parquet-dead").touch()
    assert folder.begin()
    folder.add(0, table(0, 1))
    for other in (table(1, 0), table(0, 1, 2), table()):
        with pytest.raises(ConfigurationError, match="other rows of part 0"):
            folder.add(0, other)
    folder.add(1, table())
    with pytest.raises(ConfigurationError, match="other rows of part 1"):
        folder.add(1, table(5))
    with pytest.raises(InfrastructureError, match=r"Part 2 of .* is missing"):
        folder.finish(3)
    with pytest.raises(ConfigurationError, match="other rows of part 1"):
        folder.finish(1)
    assert folder.finish(2) == 2
    assert not folder.begin(), "it has ended"
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "_part-000001",
        "_stream.json",
        "part-000000.parquet",
    ]


def test_a_dataset_with_epochs_takes_a_folder_when_its_pipeline_has_ended(folder) -> None:
    folder.add(0, table(0, 1))
    folder.add(1, table())
    with pytest.raises(ConfigurationError, match=r"has not ended; .* Stream\('parquet:///"):
        Parquet(folder.path)
    folder.finish(2)
    assert [row["n"] for row in Parquet(folder.path)] == [0, 1]


@pytest.mark.parametrize("error", [errno.ESTALE, errno.ENOENT])
def test_a_part_that_is_away_is_waited_for(folder, monkeypatch, error: int) -> None:
    folder.add(0, table(0, 1))
    folder.add(1, table(2, 3))
    folder.finish(2)
    left = 3
    whole = Parquet._file

    def _file(self, number: int):
        nonlocal left
        if "part-000001" in str(self.paths[number]) and left:
            left -= 1
            raise OSError(error, os.strerror(error))
        return whole(self, number)

    monkeypatch.setattr(Parquet, "_file", _file)
    data = read(folder)
    assert list(data) == list(range(4))
    assert not left
    data.close()


@pytest.mark.parametrize("url", ["parquet://host/rows", "parquet:///", "parquet:///rows?group=a"])
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="parquet:"):
        Records(Stream(url))


def test_a_file_system_without_hard_links_is_named(folder, monkeypatch) -> None:
    def refuse(*_names: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(ConfigurationError, match="has no hard links"):
        folder.add(0, table(1))
    assert not list(folder.path.glob(".part-*")), "no draft is left"
