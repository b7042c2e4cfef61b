"""Which stored step is loaded, as one rank alone sees it."""

import pytest
import torch

from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.engine.direct import DirectWriter
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.loading import loader as loaders
from dlrover.checkpoint.loading.loader import Loader
from dlrover.checkpoint.loading.plan import restoring
from dlrover.checkpoint.loading.restore import in_place
from dlrover.checkpoint.machine.policies import KeepLast
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver.protocol import ValidGenerations
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stored_step import StoredStep
from dlrover.checkpoint.storage.stores import open_store

pytestmark = pytest.mark.torch


class Client:
    """A saver that holds nothing in memory."""

    def look(self) -> ValidGenerations:
        return ValidGenerations(())

    def keep(self, save: SaveId | None) -> None:
        assert save is None


@pytest.fixture
def place(tmp_path):
    return open_store(tmp_path)


def store(place, step: int, number: int) -> SaveId:
    """Store a step whose state is the number of the save."""
    copier = Copier()
    layout = copier.layout(tree.flatten({"w": torch.full((4,), float(number))}))
    writer = DirectWriter(place, storage.identity(place), KeepLast(100), 0, 1, None)
    save = SaveId(0, number, step, 1)
    assert not writer.write(save, layout, copier.sources, {})
    return save


def load(place, step: int | None = None):
    """What is found, and the state."""
    state = {"w": torch.zeros(4)}
    planner = lambda question: restoring(in_place(state, frozenset()), question)  # noqa: E731
    loader = Loader(TorchWorld(), Client(), place, storage.identity(place), planner)
    found = loader.load() if step is None else loader.load_stored(step)
    return found, state["w"][0].item(), loader


def test_a_step_that_is_named_may_be_older_than_those_that_are_considered(place, monkeypatch):
    monkeypatch.setattr(loaders, "MAX_STORED", 2)
    for step in (1, 2, 3, 4):
        store(place, step, step)
    found, value, _ = load(place, step=1)
    assert (found.step, value) == (1, 1.0)
    for step in (3, 4):
        place.delete(f"step-{step}/rank-0.index")
    assert load(place)[0] is None, "no older one is tried"


@pytest.mark.parametrize("step", [None, 7])
def test_a_step_that_is_stored_again_before_it_is_read_is_listed_again(place, monkeypatch, step):
    """Else another rank, which has read it before, would have another save of it."""
    store(place, 7, 1)
    known, newer = storage.saves, iter([2])

    def list_and_replace(*args):
        listed = known(*args)
        if args[0].url == place.url and (number := next(newer, 0)):
            store(place, 7, number)
        return listed

    monkeypatch.setattr(storage, "saves", list_and_replace)
    found, value, loader = load(place, step)
    assert (found.save.number, value) == (2, 2.0)
    assert not loader.damaged


def test_a_step_that_is_replaced_while_its_tensors_are_read_is_not_damaged(place, monkeypatch):
    store(place, 7, 1)
    index, newer = StoredStep.index, iter([2])

    def replace_and_read(stored, rank):
        if number := next(newer, 0):
            store(place, 7, number)
        return index(stored, rank)

    monkeypatch.setattr(StoredStep, "index", replace_and_read)
    found, value, loader = load(place)
    assert (found.save.number, value) == (2, 2.0)
    assert not loader.damaged
    assert not loader.problems
