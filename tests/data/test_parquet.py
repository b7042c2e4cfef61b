"""Parquet files by row, and the shuffling of records that are read in blocks."""

import errno
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from dlrover import launched
from dlrover.data import Parquet
from dlrover.data.machine import order
from dlrover.data.records import Records
from dlrover.data.sources import waiting
from dlrover.data.sources.blocks import shard_of
from dlrover.errors import ConfigurationError, InfrastructureError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path, rows: range, *, group: int = 10, **more) -> str:
    columns = {"id": list(rows), "name": [f"n{row}" for row in rows], **more}
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return str(path)


@pytest.fixture
def folder(tmp_path):
    """A data set of 60 rows, as writers leave it."""
    (tmp_path / "data" / "day=1").mkdir(parents=True)
    (tmp_path / "data" / "_temporary").mkdir()
    write(tmp_path / "data" / "a.parquet", range(25))
    write(tmp_path / "data" / "day=1" / "b.parquet", range(25, 60), group=20)
    write(tmp_path / "data" / "_temporary" / "c.parquet", range(100, 110))
    (tmp_path / "data" / "_SUCCESS").touch()
    return tmp_path / "data"


def ids(source) -> list[int]:
    return [row["id"] for row in source]


def test_a_directory_a_pattern_and_a_list(folder) -> None:
    rows = Parquet(folder)
    assert rows.blocks == [10, 10, 5, 20, 15]
    assert ids(rows) == list(range(60))
    assert rows[59] == {"id": 59, "name": "n59"}
    assert ids(Parquet(f"{folder}/*.parquet")) == list(range(25))
    assert ids(Parquet([f"{folder}/day=1/b.parquet", f"{folder}/a.parquet"])) == [
        *range(25, 60),
        *range(25),
    ]


def test_urls_of_fsspec(folder) -> None:
    pytest.importorskip("fsspec")
    assert ids(Parquet(f"file://{folder}")) == list(range(60))
    assert ids(Parquet(f"file://{folder}/day=1/*.parquet")) == list(range(25, 60))
    with pytest.raises(ConfigurationError, match=r"nowhere\.parquet cannot be read: No such"):
        Parquet(f"file://{folder}/nowhere.parquet")


def test_columns_and_nested_values(tmp_path) -> None:
    path = write(tmp_path / "a", range(3), tags=[["x"], [], None])
    assert list(Parquet(path, columns=["tags"])) == [
        {"tags": ["x"]},
        {"tags": []},
        {"tags": None},
    ]
    with pytest.raises(ConfigurationError, match="a has no column size; it has id, name, tags"):
        Parquet(path, columns=["size"])


def test_what_is_no_parquet_file_is_named(tmp_path) -> None:
    (tmp_path / "a.parquet").write_text("id,name\n")
    with pytest.raises(ConfigurationError, match=r"a\.parquet is no Parquet file"):
        Parquet(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"b\*\.parquet cannot be read: it names no Parquet file\.$"
    ):
        Parquet(tmp_path / "b*.parquet")
    with pytest.raises(ConfigurationError, match="nowhere cannot be read: No such file"):
        Parquet(tmp_path / "nowhere")


def test_a_file_that_has_changed_is_named(tmp_path) -> None:
    path = write(tmp_path / "a", range(20))
    rows = pickle.loads(pickle.dumps(Parquet(path)))
    assert rows[19]["id"] == 19
    write(path, range(19))
    rows.close()
    with pytest.raises(InfrastructureError, match="has 9 rows, and had 10"):
        rows[15]


def test_a_file_that_is_away_costs_no_row(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.05)
    paths = [write(tmp_path / f"{n}.parquet", range(20 * n, 20 * n + 20)) for n in range(2)]
    rows = Parquet(paths)
    (tmp_path / "1.parquet").rename(tmp_path / "away")
    data, got = Records(rows), []
    with pytest.raises(InfrastructureError, match=r"1.parquet cannot be read: .*No such .*[^.]\.$"):
        got.extend(ids(data))
    (tmp_path / "away").rename(tmp_path / "1.parquet")
    assert ids(data) == list(range(20, 40))
    data.close()


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(waiting, "RETRY", (0.001, 0.001))


@pytest.mark.usefixtures("quick")
def test_the_rows_of_a_damaged_row_group_are_skipped_and_no_others(tmp_path) -> None:
    path = write(tmp_path / "a.parquet", range(60), group=20, text=["x" * 100] * 60)
    begin = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    with open(path, "r+b") as file:
        file.seek(begin + 40)
        file.write(b"\xff" * 200)
    rows, opened = Parquet(path), []
    whole = rows._file
    rows._file = lambda number: (opened.append(number), whole(number))[1]
    data = Records(rows, attempts=1, max_skipped=1000)
    assert ids(data) == [*range(20), *range(40, 60)]
    data.close()
    assert len(opened) < 60, "a group is tried again and again for its first row alone"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "errors",
    [
        [OSError("AWS Error NETWORK_CONNECTION")] * 3,
        [OSError(errno.ETIMEDOUT, "Connection timed out")] * 20,
    ],
)
def test_errors_that_pass_cost_no_row(tmp_path, monkeypatch, errors) -> None:
    whole, left = pq.ParquetFile.read_row_group, list(errors)

    def read_row_group(self, *args, **options):
        if left:
            raise left.pop()
        return whole(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    data = Records(Parquet(write(tmp_path / "a.parquet", range(60), group=20)), attempts=1)
    assert ids(data) == list(range(60))
    assert not left
    data.close()


def test_a_worker_that_starts_again_waits_for_its_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.05)
    folder, pattern = tmp_path / "data", tmp_path / "data" / "*.parquet"
    folder.mkdir()
    for path in (folder, pattern, folder / "a.parquet"):
        monkeypatch.setattr(launched, "given", launched.Given(round=1))
        with pytest.raises(ConfigurationError, match="cannot be read"):
            Parquet(path)
        for later in (launched.Given(round=2), launched.Given(round=1, attempt=1)):
            monkeypatch.setattr(launched, "given", later)
            with pytest.raises(InfrastructureError, match="cannot be read"):
                Parquet(path)
    monkeypatch.setattr(waiting, "PATIENCE", 20.0)
    with ThreadPoolExecutor(3) as threads:
        made = [threads.submit(Parquet, path) for path in (folder, pattern, folder / "a.parquet")]
        write(tmp_path / "a", range(20))
        (tmp_path / "a").rename(folder / "a.parquet")
        assert [len(rows.result()) for rows in made] == [20, 20, 20]


def test_each_row_group_is_read_once_in_an_epoch(tmp_path) -> None:
    class Counting(Parquet):
        read = 0

        def _read(self, number: int):
            self.read += 1
            return super()._read(number)

    rows = Counting(write(tmp_path / "a", range(1000), group=50))
    data = Records(rows, shuffle=True)
    try:
        found = ids(data)
    finally:
        data.close()
    assert sorted(found) == list(range(1000))
    assert found != list(range(1000))
    assert rows.read == 20


blocks = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@settings(max_examples=30)
@given(blocks, st.integers(0, 2**64), st.integers(0, 3))
def test_shuffling_in_blocks_is_a_permutation_that_stays_in_a_block(sizes, seed, epoch) -> None:
    shuffled = order.ShuffledInBlocks(sizes, seed, epoch)
    found = shuffled.records(range(sum(sizes)))
    assert sorted(found) == list(range(sum(sizes)))
    again = order.ShuffledInBlocks(sizes, seed, epoch)
    assert [again.record(position) for position in reversed(range(sum(sizes)))] == found[::-1]
    owner = [number for number, size in enumerate(sizes) for _ in range(size)]
    changes = sum(owner[a] != owner[b] for a, b in pairwise(found))
    assert changes == len(sizes) - 1


def test_blocks_and_the_records_within_are_moved() -> None:
    found = order.ShuffledInBlocks([20] * 20, 1, 0).records(range(400))
    starts = [found[20 * block] // 20 for block in range(20)]
    assert starts != list(range(20))
    assert len({tuple(n % 20 for n in found[20 * b : 20 * b + 20]) for b in range(20)}) == 20


@pytest.mark.parametrize(
    ("sizes", "shard"),
    [
        ([1000] * 200 + [17], 1000),
        ([1000] * 10, 100),
        ([10_000] * 10 + [3], 1000),
        ([1024 * 1024] * 8, 65536),
        ([997] * 10, None),
        ([5], None),
        ([], None),
    ],
)
def test_shards_end_where_blocks_end(sizes, shard) -> None:
    assert shard_of(sizes) == shard
