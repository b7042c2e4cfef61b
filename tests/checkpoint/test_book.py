import os
import threading

import msgspec
import pytest

from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import TensorSpec
from dlrover.checkpoint.machine.policies import KeepLast
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import memory, protocol
from dlrover.checkpoint.saver.book import Book
from dlrover.checkpoint.saver.breakpoint import Breakpoints
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.saver.protocol import Join, SaverGoneError
from dlrover.checkpoint.saver.saver import Saver
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import open_store
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError

ENTRIES = layouts.place([TensorSpec(("a",), "uint8", (8,), None)], [0])
PACKED = layouts.packed(msgspec.Raw(msgspec.msgpack.encode(ENTRIES)), b"\x80", (8, 1, 0))
HERE = os.getpid()


class Worker:
    """One rank, without a process."""

    def __init__(
        self,
        book: Book,
        rank: int,
        world: tuple[int, ...] = (0,),
        session: int = 1,
        *,
        stores=False,
        size=0,
        generations=2,
    ):
        self.book, self.rank, self.session, self.size = book, rank, session, size or len(world)
        _, self.owner, fds = book.attach(rank, HERE)
        self.fds = fds[:generations]
        for _ in fds[generations:]:
            book._ranks.drop_last(book._ranks.memories[rank])
        book.join(rank, Join(session, self.size, world, save_at_breakpoint=stores))

    def id(self, step: int, number: int = 0) -> SaveId:
        return SaveId(0, number or step, step, self.session)

    def write(self, step: int, number: int = 0) -> int:
        save = self.id(step, number)
        slot = self.book.begin(self.rank, save)
        os.ftruncate(self.fds[slot], memory.room_for(PACKED))
        Generation(self.fds[slot]).publish(PACKED, rank=self.rank, world_size=self.size, save=save)
        return slot

    def save(self, step: int, number: int = 0, *, to_storage: bool = False) -> int:
        slot = self.write(step, number)
        self.book.publish(self.rank, slot, self.id(step, number), to_storage=to_storage)
        return slot

    def leave(self) -> None:
        self.book.detach(self.rank, self.owner)

    @property
    def steps(self) -> list[int]:
        return sorted(held.save.step for held in self.book.look() if held.rank == self.rank)


def test_the_last_two_steps_are_held():
    worker = Worker(Book(), 0)
    for step in range(5):
        worker.save(step)
    assert worker.steps == [3, 4]


def test_an_unfinished_save_costs_the_older_step_only():
    worker = Worker(Book(), 0)
    worker.save(1)
    worker.save(2)
    worker.write(3)
    assert worker.steps == [2]


def test_what_is_to_be_persisted_is_not_written():
    worker = Worker(Book(), 0)
    pinned = worker.save(1, to_storage=True)
    assert {worker.save(step) for step in range(2, 6)} == {1 - pinned}
    assert worker.steps == [1, 5]


def test_two_generations_are_written_in_turn_while_a_third_is_persisted():
    worker = Worker(Book(), 0, generations=3)
    worker.save(1, to_storage=True)
    for step in range(2, 6):
        worker.save(step)
    assert worker.steps == [1, 4, 5]


def test_a_save_waits_while_both_generations_are_to_be_persisted():
    book = Book()
    worker = Worker(book, 0)
    worker.save(1, to_storage=True)
    worker.save(2, to_storage=True)
    saving = threading.Thread(target=worker.save, args=(3,))
    saving.start()
    task = book.tasks.next()
    assert task.step == 1
    assert book.tasks.pause(task, 5.0, yielding=True), "the task hears that its memory is wanted"
    assert worker.steps == [1, 2]
    book.tasks.finish(task, "")
    saving.join(5)
    assert worker.steps == [2, 3]


def test_a_step_is_persisted_when_all_ranks_have_published_it():
    book = Book()
    workers = [Worker(book, rank, (0, 1)) for rank in range(2)]
    workers[0].save(1, to_storage=True)
    assert not any(task.complete for task in book.tasks._tasks.values())
    workers[1].save(1, to_storage=True)
    task = book.tasks.next()
    assert sorted(book.tasks.sources(task)) == [0, 1]


def test_a_step_that_a_rank_cannot_publish_any_more_fails():
    book = Book()
    workers = [Worker(book, rank, (0, 1)) for rank in range(2)]
    workers[0].save(1, to_storage=True)
    workers[1].leave()
    assert book.settled(0) == ("Step 1 was not stored: rank 1 ended before.",)
    assert book.settled(0) == ()


def saved_twice(*saves: int) -> tuple[Book, list[Worker]]:
    """A book whose ranks have each saved step 1 that often, for the storage."""
    book = Book()
    ranks = tuple(range(len(saves)))
    workers = [Worker(book, rank, ranks, generations=3) for rank in ranks]
    for worker, count in zip(workers, saves, strict=True):
        for number in range(1, count + 1):
            worker.save(1, number, to_storage=True)
    return book, workers


def stored(book: Book) -> list[tuple[int, ...]]:
    """Persist what there is; of each task the numbers of the saves that the ranks' parts are of."""
    found = []
    while book.tasks.ready:
        task = book.tasks.next()
        found.append(tuple(task.slots[rank].saved.number for rank in task.ranks))
        book.tasks.sources(task)
        book.tasks.finish(task, "")
    return found


def pins(book: Book) -> int:
    return sum(slot.pins for mine in book._ranks.memories.values() for slot in mine.slots)


def test_each_save_of_a_step_is_persisted_by_itself_and_the_last_one_last():
    book, _ = saved_twice(2, 2)
    assert stored(book) == [(1, 1), (2, 2)]
    assert [book.settled(rank) for rank in range(2)] == [(), ()]
    assert pins(book) == 0


@pytest.mark.parametrize("dies_first", [True, False])
def test_a_second_save_that_a_rank_did_not_live_to_make_is_given_up(dies_first):
    book, workers = saved_twice(1 if dies_first else 2, 1)
    workers[1].leave()
    if dies_first:
        workers[0].save(1, 2, to_storage=True)
    assert stored(book) == [(1, 1)]
    (problem,) = book.settled(0)
    assert problem.startswith("Step 1 was not stored: rank 1 ended before.")
    assert pins(book) == 0


def test_a_rank_that_is_a_save_behind_still_has_one_in_common():
    book, _ = saved_twice(2, 1)
    held = {(held.rank, held.save.number) for held in book.look()}
    assert held == {(0, 1), (0, 2), (1, 1)}


@pytest.mark.parametrize("first", [0, 1])
def test_a_save_that_one_rank_passed_over_holds_up_nothing(first):
    book, workers = saved_twice(0, 0)
    save = workers[0].id(1)
    steps = [
        lambda: workers[0].save(1, to_storage=True),
        lambda: book.pass_over(1, save, written=False),
    ]
    for step in steps if first == 0 else steps[::-1]:
        step()
    assert book.settled(0) == ("Step 1 was not stored: rank 1 did not save it.",)
    assert pins(book) == 0
    for worker in workers:
        worker.save(2, to_storage=True)
    assert stored(book) == [(2, 2)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_part_that_its_worker_writes_itself_is_not_waited_for(first):
    book, workers = saved_twice(0, 0)
    save = workers[0].id(1)
    steps = [
        lambda: workers[0].save(1, to_storage=True),
        lambda: book.pass_over(1, save, written=True),
    ]
    for step in steps if first == 0 else steps[::-1]:
        step()
    task = book.tasks.next()
    assert list(book.tasks.sources(task)) == [0]
    book.tasks.finish(task, "")
    assert book.settled(0) == ()
    book.pass_over(0, workers[0].id(2), written=True)
    book.pass_over(1, workers[0].id(2), written=True)
    assert not book.tasks._tasks


def test_ranks_that_do_not_make_the_same_saves_are_told_at_once():
    _, workers = saved_twice(0, 0)
    workers[0].save(1)
    workers[0].save(2)
    workers[1].save(1)
    with pytest.raises(ConfigurationError, match="saves step 3 where rank 0 has saved step 2"):
        workers[1].save(3, 2)


def test_a_step_that_was_gone_back_to_is_newer_than_what_was_abandoned():
    worker = Worker(Book(), 0)
    for step in (1, 2):
        worker.save(step)
    worker.save(1, 3)
    assert worker.steps == [1, 2]
    worker.save(2, 4)
    assert {(held.save.step, held.save.number) for held in worker.book.look()} == {(1, 3), (2, 4)}


def test_a_saver_says_what_the_newest_save_was_that_it_has_seen():
    book, _ = saved_twice(2, 1)
    attached, *_ = book.attach(2, HERE)
    assert attached.newest.number == 2


def test_storage_that_fails_is_told_once_and_so_is_its_return():
    book = Book()
    workers = [Worker(book, rank, (0, 1), generations=3) for rank in range(2)]
    told = []
    for step, problem in enumerate(["", "It is full.", "It is full.", "", ""], 1):
        for worker in workers:
            worker.save(step, to_storage=True)
        book.tasks.finish(book.tasks.next(), problem)
        told += [(step, rank, news) for rank in range(2) if (news := book.news(rank))]
    assert told == [
        (2, 0, "It is full. Training goes on, and later steps are tried."),
        (4, 0, "Step 4 was stored: the storage takes steps again."),
    ]
    assert book.settled(1) == ("It is full.", "It is full.")


def test_a_new_world_drops_what_the_old_one_left_half_done():
    book = Book()
    old = [Worker(book, rank, (0, 1)) for rank in range(2)]
    old[0].save(1, to_storage=True)
    old[0].leave()
    new = Worker(book, 0, (0,), session=2)
    assert not book.tasks._tasks
    assert not any(slot.pinned for slot in book._ranks.memories[0].slots)
    assert new.steps == [1], "but may load it"


def test_a_world_that_did_not_load_gives_up_the_memory_of_the_old_one():
    book = Book()
    old = Worker(book, 0)
    old.save(100)
    old.save(101)
    old.leave()
    new = Worker(book, 0, session=2)
    new.save(1)
    assert new.steps == [1]


def test_the_step_that_was_loaded_is_kept_until_two_others_are_there():
    book = Book()
    old = Worker(book, 0)
    kept = old.save(100)
    old.save(101)
    old.leave()
    new = Worker(book, 0, session=2)
    book.keep(0, old.id(100))
    assert new.steps == [100]
    assert new.save(101) != kept
    assert new.steps == [100, 101]
    assert new.save(102) == kept
    assert new.steps == [101, 102]


def test_the_step_of_a_larger_world_is_kept_whole_until_the_second_save():
    book = Book()
    old = [Worker(book, rank, (0, 1)) for rank in range(2)]
    for worker in old:
        worker.save(100)
        worker.leave()
    new = Worker(book, 0, (0,), session=2)
    book.keep(0, old[0].id(100))
    new.save(101)
    assert [(held.rank, held.save.step) for held in book.look()] == [(0, 100), (0, 101), (1, 100)]
    new.save(102)
    assert [(held.rank, held.save.step) for held in book.look()] == [(0, 102), (0, 101)]
    with pytest.raises(InfrastructureError, match="Nothing of rank 1"):
        book.open(1)


def test_two_processes_cannot_be_the_same_rank(monkeypatch):
    monkeypatch.setattr("dlrover.checkpoint.saver.book.PREDECESSOR_WAIT", 0.1)
    book = Book()
    Worker(book, 0)
    with pytest.raises(InfrastructureError, match="two jobs cannot share"):
        book.attach(0, HERE)


def test_a_process_that_is_gone_does_not_keep_its_rank():
    book = Book()
    _, first, _ = book.attach(0, 2**22 + 1)  # no such process
    _, second, _ = book.attach(0, HERE)
    book.detach(0, first)
    assert book._ranks.memories[0].owner == second


def test_a_flipped_bit_is_found_when_the_sums_are_known():
    book = Book()
    worker = Worker(book, 0)
    slot = worker.save(1)
    book.sums.compute_next()
    assert book.verify(0, slot) == ""
    Generation(worker.fds[slot]).data[3] ^= 1
    assert "The tensor a of step 1 in memory is damaged" in book.verify(0, slot)


def test_sums_of_memory_that_is_written_again_are_not_stored():
    book = Book()
    worker = Worker(book, 0)
    worker.save(1)
    worker.save(2)
    slot = worker.write(3)
    book.sums.compute_next()
    generation = Generation(worker.fds[slot])
    assert generation.sums(generation.header()) is None


def test_more_memory_than_there_is_is_refused_with_a_sentence():
    book = Book()
    Worker(book, 0)
    with pytest.raises(InfrastructureError, match="MiB are available"):
        book.reserve(0, 0, 1 << 50)


def test_a_worker_that_publishes_what_it_did_not_write_is_refused():
    book = Book()
    worker = Worker(book, 0)
    slot = worker.write(1)
    with pytest.raises(ProtocolError, match="does not hold step 2"):
        book.publish(0, slot, worker.id(2), to_storage=False)
    with pytest.raises(ProtocolError, match="no generation 7"):
        book.publish(0, 7, worker.id(1), to_storage=False)


def test_the_saver_leaves_after_the_linger_time_and_then_takes_no_more_connections():
    book = Book()
    with book.connection():
        Worker(book, 0).leave()
    book.wait_until_idle(0.0)
    with pytest.raises(SaverGoneError), book.connection():
        pass


def test_the_saver_leaves_when_it_is_stopped():
    book = Book()
    with book.connection():
        book.stop()
        book.wait_until_idle(1000.0)


# ---- worlds that end


def leave(worker, *, goodbye=False):
    worker.book.detach(worker.rank, worker.owner, goodbye=goodbye)


def broken_world(*last):
    """A book whose ranks have saved up to these steps and then died."""
    book = Book()
    ranks = tuple(range(len(last)))
    workers = [Worker(book, rank, ranks, stores=True) for rank in ranks]
    for worker, newest in zip(workers, last, strict=True):
        for step in range(1, newest + 1):
            worker.save(step)
    for worker in workers:
        leave(worker)
    return book, workers


def test_what_is_in_memory_stays_until_it_is_decided():
    book, old = broken_world(3, 2)
    ended = book.breaks.next()
    held = {rank: sorted(save.step for save in saves) for rank, saves in ended.saves.items()}
    assert held == {0: [2, 3], 1: [1, 2]}
    new = [Worker(book, rank, (0, 1), session=2) for rank in range(2)]
    for worker in new:
        book.keep(worker.rank, old[0].id(2))
    saving = threading.Thread(target=new[0].save, args=(3,))
    saving.start()
    assert book.breaks.pause(ended, 5.0), "the savers hear that the memory is wanted"
    book.breaks.finish(ended)
    saving.join(5)
    assert new[0].steps == [2, 3]
    assert new[1].steps == [2], "what the new world does not continue from is given up at last"


def test_the_step_is_persisted_and_the_other_memory_is_free():
    book, old = broken_world(3, 2)
    ended = book.breaks.next()
    storing = threading.Thread(target=book.breaks.store, args=(ended, old[0].id(2), (0, 1)))
    storing.start()
    task = book.tasks.next()
    assert (task.step, sorted(book.tasks.sources(task))) == (2, [0, 1])
    new = Worker(book, 0, (0, 1), session=2)
    new.save(3)
    new.save(4)
    assert [h.save.step for h in book.look() if h.rank == 0 and h.save.session == 1] == [2], (
        "it is not overwritten"
    )
    assert storing.is_alive()
    book.tasks.finish(task, "")
    storing.join(5)
    book.breaks.finish(ended)
    assert not any(slot.pinned for m in book._ranks.memories.values() for slot in m.slots)


def test_a_step_that_was_asked_for_but_is_not_complete_elsewhere_is_given_up():
    book = Book()
    worker = Worker(book, 0, (0,), stores=True)
    worker.save(1)
    worker.save(2, to_storage=True)
    task = book.tasks.next()
    leave(worker)
    ended = book.breaks.next()
    storing = threading.Thread(target=book.breaks.store, args=(ended, worker.id(1), (0,)))
    storing.start()
    with pytest.raises(Exception, match="Step 2 was not stored: its world ended"):
        book.tasks.pause(task, 5.0, yielding=False)
    book.tasks.finish(task, task.given_up)
    task = book.tasks.next()
    assert task.step == 1
    book.tasks.finish(task, "")
    storing.join(5)
    assert not storing.is_alive()


@pytest.mark.parametrize(("asked", "goodbye"), [(False, False), (True, True)])
def test_nothing_happens_without_being_asked_or_after_a_goodbye(asked, goodbye):
    book = Book()
    worker = Worker(book, 0, stores=asked)
    worker.save(1)
    leave(worker, goodbye=goodbye)
    assert not book.breaks.pending


def test_the_same_world_is_not_asked_twice_about_the_same_step():
    book, _ = broken_world(3)
    book.breaks.finish(book.breaks.next())
    again = Worker(book, 0, stores=True)
    leave(again)
    assert not book.breaks.pending


def test_a_predecessor_whose_end_was_not_heard_of_counts_as_ended():
    book = Book()
    worker = Worker(book, 0, stores=True)
    book._ranks.memories[0].pid = 2**22 + 1  # no such process
    worker.save(1)
    Worker(book, 0, session=2)
    assert book.breaks.pending


def test_savers_that_do_not_answer_are_not_waited_for_longer(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrover.checkpoint.saver.breakpoint.VOTE_PATIENCE", 0.1)
    book = Book()
    joined = Join(5, 2, (0,), save_at_breakpoint=True)
    _, owner, _ = book.attach(0, 1)
    book.join(0, joined)
    book.detach(0, owner, goodbye=False)
    ended = book.breaks.next()
    Breakpoints(open_store(tmp_path), book.breaks, 1)._carry_out(ended)
    assert list(tmp_path.iterdir()) == []


def test_a_lost_node_has_its_part_stored_from_its_replica(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrover.checkpoint.saver.breakpoint.VOTE_PATIENCE", 0.1)
    book = Book()
    own = Worker(book, 0, (0,), stores=True, size=2)
    replica = Worker(book, 1, (0, 1))
    for worker in (replica, own):
        worker.save(3)
    replica.leave()
    leave(own)
    ended = book.breaks.next()
    voting = threading.Thread(
        target=Breakpoints(open_store(tmp_path), book.breaks, 1)._carry_out, args=(ended,)
    )
    voting.start()
    task = book.tasks.next()
    assert (task.step, task.ranks) == (3, (0, 1))
    assert sorted(book.tasks.sources(task)) == [0, 1]
    book.tasks.finish(task, "")
    voting.join(5)
    assert list(tmp_path.iterdir()) == []


def test_what_a_rank_left_is_not_written_over_before_its_peers_have_ended():
    book = Book()
    old = [Worker(book, rank, (0, 1), stores=True) for rank in range(2)]
    for worker in old:
        worker.save(1)
    leave(old[0])
    new = Worker(book, 0, (0, 1), session=2)
    for step in (5, 6):
        new.save(step)
    assert new.steps == [1, 6]
    leave(old[1])
    assert book.breaks.next().saves == {0: (old[0].id(1),), 1: (old[1].id(1),)}


def test_other_nodes_do_not_hold_up_a_training_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrover.checkpoint.saver.saver.STARVING_PATIENCE", 0.2)
    with protocol.new_socket() as listener:
        saver = Saver(
            open_store(tmp_path), storage.identity(open_store(tmp_path)), KeepLast(2), 1.0, listener
        )
        worker = Worker(saver._book, 0, (0,), size=2)
        for step in (1, 2):
            worker.save(step, to_storage=True)
        saving = threading.Thread(target=worker.save, args=(3,))
        saving.start()
        task = saver._book.tasks.next()
        problem = saver._store_task(task)
        assert "other nodes did not store their parts within 0.2 s" in problem
        saver._book.tasks.finish(task, problem)
        saving.join(5)
        assert worker.steps == [2, 3]


def test_a_generation_without_its_memory_is_not_granted():
    book = Book()
    worker = Worker(book, 0, generations=3)
    assert book.begin(0, 1, ready=0) == 0, "none is there yet: wait for the first"
    assert worker.steps == []
    worker.save(1)
    assert book.begin(0, 2, ready=1) == 1, "the only one holds the newest step"
    assert worker.steps == [1]
    worker.save(2)
    assert book.begin(0, 3, ready=2) == 0, "the third one is not waited for"
    assert worker.steps == [2]
