"""Storage that cannot be read now is not damaged: whoever meets it raises, and nothing is renamed."""

import builtins
import errno
import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.engine import direct, tree
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.machine.policies import KeepLast
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import (
    StorageAwayError,
    Store,
    failure,
    is_damage,
    open_store,
)
from dlrover.checkpoint.tools import tools
from dlrover.checkpoint.tools.verification import verify
from dlrover.errors import InfrastructureError

pytestmark = [pytest.mark.torch, pytest.mark.timeout(90)]
slow = pytest.mark.slow
SCRIPT = str(Path(__file__).parent / "scripts" / "away.py")
AWAY = [
    OSError(number, os.strerror(number))
    for number in (
        errno.ENOMEM, errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOTCONN,
        errno.ETIMEDOUT, errno.EHOSTDOWN,
    )
] + [MemoryError()]  # fmt: skip
DAMAGED = [FileNotFoundError(errno.ENOENT, "gone"), ValueError("no JSON")]


@pytest.mark.parametrize("error", [*AWAY, *DAMAGED], ids=repr)
def test_an_error_is_damage_or_says_that_the_storage_is_away(error):
    assert is_damage(error) is (error in DAMAGED)
    told = failure(error, "step-1 cannot be read")
    assert isinstance(told, StorageAwayError) is (error in AWAY)
    assert is_damage(told) is (error in DAMAGED)


@pytest.fixture
def stored(directory) -> Path:
    """Two steps, stored without a saver."""
    for step in (1, 2):
        store_parts(directory, step, filled(step))
    return directory


def store_parts(directory: Path, step: int, *states: dict) -> None:
    """Store a step, one state for each rank."""
    store = open_store(directory)
    identity = storage.identity(store)

    def write(rank: int) -> str:
        copier = Copier()
        packed = copier.layout(tree.flatten(states[rank]))
        writer = direct.DirectWriter(store, identity, KeepLast(3), rank, len(states))
        return writer.write(SaveId(0, step, step, 1), packed, copier.sources, {})

    with ThreadPoolExecutor() as pool:
        assert set(pool.map(write, range(len(states)))) == {""}


def filled(step: int) -> dict:
    return {"w": torch.full((1000,), float(step)), "step": step}


def failing(monkeypatch: pytest.MonkeyPatch, part: str, error: Exception) -> None:
    """Opening a file with ``part`` in its name fails."""
    opened = io.open

    def open_or_fail(file, *args, **kwargs):
        if part in str(file):
            raise error
        return opened(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", open_or_fail)
    monkeypatch.setattr(builtins, "open", open_or_fail)


@slow
def test_a_load_that_cannot_read_raises_and_renames_nothing(stored, monkeypatch):
    names = sorted(path.name for path in stored.glob("step-*"))
    checkpointer = Checkpointer(stored, linger=0.0)
    parts = ("step-2/__0_0.distcp", "step-2/rank-0.index", "step-2/manifest.json")
    for number, error in enumerate(AWAY):
        with monkeypatch.context() as patched:
            failing(patched, parts[number % len(parts)], error)
            with pytest.raises(StorageAwayError, match="cannot be read") as caught:
                checkpointer.load(filled(0))
        assert "emove" not in str(caught.value)
    assert checkpointer.load(filled(0)).step == 2
    checkpointer.close()
    assert sorted(path.name for path in stored.glob("step-*")) == names


@slow
def test_what_only_reads_leaves_a_damaged_step_where_it_is_and_the_next_save_moves_it(stored):
    data = stored / "step-2" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    checkpointer = Checkpointer(stored, linger=0.0)
    record, _ = checkpointer.read()
    assert (record.source, record.step) == ("storage", 1)
    assert checkpointer.load(filled(0)).step == 1
    assert data.exists()
    checkpointer.save(3, filled(3))
    checkpointer.close()
    assert sorted(path.name for path in stored.glob("step-*")) == ["step-1", "step-2.bad"]


def test_a_step_that_took_the_place_of_a_damaged_one_stays(stored):
    store = open_store(stored)
    seen = store.read("step-2/manifest.json")
    storage.quarantine(store, 2, seen + b" ")
    assert storage.steps(store) == [2, 1]
    storage.quarantine(store, 2, seen)
    assert storage.steps(store) == [1]


@slow
def test_a_directory_that_is_unmounted_while_it_is_loaded_is_away(stored):
    checkpointer = Checkpointer(stored, linger=0.0)
    moved = stored.rename(stored.with_name("elsewhere"))
    stored.mkdir()
    for load in (checkpointer.load, lambda state: checkpointer.load(state, step=2)):
        with pytest.raises(StorageAwayError, match="not the directory any more"):
            load(filled(0))
    stored.rmdir()
    moved.rename(stored)
    assert checkpointer.load(filled(0)).step == 2
    checkpointer.close()


def test_a_directory_that_is_unmounted_as_its_steps_are_listed_is_away(stored, monkeypatch):
    saves = storage.saves

    def unmounted(store: Store) -> dict[int, SaveId | None]:
        stored.rename(stored.with_name("elsewhere"))
        stored.mkdir()
        return saves(store)

    checkpointer = Checkpointer(stored, read_only=True)
    monkeypatch.setattr(storage, "saves", unmounted)
    with pytest.raises(StorageAwayError, match="not the directory any more"):
        checkpointer.load(filled(0))
    checkpointer.close()


@pytest.mark.parametrize("act", [verify, tools.describe])
@pytest.mark.parametrize("part", ["step-2/rank-0.index", "step-2/__0_0.distcp"])
def test_tools_call_nothing_damaged_that_they_cannot_read(
    stored, monkeypatch, act: Callable, part: str
):
    with monkeypatch.context() as patched:
        failing(patched, part, OSError(errno.EIO, os.strerror(errno.EIO)))
        if act is tools.describe and "distcp" in part:
            assert act(stored, 2).step == 2  # it reads no tensors
        else:
            with pytest.raises(StorageAwayError, match="Input/output error"):
                act(stored, 2)


def test_nothing_is_pruned_when_it_cannot_be_told_what_is_whole(stored, monkeypatch):
    with monkeypatch.context() as patched:
        failing(patched, "step-2/__0_0.distcp", PermissionError(errno.EACCES, "Permission denied"))
        with pytest.raises(InfrastructureError, match="Permission denied"):
            tools.prune(stored, keep=1)
    assert storage.steps(open_store(stored)) == [2, 1]


def test_whether_something_is_there_is_no_guess(tmp_path, monkeypatch):
    store = open_store(tmp_path)

    def fail(path: Path, **_: object) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "stat", fail)
    monkeypatch.setattr(Path, "read_bytes", fail)
    for ask in (
        lambda: store.exists("latest"),
        store.is_there,
        lambda: storage.save_of(store, 1),
    ):
        with pytest.raises(OSError, match="Input/output error"):
            ask()


@slow
def test_one_rank_that_cannot_read_stops_all_and_nothing_is_renamed(forks, directory, tmp_path):
    for step in (1, 2):
        store_parts(directory, step, *({"w": torch.full((1000,), 10.0 * n + step)} for n in (0, 1)))
    ranks = [forks.start(SCRIPT, directory, tmp_path / "meeting", rank) for rank in (0, 1)]
    told = [process.communicate(timeout=80)[0] for process in ranks]
    assert told[0].startswith("rank 0: Rank 1 cannot go on: ")
    for text in told:
        assert "step-2/__1_0.distcp cannot be read: Input/output error." in text
    assert storage.steps(open_store(directory)) == [2, 1]
