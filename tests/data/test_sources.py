"""Records of text files by number are those that the standard library reads in order."""

import bz2
import csv
import gzip
import io
import lzma
import os
import pickle
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, strategies as st

from dlrover import launched
from dlrover.data import Csv, JsonLines, Lines, TfRecords
from dlrover.data.records import Records
from dlrover.data.sources import files, waiting
from dlrover.errors import ConfigurationError, InfrastructureError

texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=8)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_lines(tmp_path, end: str) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(f"one\n\nthree is längér{end}".encode())
    second.write_bytes(b"four\n")
    lines = Lines([first, second])
    assert list(lines) == ["one", "", "three is längér", "four"]
    with pytest.raises(IndexError):
        lines[4]


def test_a_reader_of_many_files_keeps_few_open(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "MAX_OPEN", 3)
    for number in range(10):
        (tmp_path / str(number)).write_text(f"x\n{number}\n")
    before = len(os.listdir("/proc/self/fd"))
    rows = Csv([tmp_path / str(number) for number in range(10)])
    for _ in range(2):
        assert [row["x"] for row in rows] == list("0123456789")
        assert len(os.listdir("/proc/self/fd")) == before + 3
    file = rows._file(0)
    rows.close()
    assert file.read(0, 2) == b"x\n", "another thread may be reading"
    del file
    assert len(os.listdir("/proc/self/fd")) == before


def test_paths_without_files_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="paths is empty"):
        Lines([])


def test_an_empty_file_has_no_lines(tmp_path) -> None:
    (tmp_path / "a").touch()
    assert len(Lines(tmp_path / "a")) == 0


def test_json(tmp_path) -> None:
    (tmp_path / "a").write_text('{"x": 1}\n[2]\n"three"\n')
    assert list(JsonLines(tmp_path / "a")) == [{"x": 1}, [2], "three"]


@pytest.mark.slow
@given(st.lists(st.tuples(texts, st.text("ab\"\n',", max_size=6)), max_size=8))
def test_csv_is_what_the_standard_library_reads(tmp_path_factory, rows) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([("key", "va\nlue"), *rows])
    path.write_bytes(buffer.getvalue().encode())
    assert list(Csv(path)) == [{"key": key, "va\nlue": value} for key, value in rows]


@pytest.mark.slow
@given(st.text('ab,"\n', max_size=30))
@example('5" pipe,1\nb,2\n')
def test_quotes_within_a_field_join_no_rows(tmp_path_factory, body: str) -> None:
    body = f'key,"va\nlue"\n{body}\nlast'
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_text(body)
    rows = Csv(path)
    expected = list(csv.reader(io.StringIO(body, newline="")))[1:]
    assert len(rows) == len(expected)
    for number, values in enumerate(expected):
        if len(values) == 2:
            assert list(rows[number].values()) == values


def test_a_field_of_csv_may_be_long(tmp_path) -> None:
    long = "x" * (csv.field_size_limit() + 1)
    (tmp_path / "a").write_text(f"text,n\n{long},1\n")
    assert list(Csv(tmp_path / "a")) == [{"text": long, "n": "1"}]


def test_a_byte_order_mark_is_no_text(tmp_path) -> None:
    (tmp_path / "a").write_text('\ufeff{"x": 1}\r\n{"x": 2}\r\n')
    (tmp_path / "b").write_text('\ufeff"x y"\n')
    assert list(JsonLines(tmp_path / "a")) == [{"x": 1}, {"x": 2}]
    assert list(Lines([tmp_path / "b", tmp_path / "a"])) == ['"x y"', '{"x": 1}', '{"x": 2}']
    assert len(Csv(tmp_path / "b")) == 0


def zipped(data: bytes) -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("a", data)
    return file.getvalue()


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zipped])
@pytest.mark.parametrize("data", [b"{}\n", b""])
def test_a_compressed_file_is_refused(tmp_path, compress, data: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(compress(data))
    for kind in (Lines, JsonLines, Csv):
        with pytest.raises(ConfigurationError, match="jsonl is compressed; decompress it"):
            kind(tmp_path / "a.jsonl")


def test_a_text_may_begin_like_a_compressed_one(tmp_path) -> None:
    (tmp_path / "a").write_text("BZh9 and PK\n")
    assert list(Lines(tmp_path / "a")) == ["BZh9 and PK"]


def test_rows_of_several_files_with_other_columns(tmp_path) -> None:
    (tmp_path / "a").write_text("x;y\n1;2\n3;4\n")
    (tmp_path / "b").write_text("\ufeffy;x\n6;5")
    rows = Csv([tmp_path / "a", tmp_path / "b"], delimiter=";")
    assert [row["x"] for row in rows] == ["1", "3", "5"]
    assert rows[2]["y"] == "6"


def test_a_row_with_too_few_values_is_an_error_of_that_row(tmp_path) -> None:
    (tmp_path / "a").write_text("x,y\n1,2\n3\n5,6\n")
    rows = Csv(tmp_path / "a")
    assert (rows[0], rows[2]) == ({"x": "1", "y": "2"}, {"x": "5", "y": "6"})
    with pytest.raises(ValueError, match="1 values for 2 columns"):
        rows[1]


def test_what_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere cannot be read: No such file"):
        Lines(tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigurationError, match="no row with column names"):
        Csv(tmp_path / "empty")


def test_a_file_that_has_become_shorter_is_named(tmp_path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    lines = Lines(tmp_path / "a")
    (tmp_path / "a").write_text("one\n")
    assert lines[0] == "one"
    with pytest.raises(InfrastructureError, match="become shorter"):
        lines[1]


def test_a_disk_that_fails_is_no_mistake_of_the_program() -> None:
    with pytest.raises(InfrastructureError, match=r"mem cannot be read: Input/output error\.$"):
        Lines("/proc/self/mem")


def test_a_file_that_is_away_costs_no_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.05)
    for number in range(2):
        (tmp_path / f"{number}").write_text("".join(f"{n}\n" for n in range(20)))
    lines = Lines([tmp_path / "0", tmp_path / "1"])
    (tmp_path / "1").rename(tmp_path / "away")
    data, got = Records(lines), []
    with pytest.raises(
        InfrastructureError, match=r"/1 cannot be read: No such file or directory\.$"
    ):
        got.extend(data)
    (tmp_path / "away").rename(tmp_path / "1")
    assert [*got, *data] == [str(n) for n in (*range(20), *range(20))]
    data.close()


def test_a_file_that_comes_back_is_waited_for(tmp_path, caplog) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    lines = Lines(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "away")
    with ThreadPoolExecutor(1) as thread:
        line = thread.submit(lines.__getitem__, 1)
        while "a cannot be read; retrying: No such file" not in caplog.text:
            assert not line.done(), line.exception()
        (tmp_path / "away").rename(tmp_path / "a")
        assert line.result() == "two"


def test_a_worker_that_starts_again_waits_for_its_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.05)
    monkeypatch.setattr(launched, "given", launched.Given(round=2))
    with pytest.raises(InfrastructureError, match="nowhere cannot be read: No such file"):
        Lines(tmp_path / "nowhere")


def test_a_source_goes_to_another_process(tmp_path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    lines = Lines(tmp_path / "a")
    assert lines[1] == "two"
    assert pickle.loads(pickle.dumps(lines))[1] == "two"


def tf_record(data: bytes) -> bytes:
    return struct.pack("<QI", len(data), 0) + data + bytes(4)


def test_tf_records(tmp_path) -> None:
    (tmp_path / "a").write_bytes(tf_record(b"one") + tf_record(b"") + tf_record(b"three"))
    (tmp_path / "b").write_bytes(tf_record(b"four"))
    assert list(TfRecords([tmp_path / "a", tmp_path / "b"])) == [b"one", b"", b"three", b"four"]


@pytest.mark.parametrize("length", [1, 11, 17])
def test_what_is_no_tf_record_file_is_refused(tmp_path, length: int) -> None:
    (tmp_path / "a").write_bytes(tf_record(b"one")[:length])
    with pytest.raises(ConfigurationError, match="ends within a record"):
        TfRecords(tmp_path / "a")
