"""Which checkpoint of a directory a training goes on from: the newest whose files are whole, and never silently none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

tf = pytest.importorskip("tensorflow")

from dlrover.errors import InfrastructureError  # noqa: E402
from dlrover.tensorflow import stored  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
DATA = "ckpt-30.data-00000-of-00001"


def managed(directory: Path, value: tf.Variable) -> tf.train.CheckpointManager:
    return stored.manager(tf.train.Checkpoint(value=value), str(directory), 3)


def restored(directory: Path) -> float | None:
    value = tf.Variable(tf.zeros([1000]))
    path = stored.restore(managed(directory, value))
    assert path is None or path.endswith(f"ckpt-{value.numpy()[0]:.0f}")
    return None if path is None else float(value.numpy()[-1])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the checkpoints of steps 10, 20 and 30."""
    value = tf.Variable(tf.zeros([1000]))
    manager = managed(tmp_path, value)
    for step in (10, 20, 30):
        value.assign(tf.fill([1000], float(step)))
        manager.save(checkpoint_number=step)
    return tmp_path


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", [DATA, "ckpt-30.index"])
@pytest.mark.parametrize("damage", [flipped, cut, emptied, Path.unlink])
def test_a_damaged_checkpoint_is_passed_over(
    directory: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(directory / name)
    assert restored(directory) == 20


@pytest.mark.parametrize("damage", [emptied, Path.unlink])
def test_checkpoints_are_found_without_their_list(
    directory: Path, damage: Callable[[Path], None]
) -> None:
    damage(directory / "checkpoint")
    assert restored(directory) == 30
    cut(directory / DATA)
    assert restored(directory) == 20


def test_what_an_unfinished_save_has_left_is_removed(directory: Path) -> None:
    left = directory / "ckpt-40_temp"
    left.mkdir()
    (left / "part-00000-of-00002.data-00000-of-00001").write_bytes(bytes(1000))
    (directory / "own_temp").mkdir()
    stored.remove_unfinished(str(directory))
    assert restored(directory) == 30
    assert not left.exists()
    assert (directory / "own_temp").exists()


def test_a_training_does_not_begin_anew_where_all_checkpoints_are_damaged(directory: Path) -> None:
    for path in directory.glob("*.index"):
        cut(path)
    with pytest.raises(InfrastructureError, match=r"No checkpoint in .* can be read"):
        restored(directory)


def test_a_directory_without_checkpoints_is_a_beginning(tmp_path: Path) -> None:
    assert restored(tmp_path) is None
    assert restored(tmp_path / "none") is None


def test_a_checkpoint_of_another_model_is_not_taken_for_a_damaged_one(directory: Path) -> None:
    manager = managed(directory, tf.Variable(tf.zeros([7])))
    with pytest.raises(ValueError, match=r"\b1000\b"):
        stored.restore(manager)


def test_a_storage_that_is_away_costs_no_checkpoint(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_path: str) -> None:
        raise tf.errors.UnavailableError(None, None, "the storage is away")

    manager = managed(directory, tf.Variable(tf.zeros([1000])))
    monkeypatch.setattr(tf.train, "load_checkpoint", away)
    monkeypatch.setattr(manager.checkpoint, "restore", away)
    with pytest.raises(tf.errors.UnavailableError):
        stored.restore(manager)
