"""What goes wrong on one rank is raised on all: no rank is left waiting in a collective."""

import errno
import functools
import os
import threading
from collections.abc import Callable

import pytest
import torch

from dlrover.checkpoint.engine import checkpointer as checkpointers, shared
from dlrover.checkpoint.engine.checkpointer import Checkpointer
from dlrover.checkpoint.engine.client import SaverClient
from dlrover.checkpoint.loading.loader import Loader
from dlrover.checkpoint.loading.plan import restoring
from dlrover.checkpoint.loading.restore import in_place
from dlrover.checkpoint.machine import interval
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver.protocol import SaverGoneError, ValidGenerations
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import MANIFEST, TRACKER, StorageAwayError, open_store
from dlrover.errors import ConfigurationError, InfrastructureError
from tests.checkpoint.test_fenced import write
from tests.checkpoint.together import ThreadWorld, each, worlds

pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]
EIO = OSError(errno.EIO, os.strerror(errno.EIO))


class Client:
    """A saver without anything in memory; it may be gone when it is asked for something."""

    def __init__(self, gone: str = "") -> None:
        self._gone = gone

    def _ask(self, what: str) -> None:
        if what == self._gone:
            raise SaverGoneError("The saver is gone.")

    def look(self) -> ValidGenerations:
        self._ask("look")
        return ValidGenerations(())

    def keep(self, save: SaveId | None) -> None:
        self._ask("keep")


def stored(place, *steps: int) -> None:
    """Steps of two ranks, equal in both; the state is the step."""
    for step in steps:
        part = functools.partial(
            write,
            str(place),
            SaveId(0, step, step, 1),
            {"w": torch.full((4,), float(step))},
            size=2,
        )
        assert each(part, functools.partial(part, rank=1)) == ["", ""]


def loaders(place, gone: str = "") -> list[Loader]:
    """Of two ranks; what rank 1 asks its saver for it does not get."""
    planner = lambda question: restoring(  # noqa: E731
        in_place({"w": torch.zeros(4)}, frozenset()), question
    )
    found = []
    for world, client in zip(worlds(2), (Client(), Client(gone)), strict=True):
        store = open_store(place)
        store.poll = 0.01
        found.append(Loader(world, client, store, storage.identity(store), planner))
    return found


def test_an_error_is_told_to_the_other_ranks_with_its_sentence():
    def act(world: ThreadWorld) -> None:
        def fail() -> None:
            if world.rank:
                raise ConfigurationError("w has another shape.")

        world.agree(fail)

    told = each(*(lambda world=world: act(world) for world in worlds(2)))
    assert [type(error) for error in told] == [ConfigurationError] * 2
    assert list(map(str, told)) == [
        "Rank 1 cannot go on: w has another shape.",
        "w has another shape.",
    ]


@pytest.mark.parametrize("gone", ["look", "keep"])
def test_a_saver_that_is_gone_stops_the_load_of_all_ranks(tmp_path, gone):
    stored(tmp_path, 1)
    told = each(*(one.load for one in loaders(tmp_path, gone)))
    assert [type(error) for error in told] == [InfrastructureError, SaverGoneError]
    assert str(told[0]) == "Rank 1 cannot go on: The saver is gone."


def without(loader: Loader, monkeypatch, name: str) -> None:
    exists = loader._store.exists
    monkeypatch.setattr(loader._store, "exists", lambda file: file != name and exists(file))


def test_a_step_that_one_rank_never_sees_is_not_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "PATIENCE", 0.05)
    stored(tmp_path, 1, 2)
    ranks = loaders(tmp_path)
    without(ranks[1], monkeypatch, f"step-2/{MANIFEST}")
    told = each(*(one.load for one in ranks))
    assert all(isinstance(error, StorageAwayError) for error in told)
    assert "Rank 1 does not see" in str(told[1])
    assert not any(one.damaged for one in ranks)


def test_a_step_that_is_deleted_while_it_is_loaded_costs_that_step_only(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "PATIENCE", 0.05)
    stored(tmp_path, 1, 2)
    ranks = loaders(tmp_path)
    look = ranks[0]._manifest

    def look_and_delete(step: int) -> bytes:
        seen = look(step)
        if step == 2:
            open_store(tmp_path).remove_step(2)
        return seen

    monkeypatch.setattr(ranks[0], "_manifest", look_and_delete)
    assert [found.step for found in each(*(one.load for one in ranks))] == [1, 1]
    assert "was deleted while it was loaded" in ranks[1].problems[0]


@pytest.mark.parametrize("file", [TRACKER, f"step-2/{MANIFEST}"])
def test_what_rank_0_cannot_read_stops_the_load_of_all_ranks(tmp_path, monkeypatch, file):
    stored(tmp_path, 1, 2)
    ranks = loaders(tmp_path)
    read = ranks[0]._store.read

    def fail(name: str) -> bytes:
        if name == file:
            raise EIO
        return read(name)

    monkeypatch.setattr(ranks[0]._store, "read", fail)
    told = each(*(one.load for one in ranks))
    assert all(isinstance(error, StorageAwayError) for error in told)
    assert "Input/output error" in str(told[1])


def test_whether_a_step_was_replaced_is_no_guess(tmp_path, monkeypatch):
    stored(tmp_path, 1, 2)
    open_store(tmp_path).delete("step-2/rank-1.index")
    ranks = loaders(tmp_path)

    def fail(*_: object) -> None:
        raise EIO

    monkeypatch.setattr(storage, "save_of", fail)
    told = each(*(one.load for one in ranks))
    assert all(isinstance(error, StorageAwayError) for error in told)


# ---- with a saver


@pytest.fixture
def train(directory, monkeypatch) -> Callable:
    """Runs a training on two ranks; what they return, or raise."""
    mine = threading.local()
    monkeypatch.setattr(checkpointers, "TorchWorld", lambda: mine.world)

    def run(body: Callable[[Checkpointer], object], **options: object):
        def rank(world: ThreadWorld) -> object:
            mine.world = world
            saves = Checkpointer(directory, linger=20.0, **options)
            try:
                return body(saves)
            finally:
                saves.close()

        return each(*(lambda world=world: rank(world) for world in worlds(2)))

    return run


def state(step: int = 0) -> dict:
    return {"w": torch.full((4,), float(step)), "step": step}


@pytest.mark.slow
def test_a_saver_that_fails_one_rank_fails_all(train, monkeypatch):
    def save(saves: Checkpointer) -> None:
        saves.save(1, state(1), to="storage")
        saves.wait()
        saves.save(2, state(2))

    assert train(save) == [None, None]
    for method, load in [
        ("attach", lambda saves: None),
        ("join", lambda saves: None),
        ("look", lambda saves: saves.load(state())),
        ("keep", lambda saves: saves.load(state())),
        ("keep", lambda saves: saves.load(state(), step=1)),
    ]:
        real = getattr(SaverClient, method)

        def fail(client, *args, real=real):
            if client._rank == 1 or args == (1,):
                raise SaverGoneError("The saver is gone.")
            return real(client, *args)

        with monkeypatch.context() as patched:
            patched.setattr(SaverClient, method, fail)
            told = train(load)
        assert [type(error) for error in told] == [InfrastructureError, SaverGoneError], method


@pytest.mark.slow
def test_a_copy_that_failed_on_one_rank_fails_the_load_of_all(train, monkeypatch):
    def save_and_load(saves: Checkpointer) -> object:
        if saves._world.rank:
            monkeypatch.setattr(saves._saving.copier, "copy", None)
        saves.save(1, state(1))
        return saves.load(state())

    first, second = train(save_and_load, overlap=True)
    assert isinstance(second, TypeError)
    assert isinstance(first, InfrastructureError)


@pytest.mark.slow
def test_metrics_that_only_rank_0_has_wrong_keep_no_rank_waiting(train, monkeypatch):
    monkeypatch.setattr(interval, "WARM_UP", 1)

    def save(saves: Checkpointer) -> None:
        saves.save(1, state(1), metrics={"": 1.0} if saves._world.rank == 0 else {})

    first, second = train(save, interval="auto")
    assert isinstance(first, ConfigurationError)
    assert second is None
