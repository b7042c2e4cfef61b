"""Values of checkpoints, listed and exported without a job."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlrover.embedding.remote.saving import TableCheckpoints
from dlrover.embedding.table import HashTable
from dlrover.embedding.tools import export, listing
from dlrover.errors import ConfigurationError, InfrastructureError
from tests.embedding.servers import DIM, OPTIONS, Model, cluster, expire, train


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Model]]:
    """A directory with a full checkpoint and two increments, the last with removed rows; and what each holds."""
    place = tmp_path_factory.mktemp("saved")
    held: dict[int, Model] = {}
    with cluster(2) as (made, group):
        checkpoints = TableCheckpoints(made.directory, str(place))
        model: Model = {}
        for step in (10, 20, 30):
            train(group, model, 2, seed=step)
            if step == 30:
                expire(group, model, 50)
            checkpoints.save(step)
            held[step] = dict(model)
        checkpoints.wait()
    return place, held


def same(keys: np.ndarray, values: np.ndarray, model: Model) -> bool:
    return keys.tolist() == sorted(model) and all(
        (row == model[key]).all() for key, row in zip(keys.tolist(), values, strict=True)
    )


def test_a_directory_is_listed(saved: tuple[Path, dict[int, Model]]) -> None:
    place, held = saved
    found = listing.listing(str(place))
    assert [(each.step, each.adds_to, each.parts) for each in found.checkpoints] == [
        (30, 20, 2), (20, 10, 2), (10, None, 2),
    ]  # fmt: skip
    assert found.checkpoints[-1].rows == len(held[10])
    assert found.checkpoints[0].nbytes == sum(
        path.stat().st_size for path in place.glob(f"embedding-{found.checkpoints[0].id}/*.rows")
    )
    assert found.tables["users"].json() == OPTIONS


@pytest.mark.parametrize("step", [10, 20, 30])
def test_the_values_of_each_step_can_be_exported(
    saved: tuple[Path, dict[int, Model]], tmp_path: Path, step: int
) -> None:
    place, held = saved
    done = export.export(str(place), str(tmp_path / "a.npz"), "npz", step=step)
    assert (done.step, done.rows) == (step, {"users": len(held[step])})
    with np.load(tmp_path / "a.npz") as found:
        assert found["step"] == step
        assert same(found["users.keys"], found["users.values"], held[step])
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_all_formats_hold_the_newest_values(
    saved: tuple[Path, dict[int, Model]], tmp_path: Path
) -> None:
    place, held = saved
    parquet = pytest.importorskip("pyarrow.parquet")
    safetensors = pytest.importorskip("safetensors")
    export.export(str(place), str(tmp_path / "a.safetensors"), "safetensors", table="users")
    with safetensors.safe_open(tmp_path / "a.safetensors", "np") as file:
        assert file.metadata() == {"step": "30"}
        assert same(file.get_tensor("users.keys"), file.get_tensor("users.values"), held[30])
    export.export(str(place), str(tmp_path / "a.parquet"), "parquet")
    columns = parquet.read_table(tmp_path / "a.parquet")
    values = np.array(columns["values"].to_pylist(), np.float32)
    assert same(columns["key"].to_numpy(), values, held[30])
    assert columns.schema.metadata == {b"table": b"users", b"step": b"30"}
    export.export(str(place), str(tmp_path / "users.table"), "table")
    table = HashTable.load(tmp_path / "users.table")
    assert table.step == 30
    assert same(np.sort(table.keys()), table.peek(np.sort(table.keys())), held[30])
    again = listing.listing(str(tmp_path / "users.table"))
    assert (again.checkpoints[0].rows, again.tables["users"].dim) == (len(held[30]), DIM)


def test_a_trained_table_in_a_file_is_exported_without_its_states(tmp_path: Path) -> None:
    table = HashTable(3, optimizer="adam", dtype="bfloat16")
    keys = np.arange(100)
    table.lookup(keys)
    table.update(keys, np.ones((100, 3)))
    table.save(tmp_path / "items")
    export.export(str(tmp_path / "items"), str(tmp_path / "small"), "table")
    small = HashTable.load(tmp_path / "small")
    assert (small.peek(keys) == table.peek(keys)).all()
    whole, part = ((tmp_path / name).stat().st_size for name in ("items", "small"))
    assert whole - part > 100 * 2 * 4 * 3 - 400


def test_what_cannot_be_done_is_named(saved: tuple[Path, dict[int, Model]], tmp_path: Path) -> None:
    place, _ = saved
    target = str(tmp_path / "x")
    with pytest.raises(ConfigurationError, match="has no embedding checkpoint of step 11"):
        export.export(str(place), target, "npz", step=11)
    with pytest.raises(ConfigurationError, match="--table is 'items'; accepted are users"):
        export.export(str(place), target, "npz", table="items")
    with pytest.raises(ConfigurationError, match="has no embedding checkpoint"):
        listing.listing(str(tmp_path))
    with pytest.raises(InfrastructureError, match="nowhere/x cannot be written: No such file"):
        export.export(str(place), str(tmp_path / "nowhere" / "x"), "npz")
    (tmp_path / "x").touch()
    with pytest.raises(ConfigurationError, match="x exists; name a file that does not"):
        export.export(str(place), target, "npz")
    with pytest.raises(InfrastructureError, match="x is damaged, or no embedding table"):
        listing.listing(target)
