"""The record that a save was once whole, and what a load that finds nothing makes of it."""

import errno

import pytest

from dlrover.checkpoint.loading import fresh
from dlrover.checkpoint.loading.fresh import EarlierCheckpoints
from dlrover.checkpoint.loading.memory_step import Lost
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver.protocol import JoinSaver
from dlrover.checkpoint.storage import first_save, storage
from dlrover.checkpoint.storage.first_save import FirstSaves
from dlrover.checkpoint.storage.stores import open_store

SESSION = 7


def save(number: int, session: int = SESSION) -> SaveId:
    return SaveId(0, number, 10 * number, session)


def node(*ranks: int, size: int = 4, session: int = SESSION) -> JoinSaver:
    return JoinSaver(session, size, ranks)


@pytest.fixture(params=["directory", "url"])
def place(request, tmp_path):
    store = open_store(tmp_path if request.param == "directory" else f"file://{tmp_path}")
    storage.identity(store)
    return store


def record(place, joined: JoinSaver, *numbers: int) -> bool:
    return first_save.record(place, storage.identity(place), "job", joined, map(save, numbers))


def is_recorded(place) -> bool:
    return first_save.recorded(place, storage.identity(place), "job") == "own"


def test_one_node_records_its_first_save_and_writes_it_once(place):
    assert not is_recorded(place)
    assert record(place, node(0, 1, size=2), 3)
    written = place.read("saved")
    assert record(place, node(0, 1, size=2), 3, 4)
    assert is_recorded(place)
    assert place.read("saved") == written


def test_a_save_counts_when_all_nodes_have_it(place):
    assert not record(place, node(0, 1), 1)
    assert not is_recorded(place), "the other node may have died in it"
    assert record(place, node(2, 3), 1)
    assert record(place, node(0, 1), 1, 2), "it is there"
    assert is_recorded(place)
    assert not [name for name in place.names() if name.startswith(".saved.")]


def test_what_an_earlier_job_had_in_memory_is_its_own(place):
    identity = storage.identity(place)
    assert record(place, node(0, size=1), 1)
    assert first_save.recorded(place, identity, "next") == "earlier"
    assert first_save.recorded(place, identity, "") == "own", "it cannot be told apart"
    assert "ended with it" in fresh.explanation("", place, None, "earlier")
    assert first_save.record(place, identity, "next", node(0, size=1), [save(2)])
    assert first_save.recorded(place, identity, "next") == "own"


def test_nodes_that_have_different_saves_have_none_in_common(place):
    assert not record(place, node(0, 1), 1)
    assert not record(place, node(2, 3), 2)
    assert not is_recorded(place)
    assert record(place, node(0, 1), 1, 2)


def test_nodes_of_different_worlds_are_not_mixed(place):
    assert not record(place, node(0, 1), 1)
    assert not first_save.record(
        place, storage.identity(place), "job", node(2, 3, session=8), [save(1, session=8)]
    )
    assert not is_recorded(place)


def test_what_all_nodes_noted_counts_also_if_none_of_them_saw_the_others(place, monkeypatch):
    with monkeypatch.context() as patch:  # names may be cached
        patch.setattr(first_save, "_common", lambda store, session: set())
        assert not record(place, node(0, 1), 1)
        assert not record(place, node(2, 3), 1)
    assert is_recorded(place)


def test_it_is_forgotten_with_the_notes(place):
    record(place, node(0, 1), 1)
    record(place, node(0, 1, 2, 3), 1)
    first_save.forget(place)
    assert not is_recorded(place)
    assert place.names() == ["checkpoint-id"]


def test_a_record_that_comes_after_its_directory_was_removed_does_not_count(place):
    record(place, node(0, size=1), 1)
    place.delete("checkpoint-id")
    assert not is_recorded(place)


def test_a_damaged_record_was_written_once(place):
    place.write("saved", b"{")
    assert is_recorded(place)


# ---- which saves all ranks of a node have


def test_a_save_is_whole_when_all_ranks_of_the_node_have_committed_it():
    first = FirstSaves(node(0, 1))
    first.note_part(save(1), 0)
    first.note_part(save(2), 0)
    first.note_part(save(2), 1)
    assert (first.whole, first.pending) == ([save(2)], True)
    first.note(1, recorded=False)
    assert not first.due
    first.note_part(save(3), 1)
    first.note_part(save(3), 0)
    assert first.whole == [save(2), save(3)]
    first.note(2, recorded=False, problem="No space left on device")
    assert (first.pending, first.due) == (False, True), "the saver need not stay for it"
    first.note(2, recorded=True)
    assert not first.due


def test_a_rank_that_commits_nothing_costs_no_memory():
    first = FirstSaves(node(0, 1))
    for number in range(1, 1000):
        first.note_part(save(number), 0)
    assert len(first._missing) == first_save.MOST


# ---- what a load makes of it


LOST = Lost(save(40), (1,))


@pytest.mark.parametrize(
    ("evidence", "problems", "lost", "said"),
    [
        (EarlierCheckpoints(None, "none", ""), [], None, ""),
        (EarlierCheckpoints(None, "none", ""), [], LOST, ""),
        (EarlierCheckpoints(None, "own", ""), [], None, "nothing is left"),
        (EarlierCheckpoints(None, "own", ""), [], LOST, "the part of rank 1 is gone"),
        (EarlierCheckpoints(None, "earlier", ""), [], None, ""),
        (EarlierCheckpoints(None, "earlier", ""), [], LOST, "the part of rank 1 is gone"),
        (EarlierCheckpoints(None, "none", "No space"), [], LOST, "is gone. No space"),
        (EarlierCheckpoints(None, "none", "No space"), [], None, ""),
        (
            EarlierCheckpoints(None, "none", ""),
            ["It is damaged."],
            None,
            "no step was stored): It is damaged",
        ),
        (EarlierCheckpoints(save(3), "own", ""), [], None, "step 30 was stored): There is no "),
        (
            EarlierCheckpoints(SaveId(0, 0, -1, 0), "none", ""),
            [],
            None,
            "the file latest is damaged",
        ),
    ],
)
def test_a_training_begins_anew_only_where_nothing_was_ever_whole(
    place, evidence, problems, lost, said
):
    loss = fresh.loss(evidence, place, problems, lost)
    assert said in loss
    assert bool(loss) == bool(said)


def test_a_directory_that_cannot_be_written_is_an_error(place, monkeypatch):
    def full(file: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(place, "write", full)
    with pytest.raises(OSError, match="No space left"):
        record(place, node(0, size=1), 1)
    assert not is_recorded(place)
