"""`HashTable` as users see it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlrover._native.tables import SLOTS
from dlrover.embedding import (
    BloomAdmission,
    ChanceAdmission,
    Expiry,
    HashTable,
    RowOptimizer,
    open_table,
)
from dlrover.errors import ConfigurationError, InfrastructureError


def test_rows_are_made_when_they_are_looked_up() -> None:
    table = HashTable(8, seed=3)
    keys = np.array([5, -1, 2**62], np.int64)
    assert (table.peek(keys) == 0).all()
    rows = table.lookup(keys)
    assert rows.shape == (3, 8)
    assert len(np.unique(rows)) == 24
    assert (np.abs(rows) <= 0.05).all()
    assert len(table) == 3
    assert (HashTable(8, seed=3).lookup(keys[::-1]) == rows[::-1]).all(), "equal on any server"
    assert (HashTable(8, seed=4).lookup(keys) != rows).any()
    assert sorted(table.keys()) == sorted(keys)
    assert table.remove(keys[:2]) == 2
    assert len(table) == 1


def test_equal_keys_of_an_update_count_once_with_their_sum() -> None:
    table, other = HashTable(2), HashTable(2)
    keys = np.array([1, 2, 1], np.int64)
    for each in (table, other):
        each.lookup(keys)
    table.update(keys, np.array([[1, 2], [3, 4], [5, 6]], np.float32))
    other.update(keys[:2], np.array([[6, 8], [3, 4]], np.float32))
    assert (table.peek(keys) == other.peek(keys)).all()


@pytest.mark.torch
def test_tensors_give_tensors() -> None:
    torch = pytest.importorskip("torch")
    table = HashTable(4)
    keys = torch.tensor([1, 2])
    rows = table.lookup(keys)
    assert isinstance(rows, torch.Tensor)
    table.update(keys, torch.ones(2, 4))
    assert (table.peek(keys) < rows).all()


def test_texts_are_keys() -> None:
    table = HashTable(4)
    rows = table.lookup(["anna", "bert"])
    assert (table.peek(np.array(["bert", "anna"])) == rows[::-1]).all()


def test_texts_of_any_kind_are_the_same_keys() -> None:
    table = HashTable(4)
    rows = table.lookup(["anna", "bert"])
    assert (table.peek(np.array(["anna", "bert"], object)) == rows).all()
    assert (table.peek((b"anna", "bert")) == rows).all()
    for wrong in (["anna", 1], [1, "anna"], "anna", ["\ud800"], [None], np.array([1.5])):
        with pytest.raises(ConfigurationError, match=r"keys (are of type|have) .* accepted\."):
            table.lookup(wrong)
    assert len(table) == 2


@pytest.mark.torch
def test_gradients_of_any_real_type_are_taken() -> None:
    torch = pytest.importorskip("torch")
    table, keys = HashTable(2, optimizer="sgd", learning_rate=1.0), np.array([1])
    before = table.lookup(keys)
    for gradients in (
        torch.ones(1, 2, dtype=torch.bfloat16),
        torch.ones(2, 2)[::2, :],
        torch.ones(1, 2, dtype=torch.float64),
        np.ones((1, 2), np.int32),
    ):
        table.update(keys, gradients)
    assert np.allclose(table.peek(keys), before - 4)
    for wrong in (np.ones((1, 2), complex), [["1", "1"]]):
        with pytest.raises(ConfigurationError, match=r"gradients are of type .*; real numbers are"):
            table.update(keys, wrong)


def test_a_key_is_admitted_at_its_nth_lookup() -> None:
    for admission in (3, BloomAdmission(3)):
        table = HashTable(2, admission=admission)
        keys = np.arange(100)
        for lookup in range(1, 5):
            rows = table.lookup(keys)
            table.update(keys, np.ones((100, 2), np.float32))
            assert (rows != 0).all() == (lookup >= 3)
        assert len(table) == 100
    table = HashTable(2, admission=ChanceAdmission(0.5))
    table.lookup(np.arange(10_000))
    assert 4700 < len(table) < 5300


def test_rows_that_are_restored_elsewhere_expire_by_steps_as_before() -> None:
    """A table that has had no update counts on from the last use of what it gets."""
    table, other = (HashTable(2, optimizer="sgd", expiry=Expiry(steps=3)) for _ in range(2))
    gradient = np.ones((1, 2), np.float32)
    for key in (np.array([1]), *[np.array([2])] * 4):
        table.lookup(key)
        table.update(key, gradient)
    other.restore_rows(table.export_rows(range(SLOTS)))
    assert other.evict() == table.evict() == 1
    assert set(other.keys()) == {2}


def test_rows_expire_by_steps_norm_and_penalty() -> None:
    table = HashTable(2, optimizer="sgd", expiry=Expiry(steps=3))
    table.lookup(np.array([1]))
    for _ in range(3):
        table.lookup(np.array([2]))
        table.update(np.array([2]), np.ones((1, 2), np.float32))
    assert table.evict() == 1
    assert table.keys().tolist() == [2]
    table = HashTable(2, expiry=Expiry(norm=0.01))
    table.lookup(np.arange(2000))
    small = (np.linalg.norm(table.peek(np.arange(2000)), axis=1) < 0.01).sum()
    assert table.evict() == small > 0
    lasso = RowOptimizer(name="ftrl", learning_rate=0.1, l21=0.5)
    table = HashTable(2, optimizer=lasso, expiry=Expiry())
    keys = np.arange(2)
    table.lookup(keys)
    table.update(keys, np.array([[0.001, 0.001], [9, 9]], np.float32))
    assert (table.peek(keys)[0] == 0).all()
    assert table.evict() == 1


def test_a_file_does_not_grow_with_what_was_removed(tmp_path: Path) -> None:
    """It had 8 bytes for each key that had ever expired, which no loading needs."""
    table, sizes = HashTable(4, expiry=Expiry(steps=1)), []
    for first in range(0, 3000, 1000):
        table.update(np.arange(first, first + 1000), np.ones((1000, 4), np.float32))
        table.lookup(np.arange(first, first + 1000))
        table.step += 5
        table.evict()
        table.lookup(np.arange(10))
        table.save(tmp_path / "table")
        sizes.append((tmp_path / "table").stat().st_size)
    assert len(table) == 10
    assert max(sizes) - min(sizes) < 64
    assert len(HashTable.load(tmp_path / "table")) == 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_file_holds_the_table(tmp_path: Path, dtype: str) -> None:
    table = HashTable(5, optimizer="adam", dtype=dtype, admission=2, seed=9)
    keys = np.arange(3000)
    table.lookup(keys)
    table.lookup(keys[:2000])
    table.update(keys, np.ones((3000, 5), np.float32))
    table.save(tmp_path / "table")
    loaded = HashTable.load(tmp_path / "table")
    assert loaded.options == table.options
    for step in range(3):
        assert (loaded.peek(keys) == table.peek(keys)).all()
        for each in (loaded, table):
            each.update(keys, np.full((3000, 5), step, np.float32))
    assert [path.name for path in tmp_path.iterdir()] == ["table"]
    data = bytearray((tmp_path / "table").read_bytes())
    for damaged in (
        data[:-1],
        data[:1000],
        data + data,
        b"",
        data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    ):
        (tmp_path / "table").write_bytes(damaged)
        with pytest.raises(InfrastructureError, match="is damaged, or no embedding table"):
            HashTable.load(tmp_path / "table")
    with pytest.raises(InfrastructureError, match="cannot be read: No such file"):
        HashTable.load(tmp_path / "other")
    with pytest.raises(InfrastructureError, match="cannot be written"):
        table.save(tmp_path / "missing" / "table")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, r"Expected `int` >= 1 - at `\$.dim`"),
        ({"dim": 5000}, r"Expected `int` <= 4096 - at `\$.dim`"),
        ({"optimizer": "adamm"}, "optimizer is 'adamm'; accepted are sgd, momentum"),
        ({"learning_rate": -1}, r"at `\$.optimizer.learning_rate`"),
        ({"dtype": "int8"}, "dtype is 'int8'; accepted are float32, bfloat16, float16"),
        ({"dtype": np.dtype("float16")}, r"dtype is dtype\('float16'\); accepted are float32"),
        (
            {"initializer": "xavier"},
            "initializer is 'xavier'; accepted are constant, uniform, normal",
        ),
        ({"initializer": 3}, "initializer is 3; accepted are constant, uniform, normal"),
        ({"admission": 0}, r"at `\$.admission.lookups`"),
        ({"expiry": Expiry(seconds=1, steps=1)}, "expiry has seconds and steps"),
        ({"memory_bytes": -1}, r"at `\$.memory_bytes`"),
        ({"spill": "/tmp"}, "spill is '/tmp'; a Spill or None is accepted"),
    ],
)
def test_a_wrong_option_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HashTable(**({"dim": 4} | arguments))


def test_options_may_be_numbers_of_numpy() -> None:
    table = HashTable(np.int64(4), learning_rate=np.float32(0.5), memory_bytes=np.int32(1 << 20))
    assert table.options == HashTable(4, learning_rate=0.5, memory_bytes=1 << 20).options
    assert table.dim == table.lookup(np.array([1])).shape[1] == 4
    with pytest.raises(ConfigurationError, match=r"`float` - at `\$.dim`"):
        HashTable(np.float64(4.5))
    with pytest.raises(ConfigurationError, match=r"array\(.* is no option"):
        HashTable(np.array([4]))


def test_wrong_keys_and_gradients_are_named() -> None:
    table = HashTable(4)
    with pytest.raises(ConfigurationError, match="keys are of type float64 in 1 dimensions"):
        table.lookup(np.array([1.5]))
    with pytest.raises(ConfigurationError, match="keys are of type int64 in 2 dimensions"):
        table.lookup(np.array([[1]]))
    with pytest.raises(
        ConfigurationError, match=r"gradients have shape \(1, 3\); \(1, 4\) is accepted"
    ):
        table.update(np.array([1]), np.ones((1, 3)))


def test_a_full_table_says_so() -> None:
    table = HashTable(64, memory_bytes=4 << 20)
    with pytest.raises(InfrastructureError, match="has no room for more: memory_bytes is 4194304"):
        table.lookup(np.arange(50_000))
    assert len(table) > 1000


@pytest.mark.parametrize("name", ["", 3, "a" * 201])
def test_a_name_that_servers_would_refuse_is_refused_without_them(name: object) -> None:
    with pytest.raises(ConfigurationError, match="a text of 1 to 200 characters is accepted"):
        open_table(name, 4)
