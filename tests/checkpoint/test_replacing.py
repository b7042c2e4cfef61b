"""A stored step that is stored again: wherever the saver dies, one whole copy stays."""

import contextlib
import functools
import itertools
import os
import shutil
from pathlib import Path

import pytest

from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import local, storage
from dlrover.checkpoint.storage.stores import MANIFEST, Draft, open_store, step_folder

OLD, NEW = b"old", b"new"


class KilledError(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def draft_of(directory: Path, session: int) -> Draft:
    """Step 7, ready to be published by a world."""
    store = open_store(directory)
    draft = store.draft(SaveId(0, session, 7, session))
    store.write(draft.path(MANIFEST), NEW if session > 1 else OLD)
    return draft


def killed_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Die before the call of this number that changes a name or deletes something."""
    calls = itertools.count()
    for owner, name in ((Path, "rename"), (shutil, "rmtree"), (local, "_exchange")):
        real = getattr(owner, name)

        def die(*args: object, real=real, **kwargs: object) -> object:
            if next(calls) == count:
                raise KilledError
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, die)


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("session", [1, 2], ids=["same world", "next world"])
def test_whenever_the_saver_dies_a_whole_copy_is_left(tmp_path, monkeypatch, exchanges, session):
    for count in range(5):
        directory = tmp_path / str(count)
        directory.mkdir()
        store = open_store(directory)
        store.publish(draft_of(directory, 1), {MANIFEST})
        draft = draft_of(directory, 2)
        with monkeypatch.context() as patched, contextlib.suppress(KilledError):
            if not exchanges:
                patched.setattr(local, "_exchange", lambda *_: False)
            killed_at(patched, count)
            store.publish(draft, {MANIFEST})
        if session == 1:
            storage.remove_given_up(store, 2)
        else:
            storage.remove_unfinished(store, 3)
        assert storage.steps(store) == [7]
        assert store.read(f"{step_folder(7)}/{MANIFEST}") in (OLD, NEW)
        assert os.listdir(directory) == ["step-7"]
    assert store.read(f"{step_folder(7)}/{MANIFEST}") == NEW, "nothing was killed the last time"


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("late", [False, True], ids=["", "a late rank begins again"])
def test_what_is_given_up_while_it_is_published_costs_no_step(
    tmp_path, monkeypatch, exchanges, late
):
    def given_up(real, *args: object) -> object:
        if next(calls) == count:
            storage.give_up(store, "", draft.save)
            if late:
                store.draft(draft.save)
        return real(*args)

    for count in range(6):
        directory = tmp_path / str(count)
        directory.mkdir()
        store = open_store(directory)
        store.publish(draft_of(directory, 1), {MANIFEST})
        draft = draft_of(directory, 2)
        calls = itertools.count()
        with monkeypatch.context() as patched, contextlib.suppress(FileNotFoundError):
            patched.setattr(os, "listdir", functools.partial(given_up, os.listdir))
            patched.setattr(os, "rename", functools.partial(given_up, os.rename))
            exchange = local._exchange if exchanges else lambda *_: False
            patched.setattr(local, "_exchange", functools.partial(given_up, exchange))
            store.publish(draft, {MANIFEST})
        storage.adopt(store)
        assert store.read(f"{step_folder(7)}/{MANIFEST}") == (OLD if count == 0 else NEW)


def test_what_was_given_up_is_not_written_again(tmp_path):
    store = open_store(tmp_path)
    draft = draft_of(tmp_path, 1)
    storage.give_up(store, "", draft.save)
    with pytest.raises(FileNotFoundError):
        store.write(draft.path(MANIFEST), NEW)
    with pytest.raises(FileNotFoundError):
        store.publish(draft, {MANIFEST})
    assert storage.is_given_up(store, draft)


def test_a_load_finds_what_a_saver_left_between_two_names(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    store.publish(draft_of(tmp_path, 1), {MANIFEST})
    draft = draft_of(tmp_path, 2)
    monkeypatch.setattr(local, "_exchange", lambda *_: False)
    with monkeypatch.context() as patched:
        killed_at(patched, 3)
        with pytest.raises(KilledError):
            store.publish(draft, {MANIFEST})
    assert storage.steps(store) == []
    storage.adopt(store)
    assert storage.steps(store) == [7]
    assert store.read(f"{step_folder(7)}/{MANIFEST}") == NEW


def test_what_was_being_deleted_is_not_taken_for_the_step_when_that_is_pruned(
    tmp_path, monkeypatch
):
    store = open_store(tmp_path)
    store.publish(draft_of(tmp_path, 1), {MANIFEST})
    draft = draft_of(tmp_path, 2)

    def die(path: Path) -> None:
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", die)
        with pytest.raises(KilledError):
            store.publish(draft, {MANIFEST})
    store.remove_step(7)
    storage.adopt(store)
    assert not (tmp_path / step_folder(7)).exists()


def test_half_a_copy_is_not_taken_for_the_step(tmp_path):
    store = open_store(tmp_path)
    half = tmp_path / f".step-7.{SaveId(0, 2, 7, 2).folder}.replaced"
    half.mkdir()
    (half / "__0_0.distcp").touch()
    storage.adopt(store)
    assert not (tmp_path / step_folder(7)).exists()
    storage.remove_unfinished(store, 3)
    assert os.listdir(tmp_path) == []


def test_names_are_exchanged_here(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("b")
    assert local._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_text() == "b"
    with pytest.raises(FileNotFoundError):
        local._exchange(tmp_path / "a", tmp_path / "c")
