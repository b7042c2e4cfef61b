"""A save that may not, or cannot, be published: it changes no stored step, and nobody waits for it."""

import dataclasses
import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from dlrover.checkpoint.engine import checkpointer as checkpointers, direct, tree
from dlrover.checkpoint.engine.checkpointer import Checkpointer
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.machine.policies import KeepLast
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import persist, storage
from dlrover.checkpoint.storage.stores import IDENTITY, TRACKER, Store, open_store
from dlrover.checkpoint.tools.verification import verify
from dlrover.errors import ConfigurationError, InfrastructureError
from tests.checkpoint.test_crashes import start_saver
from tests.checkpoint.together import each, worlds

pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]
AT_ONCE = 10.0
"""Seconds; far less than those that a rank waits for another one."""


class Lease:
    """One that another training takes before a world looks at it the ``lost``-th time."""

    def __init__(self, lost: int) -> None:
        self._left = lost

    def check(self, session: int, pause: object) -> None:
        self._left -= 1
        if self._left <= 0:
            raise InfrastructureError("It belongs to another training.")


@pytest.fixture(params=["directory", "URL"])
def place(request, tmp_path: Path) -> str:
    found = str(tmp_path) if request.param == "directory" else f"file://{tmp_path}"
    storage.identity(open_store(found))  # made by rank 0 alone, as in a training
    return found


def quick(place: str) -> Store:
    store = open_store(place)
    store.poll = 0.01
    return store


def write(place: str, save: SaveId, state: dict, lease=None, rank: int = 0, size: int = 1) -> str:
    """Store a rank's part as its worker does; what went wrong."""
    store, copier = quick(place), Copier()
    packed = copier.layout(tree.flatten(state))
    writer = direct.DirectWriter(store, storage.identity(store), KeepLast(9), rank, size, lease)
    return writer.write(save, packed, copier.sources, {})


def test_a_world_that_loses_the_lease_while_it_writes_changes_nothing_of_a_step(place, tmp_path):
    assert not write(place, SaveId(0, 1, 7, 1), {"new": torch.ones(3)})
    before = {path: path.read_bytes() for path in (tmp_path / "step-7").iterdir() if path.is_file()}
    for number, lease in ((2, Lease(2)), (3, Lease(1))):
        problem = write(place, SaveId(0, number, 7, 2), {"old": torch.zeros(5)}, lease)
        assert problem == "It belongs to another training."
    assert {path: path.read_bytes() for path in before} == before
    assert verify(place, 7).whole


def test_a_save_that_comes_after_a_newer_one_changes_nothing_of_it(place):
    assert not write(place, SaveId(0, 2, 7, 2), {"new": torch.ones(3)})
    assert "a newer save of it is" in write(place, SaveId(0, 1, 7, 1), {"old": torch.zeros(5)})
    assert verify(place, 7).whole


@pytest.mark.parametrize("looks", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_what_rank_0_may_not_store_no_other_rank_waits_for(place, looks, late):
    save, began = SaveId(0, 1, 7, 1), time.monotonic()

    def part(rank: int, lease: Lease | None = None) -> str:
        return write(place, save, {"w": torch.full((2,), rank + 1.0)}, lease, rank, 2)

    if late and looks == 1:
        told = [part(0, Lease(looks)), part(1)]
    else:
        told = each(lambda: part(0, Lease(looks)), lambda: part(1))
    assert time.monotonic() - began < AT_ONCE
    assert told == [
        "It belongs to another training.",
        "Step 7 was not stored: another node gave it up.",
    ]
    assert storage.steps(open_store(place)) == []


def test_what_rank_0_cannot_write_no_other_rank_waits_for(place):
    began = time.monotonic()
    clash = {"a": {"b": 1}, "a.b": 2}
    save = SaveId(0, 1, 7, 1)
    first, second = each(
        lambda: write(place, save, clash, size=2),
        lambda: write(place, save, {"w": torch.ones(2)}, rank=1, size=2),
    )
    assert isinstance(first, ConfigurationError)
    assert second == "Step 7 was not stored: another node gave it up."
    assert time.monotonic() - began < AT_ONCE


def test_the_next_save_removes_what_was_given_up(place, tmp_path):
    write(place, SaveId(0, 1, 7, 1), {"w": torch.ones(2)}, Lease(1))
    write(place, SaveId(0, 2, 8, 1), {"w": torch.ones(2)}, Lease(2))
    assert not write(place, SaveId(0, 3, 9, 1), {"w": torch.ones(2)})
    left = {path.name for path in tmp_path.iterdir() if any(path.rglob("*"))}
    assert left == {"step-9"}


def test_a_save_that_was_given_up_is_tried_again_at_a_breakpoint(place):
    store = quick(place)
    save = SaveId(0, 1, 7, 1)
    storage.give_up(store, "", save)
    draft = store.draft(save)
    assert storage.is_given_up(store, draft)
    assert not storage.is_given_up(store, draft, storage.BREAKPOINT_GIVEN_UP)
    storage.give_up(store, "", save, storage.BREAKPOINT_GIVEN_UP)
    assert storage.is_given_up(store, draft, storage.BREAKPOINT_GIVEN_UP)
    storage.remove_marks(store, store.draft(save))
    assert not storage.is_given_up(store, draft)


def test_nothing_is_given_up_in_a_directory_that_is_another_one(place, tmp_path):
    with pytest.raises(OSError, match="not the directory any more"):
        storage.give_up(quick(place), "another", SaveId(0, 1, 7, 1))
    assert [path.name for path in tmp_path.iterdir()] == [IDENTITY]


def test_a_step_that_cannot_get_its_name_at_first_keeps_the_parts_of_other_ranks(
    tmp_path, monkeypatch
):
    """Rank 0 tries again; rank 1 has written its part, and waits."""
    storage.identity(open_store(tmp_path))
    failures = [OSError(errno.EIO, os.strerror(errno.EIO)) for _ in range(2)]
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if failures and path.name.endswith(".taken"):
            raise failures.pop()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(persist, "RETRY_DELAYS", (0.01, 0.01))
    monkeypatch.setattr(direct, "PEER_PATIENCE", 5.0)
    save = SaveId(0, 1, 7, 1)
    told = each(
        *(
            lambda rank=rank: write(
                str(tmp_path), save, {"w": torch.full((2,), float(rank))}, rank=rank, size=2
            )
            for rank in range(2)
        )
    )
    assert told == ["", ""]
    assert not failures
    assert verify(tmp_path, 7).whole


def test_a_record_that_cannot_be_read_at_first_costs_no_step(tmp_path, monkeypatch):
    """As on NFS when another machine has just replaced the file."""
    save = SaveId(0, 1, 7, 1)
    storage.identity(open_store(tmp_path))
    failures = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))]
    read = Path.read_bytes

    def fail_once(path: Path) -> bytes:
        if failures and path.name == TRACKER:
            raise failures.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail_once)
    monkeypatch.setattr(persist, "RETRY_DELAYS", (0.01,))
    assert write(str(tmp_path), save, {"w": torch.ones(2)}) == ""
    assert storage.tracked(open_store(tmp_path)) == save


def test_a_full_disk_has_room_for_a_mark_once_the_files_of_the_save_are_gone(tmp_path, monkeypatch):
    store, save = quick(str(tmp_path)), SaveId(0, 1, 7, 1)
    draft = store.draft(save)
    make = Path.mkdir

    def mkdir(path: Path, *args: object, **kwargs: object) -> None:
        if (tmp_path / draft.top).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    storage.give_up(store, "", save)
    assert storage.is_given_up(store, draft)
    store.draft(save)
    assert storage.is_given_up(store, draft), "a rank that comes later sees it, too"


@pytest.mark.slow
def test_what_a_load_has_found_is_marked_only_by_who_holds_the_lease(directory):
    """Neither is a damaged step renamed, nor a new line begun."""
    for step in (1, 2):
        assert not write(str(directory), SaveId(0, step, step, 1), {"w": torch.ones(2)})
    (directory / "step-2" / "rank-0.index").unlink()
    saves = Checkpointer(directory, linger=0.0)
    assert saves.load({"w": torch.ones(2)}).step == 1
    saves.load({"w": torch.ones(2)}, step=1)
    own = saves._saving.direct
    lines = []
    for step, lease in ((3, Lease(1)), (4, own.lease)):
        saves._saving.direct = dataclasses.replace(own, lease=lease)
        saves.save(step, {"w": torch.ones(2)})
        lines.append(
            (storage.save_of(open_store(directory), 1).line, (directory / "step-2").exists())
        )
    saves.close()
    assert lines[0] == (0, True)
    assert lines[1][0] > 0
    assert not lines[1][1]


@pytest.mark.slow
def test_a_save_that_one_rank_cannot_make_holds_up_no_other_node(two_nodes, monkeypatch):
    """Rank 1 raises before its saver hears of the save; rank 0's saver has its part and waits for the other."""
    ranks = {str(node): world for node, world in zip(two_nodes, worlds(2), strict=True)}

    def train(node: Path) -> str:
        saves = Checkpointer(node, linger=0.0)
        rank = saves._world.rank
        try:
            saves.save(1, {"w": torch.ones(2) if not rank else object}, to="storage")
            saves.wait()
        except (ConfigurationError, InfrastructureError) as error:
            return str(error)
        finally:
            saves.close()
        return ""

    mine = threading.local()
    monkeypatch.setattr(checkpointers, "TorchWorld", lambda: mine.world)

    def run(node: Path) -> str:
        mine.world = ranks[str(node)]
        return train(node)

    began = time.monotonic()
    told = each(*(lambda node=node: run(node) for node in two_nodes))
    assert "another node gave it up" in told[0]
    assert told[1]
    assert time.monotonic() - began < 30.0


DYING_SAVER = """
import os, signal, sys, time
from dlrover.checkpoint.saver import saver
from dlrover.checkpoint.storage import faults
committed, sys.argv = sys.argv[1], ["dlrover.checkpoint.saver.saver", *sys.argv[2:]]
def die(passed):
    if passed == "persist.begun":
        while not os.path.exists(committed):  # a worker without its answer would save again
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
faults.hook = die
saver.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_part_that_is_lost_with_its_saver_holds_up_no_other_node(
    two_nodes, tmp_path, monkeypatch, lost
):
    committed = tmp_path / "committed"
    start_saver(two_nodes[lost], DYING_SAVER, str(committed))
    ranks, mine = dict(zip(two_nodes, worlds(2), strict=True)), threading.local()
    monkeypatch.setattr(checkpointers, "TorchWorld", lambda: mine.world)

    def train(node: Path) -> str:
        mine.world = ranks[node]
        saves = Checkpointer(node, linger=0.0)
        saves.save(1, {"w": torch.full((2,), float(mine.world.rank))}, to="storage")
        if node == two_nodes[lost]:
            committed.touch()
        try:
            saves.wait()
        except InfrastructureError as error:
            return str(error)
        finally:
            saves.close()
        return ""

    began = time.monotonic()
    told = each(*(lambda node=node: train(node) for node in two_nodes))
    assert "the saver ended before" in told[lost]
    assert "another node gave it up" in told[1 - lost]
    assert time.monotonic() - began < 30.0
