import os
import threading

import msgspec
import pytest

from dlrover.checkpoint.engine import joining
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import TensorSpec
from dlrover.checkpoint.machine.policies import KeepLast
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import memory, protocol
from dlrover.checkpoint.saver.breakpoint import Ballot, Breakpoints, Vote
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.saver.protocol import Commit, JoinSaver, SaverGoneError
from dlrover.checkpoint.saver.saver import Saver
from dlrover.checkpoint.saver.state import SaverState
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import open_store
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError
from tests.waiting import until

ENTRIES = layouts.place([TensorSpec(("a",), "uint8", (8,), None)], [0])
PACKED = layouts.packed(msgspec.Raw(msgspec.msgpack.encode(ENTRIES)), b"\x80", (8, 1, 0))
HERE = os.getpid()


class Worker:
    """One rank, without a process."""

    def __init__(
        self,
        saver_state: SaverState,
        rank: int,
        world: tuple[int, ...] = (0,),
        session: int = 1,
        *,
        stores=False,
        size=0,
        generations=2,
    ):
        self.saver_state, self.rank, self.session, self.size = (
            saver_state,
            rank,
            session,
            size or len(world),
        )
        _, self.owner, fds = saver_state.attach(rank, HERE)
        self.fds = fds[:generations]
        for _ in fds[generations:]:
            saver_state._ranks.drop_last(saver_state._ranks.memories[rank])
        saver_state.join(rank, JoinSaver(session, self.size, world, save_at_breakpoint=stores))

    def id(self, step: int, number: int = 0) -> SaveId:
        return SaveId(0, number or step, step, self.session)

    def write(self, step: int, number: int = 0) -> int:
        save = self.id(step, number)
        slot = self.saver_state.begin(self.rank, save)
        os.ftruncate(self.fds[slot], memory.capacity_for(PACKED))
        Generation(self.fds[slot]).seal(PACKED, rank=self.rank, world_size=self.size, save=save)
        return slot

    def save(self, step: int, number: int = 0, *, to_storage: bool = False) -> int:
        slot = self.write(step, number)
        self.saver_state.commit(self.rank, Commit(slot, self.id(step, number), to_storage))
        return slot

    def leave(self) -> None:
        self.saver_state.detach(self.rank, self.owner)

    @property
    def steps(self) -> list[int]:
        return sorted(held.save.step for held in self.saver_state.look() if held.rank == self.rank)


def test_the_last_two_steps_are_held():
    worker = Worker(SaverState(), 0)
    for step in range(5):
        worker.save(step)
    assert worker.steps == [3, 4]


def test_an_unfinished_save_costs_the_older_step_only():
    worker = Worker(SaverState(), 0)
    worker.save(1)
    worker.save(2)
    worker.write(3)
    assert worker.steps == [2]


def test_what_is_to_be_persisted_is_not_written():
    worker = Worker(SaverState(), 0)
    pinned = worker.save(1, to_storage=True)
    assert {worker.save(step) for step in range(2, 6)} == {1 - pinned}
    assert worker.steps == [1, 5]


def test_two_generations_are_written_in_turn_while_a_third_is_persisted():
    worker = Worker(SaverState(), 0, generations=3)
    worker.save(1, to_storage=True)
    for step in range(2, 6):
        worker.save(step)
    assert worker.steps == [1, 4, 5]


def test_the_newest_save_is_not_overwritten_while_both_others_are_to_be_persisted():
    """A process that is killed while it writes must lose one save, not all since the last one for the storage."""
    saver_state = SaverState()
    worker = Worker(saver_state, 0, generations=3)
    worker.save(1, to_storage=True)
    worker.save(2, to_storage=True)
    worker.save(3)
    saving = threading.Thread(target=worker.save, args=(4,))
    saving.start()
    task = saver_state.tasks.next()
    assert saver_state.tasks.pause(task, 5.0, yielding=True), "the task's memory is wanted"
    assert worker.steps == [1, 2, 3]
    saver_state.tasks.finish(task, "")
    saving.join(5)
    assert worker.steps == [2, 3, 4]


def test_a_save_waits_while_both_generations_are_to_be_persisted():
    saver_state = SaverState()
    worker = Worker(saver_state, 0)
    worker.save(1, to_storage=True)
    worker.save(2, to_storage=True)
    saving = threading.Thread(target=worker.save, args=(3,))
    saving.start()
    task = saver_state.tasks.next()
    assert task.step == 1
    assert saver_state.tasks.pause(task, 5.0, yielding=True), (
        "the task hears that its memory is wanted"
    )
    assert worker.steps == [1, 2]
    saver_state.tasks.finish(task, "")
    saving.join(5)
    assert worker.steps == [2, 3]


def test_a_step_is_persisted_when_all_ranks_have_committed_it():
    saver_state = SaverState()
    workers = [Worker(saver_state, rank, (0, 1)) for rank in range(2)]
    workers[0].save(1, to_storage=True)
    assert not any(task.complete for task in saver_state.tasks._tasks.values())
    workers[1].save(1, to_storage=True)
    task = saver_state.tasks.next()
    assert sorted(saver_state.tasks.sources(task)) == [0, 1]


def test_a_step_that_a_rank_cannot_commit_any_more_fails():
    saver_state = SaverState()
    workers = [Worker(saver_state, rank, (0, 1)) for rank in range(2)]
    workers[0].save(1, to_storage=True)
    workers[1].leave()
    assert saver_state.settled(0) == ("Step 1 was not stored: rank 1 ended before.",)
    assert saver_state.settled(0) == ()


def saved_twice(*saves: int) -> tuple[SaverState, list[Worker]]:
    """A state whose ranks have each saved step 1 that often, for the storage."""
    saver_state = SaverState()
    ranks = tuple(range(len(saves)))
    workers = [Worker(saver_state, rank, ranks, generations=3) for rank in ranks]
    for worker, count in zip(workers, saves, strict=True):
        for number in range(1, count + 1):
            worker.save(1, number, to_storage=True)
    return saver_state, workers


def stored(saver_state: SaverState) -> list[tuple[int, ...]]:
    """Persist what there is; of each task the numbers of the saves that the ranks' parts are of."""
    found = []
    while saver_state.tasks.ready:
        task = saver_state.tasks.next()
        found.append(tuple(task.slots[rank].saved.number for rank in task.ranks))
        saver_state.tasks.sources(task)
        saver_state.tasks.finish(task, "")
    return found


def pins(saver_state: SaverState) -> int:
    return sum(slot.pins for mine in saver_state._ranks.memories.values() for slot in mine.slots)


def test_each_save_of_a_step_is_persisted_by_itself_and_the_last_one_last():
    saver_state, _ = saved_twice(2, 2)
    assert stored(saver_state) == [(1, 1), (2, 2)]
    assert [saver_state.settled(rank) for rank in range(2)] == [(), ()]
    assert pins(saver_state) == 0


@pytest.mark.parametrize("dies_first", [True, False])
def test_a_second_save_that_a_rank_did_not_live_to_make_is_given_up(dies_first):
    saver_state, workers = saved_twice(1 if dies_first else 2, 1)
    workers[1].leave()
    if dies_first:
        workers[0].save(1, 2, to_storage=True)
    assert stored(saver_state) == [(1, 1)]
    (problem,) = saver_state.settled(0)
    assert problem.startswith("Step 1 was not stored: rank 1 ended before.")
    assert pins(saver_state) == 0


def test_a_rank_that_is_a_save_behind_still_has_one_in_common():
    saver_state, _ = saved_twice(2, 1)
    held = {(held.rank, held.save.number) for held in saver_state.look()}
    assert held == {(0, 1), (0, 2), (1, 1)}


@pytest.mark.parametrize("first", [0, 1])
def test_a_save_that_one_rank_passed_over_holds_up_nothing(first):
    saver_state, workers = saved_twice(0, 0)
    save = workers[0].id(1)
    steps = [
        lambda: workers[0].save(1, to_storage=True),
        lambda: saver_state.pass_over(1, save, written=False),
    ]
    for step in steps if first == 0 else steps[::-1]:
        step()
    assert saver_state.settled(0) == ("Step 1 was not stored: rank 1 did not save it.",)
    assert pins(saver_state) == 0
    for worker in workers:
        worker.save(2, to_storage=True)
    assert stored(saver_state) == [(2, 2)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_part_that_its_worker_writes_itself_is_not_waited_for(first):
    saver_state, workers = saved_twice(0, 0)
    save = workers[0].id(1)
    steps = [
        lambda: workers[0].save(1, to_storage=True),
        lambda: saver_state.pass_over(1, save, written=True),
    ]
    for step in steps if first == 0 else steps[::-1]:
        step()
    task = saver_state.tasks.next()
    assert list(saver_state.tasks.sources(task)) == [0]
    saver_state.tasks.finish(task, "")
    assert saver_state.settled(0) == ()
    saver_state.pass_over(0, workers[0].id(2), written=True)
    saver_state.pass_over(1, workers[0].id(2), written=True)
    assert not saver_state.tasks._tasks


def test_ranks_that_do_not_make_the_same_saves_are_told_at_once():
    _, workers = saved_twice(0, 0)
    workers[0].save(1)
    workers[0].save(2)
    workers[1].save(1)
    with pytest.raises(ConfigurationError, match="saves step 3 where rank 0 has saved step 2"):
        workers[1].save(3, 2)


def test_a_step_that_was_gone_back_to_is_newer_than_what_was_abandoned():
    worker = Worker(SaverState(), 0)
    for step in (1, 2):
        worker.save(step)
    worker.save(1, 3)
    assert worker.steps == [1, 2]
    worker.save(2, 4)
    assert {(held.save.step, held.save.number) for held in worker.saver_state.look()} == {
        (1, 3),
        (2, 4),
    }


def test_a_saver_says_what_the_newest_save_was_that_it_has_seen():
    saver_state, _ = saved_twice(2, 1)
    attached, *_ = saver_state.attach(2, HERE)
    assert attached.newest.number == 2


def test_storage_that_fails_is_told_once_and_so_is_its_return():
    saver_state = SaverState()
    workers = [Worker(saver_state, rank, (0, 1), generations=3) for rank in range(2)]
    told = []
    for step, problem in enumerate(["", "It is full.", "It is full.", "", ""], 1):
        for worker in workers:
            worker.save(step, to_storage=True)
        saver_state.tasks.finish(saver_state.tasks.next(), problem)
        told += [(step, rank, news) for rank in range(2) if (news := saver_state.news(rank))]
    assert told == [
        (2, 0, "It is full. Training goes on, and later steps are tried."),
        (4, 0, "Step 4 was stored: the storage takes steps again."),
    ]
    assert saver_state.settled(1) == ("It is full.", "It is full.")


def test_a_new_world_drops_what_the_old_one_left_half_done():
    saver_state = SaverState()
    old = [Worker(saver_state, rank, (0, 1)) for rank in range(2)]
    old[0].save(1, to_storage=True)
    old[0].leave()
    new = Worker(saver_state, 0, (0,), session=2)
    assert not saver_state.tasks._tasks
    assert not any(slot.pinned for slot in saver_state._ranks.memories[0].slots)
    assert new.steps == [1], "but may load it"


def test_a_world_that_did_not_load_gives_up_the_memory_of_the_old_one():
    saver_state = SaverState()
    old = Worker(saver_state, 0)
    old.save(100)
    old.save(101)
    old.leave()
    new = Worker(saver_state, 0, session=2)
    new.save(1)
    assert new.steps == [1]


def test_the_step_that_was_loaded_is_kept_until_two_others_are_there():
    saver_state = SaverState()
    old = Worker(saver_state, 0)
    kept = old.save(100)
    old.save(101)
    old.leave()
    new = Worker(saver_state, 0, session=2)
    saver_state.keep(0, old.id(100))
    assert new.steps == [100]
    assert new.save(101) != kept
    assert new.steps == [100, 101]
    assert new.save(102) == kept
    assert new.steps == [101, 102]


def test_the_step_of_a_larger_world_is_kept_whole_until_the_second_save():
    saver_state = SaverState()
    old = [Worker(saver_state, rank, (0, 1)) for rank in range(2)]
    for worker in old:
        worker.save(100)
        worker.leave()
    new = Worker(saver_state, 0, (0,), session=2)
    saver_state.keep(0, old[0].id(100))
    new.save(101)
    assert [(held.rank, held.save.step) for held in saver_state.look()] == [
        (0, 100),
        (0, 101),
        (1, 100),
    ]
    new.save(102)
    assert [(held.rank, held.save.step) for held in saver_state.look()] == [(0, 102), (0, 101)]
    with pytest.raises(InfrastructureError, match="Nothing of rank 1"):
        saver_state.open(1)


def test_two_processes_cannot_be_the_same_rank(monkeypatch):
    monkeypatch.setattr("dlrover.checkpoint.saver.state.PREDECESSOR_WAIT", 0.1)
    saver_state = SaverState()
    Worker(saver_state, 0)
    with pytest.raises(InfrastructureError, match="two jobs cannot share"):
        saver_state.attach(0, HERE)


def test_a_process_that_is_gone_does_not_keep_its_rank():
    saver_state = SaverState()
    _, first, _ = saver_state.attach(0, 2**22 + 1)  # no such process
    _, second, _ = saver_state.attach(0, HERE)
    saver_state.detach(0, first)
    assert saver_state._ranks.memories[0].owner == second


def test_a_flipped_bit_is_found_when_the_sums_are_known():
    saver_state = SaverState()
    worker = Worker(saver_state, 0)
    slot = worker.save(1)
    saver_state.sums.compute_next()
    assert saver_state.verify(0, slot) == ""
    Generation(worker.fds[slot]).data[3] ^= 1
    assert "The tensor a of step 1 in memory is damaged" in saver_state.verify(0, slot)


def test_sums_of_memory_that_is_written_again_are_not_stored():
    saver_state = SaverState()
    worker = Worker(saver_state, 0)
    worker.save(1)
    worker.save(2)
    slot = worker.write(3)
    saver_state.sums.compute_next()
    generation = Generation(worker.fds[slot])
    assert generation.sums(generation.header()) is None


def test_more_memory_than_there_is_is_refused_with_a_sentence():
    saver_state = SaverState()
    Worker(saver_state, 0)
    with pytest.raises(InfrastructureError, match="MiB are available"):
        saver_state.reserve(0, 0, 1 << 50)


def test_a_worker_that_commits_what_it_did_not_write_is_refused():
    saver_state = SaverState()
    worker = Worker(saver_state, 0)
    slot = worker.write(1)
    with pytest.raises(ProtocolError, match="does not hold step 2"):
        saver_state.commit(0, Commit(slot, worker.id(2), False))
    with pytest.raises(ProtocolError, match="no generation 7"):
        saver_state.commit(0, Commit(7, worker.id(1), False))


def test_the_saver_leaves_after_the_linger_time_and_then_takes_no_more_connections():
    saver_state = SaverState()
    with saver_state.connection():
        Worker(saver_state, 0).leave()
    saver_state.wait_until_idle(0.0)
    with pytest.raises(SaverGoneError), saver_state.connection():
        pass


def test_the_saver_leaves_when_it_is_stopped():
    saver_state = SaverState()
    with saver_state.connection():
        saver_state.stop()
        saver_state.wait_until_idle(1000.0)


@pytest.mark.parametrize("running", [True, False])
def test_a_step_whose_worker_on_another_node_is_gone_is_given_up_once_the_next_world_begins(
    running,
):
    """Before, its saver waited up to 600 s for that part, 30 s if the new world needed the memory, and stored nothing else."""
    one, other = SaverState(), SaverState()
    sees, dies = Worker(one, 0, size=2), Worker(other, 1, (1,), size=2)
    for worker in (sees, dies):
        worker.save(1, to_storage=True)
        worker.saver_state.tasks.finish(worker.saver_state.tasks.next(), "")
    sees.save(2, to_storage=True)
    task = one.tasks.next() if running else one.tasks.find(sees.id(2))
    for worker in (sees, dies):
        worker.leave()
    ended = [state.attach(rank, HERE)[0].ended for rank, state in enumerate((one, other))]
    assert [worker.number for worker in ended] == [2, 1]
    one.join(0, JoinSaver(2, 2, (0,), ended=joining._first_to_end(ended)))
    problem = "Step 2 was not stored: rank 1 ended before."
    if running:
        with pytest.raises(InfrastructureError, match=problem):
            one.tasks.pause(task, 30.0, yielding=False)
        one.tasks.finish(task, problem)
    assert task.group.problems == [problem]
    assert not one.tasks.ready


def test_a_step_that_all_workers_of_an_ended_world_have_saved_is_stored():
    one, other = SaverState(), SaverState()
    for worker in (Worker(one, 0, size=2), Worker(other, 1, (1,), size=2)):
        worker.save(1, to_storage=True)
        worker.leave()
    for _attempt in range(2):  # the first one ends before it has joined
        ended = [state.attach(rank, HERE)[0].ended for rank, state in enumerate((one, other))]
        for rank, state in enumerate((one, other)):
            state.detach(rank, state._ranks.memories[rank].owner, goodbye=False)
    for rank, state in enumerate((one, other)):
        state.attach(rank, HERE)
        state.join(rank, JoinSaver(2, 2, (rank,), ended=joining._first_to_end(ended)))
        assert state.tasks.next().step == 1


# ---- worlds that end


def leave(worker, *, goodbye=False):
    worker.saver_state.detach(worker.rank, worker.owner, goodbye=goodbye)


def broken_world(*last):
    """A state whose ranks have saved up to these steps and then died."""
    saver_state = SaverState()
    ranks = tuple(range(len(last)))
    workers = [Worker(saver_state, rank, ranks, stores=True) for rank in ranks]
    for worker, newest in zip(workers, last, strict=True):
        for step in range(1, newest + 1):
            worker.save(step)
    for worker in workers:
        leave(worker)
    return saver_state, workers


def test_what_is_in_memory_stays_until_it_is_decided():
    saver_state, old = broken_world(3, 2)
    ended = saver_state.breaks.next()
    held = {rank: sorted(save.step for save in saves) for rank, saves in ended.saves.items()}
    assert held == {0: [2, 3], 1: [1, 2]}
    new = [Worker(saver_state, rank, (0, 1), session=2) for rank in range(2)]
    for worker in new:
        saver_state.keep(worker.rank, old[0].id(2))
    saving = threading.Thread(target=new[0].save, args=(3,))
    saving.start()
    assert saver_state.breaks.pause(ended, 5.0), "the savers hear that the memory is wanted"
    saver_state.breaks.finish(ended)
    saving.join(5)
    assert new[0].steps == [2, 3]
    assert new[1].steps == [2], "what the new world does not continue from is given up at last"


def test_the_step_is_persisted_and_the_other_memory_is_free():
    saver_state, old = broken_world(3, 2)
    ended = saver_state.breaks.next()
    storing = threading.Thread(target=saver_state.breaks.store, args=(ended, old[0].id(2), (0, 1)))
    storing.start()
    task = saver_state.tasks.next()
    assert (task.step, sorted(saver_state.tasks.sources(task))) == (2, [0, 1])
    new = Worker(saver_state, 0, (0, 1), session=2)
    new.save(3)
    new.save(4)
    assert [h.save.step for h in saver_state.look() if h.rank == 0 and h.save.session == 1] == [
        2
    ], "it is not overwritten"
    assert storing.is_alive()
    saver_state.tasks.finish(task, "")
    storing.join(5)
    saver_state.breaks.finish(ended)
    assert not any(slot.pinned for m in saver_state._ranks.memories.values() for slot in m.slots)


def test_a_step_that_was_asked_for_but_is_not_complete_elsewhere_is_given_up():
    saver_state = SaverState()
    worker = Worker(saver_state, 0, (0,), stores=True)
    worker.save(1)
    worker.save(2, to_storage=True)
    task = saver_state.tasks.next()
    leave(worker)
    ended = saver_state.breaks.next()
    storing = threading.Thread(target=saver_state.breaks.store, args=(ended, worker.id(1), (0,)))
    storing.start()
    with pytest.raises(Exception, match="Step 2 was not stored: its world ended"):
        saver_state.tasks.pause(task, 5.0, yielding=False)
    saver_state.tasks.finish(task, task.given_up)
    task = saver_state.tasks.next()
    assert task.step == 1
    saver_state.tasks.finish(task, "")
    storing.join(5)
    assert not storing.is_alive()


@pytest.mark.parametrize(("asked", "goodbye"), [(False, False), (True, True)])
def test_nothing_happens_without_being_asked_or_after_a_goodbye(asked, goodbye):
    saver_state = SaverState()
    worker = Worker(saver_state, 0, stores=asked)
    worker.save(1)
    leave(worker, goodbye=goodbye)
    assert not saver_state.breaks.pending


@pytest.mark.parametrize("goodbye", [False, True])
def test_what_is_in_memory_when_a_node_is_to_leave_is_stored_once_the_workers_end(goodbye):
    saver_state = SaverState()
    worker = Worker(saver_state, 0)
    worker.save(1)
    saver_state.store_at_end()
    worker.save(2)
    assert not saver_state.breaks.pending, "it goes on until it is stopped"
    leave(worker, goodbye=goodbye)
    ended = saver_state.breaks.next()
    assert ended.saves == {0: (worker.id(1), worker.id(2))}
    saver_state.breaks.finish(ended)
    saver_state.store_at_end()
    assert not saver_state.breaks.pending, "once is enough"


def test_workers_that_have_ended_when_a_node_is_to_leave_are_stored_at_once():
    saver_state = SaverState()
    saver_state.store_at_end()
    worker = Worker(saver_state, 0)
    worker.save(1)
    leave(worker)
    assert not saver_state.breaks.pending
    saver_state.store_at_end()
    assert saver_state.breaks.pending
    again = Worker(saver_state, 0, session=2)
    saver_state.breaks.finish(saver_state.breaks.next())
    again.save(1)
    leave(again)
    assert not saver_state.breaks.pending, "it was for that world alone"


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_world_that_has_saved_nothing_yet_stores_what_it_goes_on_from(loaded, size):
    saver_state = SaverState()
    before = Worker(saver_state, 0)
    before.save(1)
    leave(before)
    after = Worker(saver_state, 0, session=2, size=size)
    if loaded:
        saver_state.keep(0, before.id(1))
    saver_state.store_at_end()
    leave(after)
    ended = saver_state.breaks.next()
    kept = (before.id(1),) if size == 1 else ()
    assert ended.saves == {0: kept}, "only a step of as many ranks is whole"
    if kept:
        storing = threading.Thread(target=saver_state.breaks.store, args=(ended, *kept, (0,)))
        storing.start()
        task = saver_state.tasks.next()
        assert (task.save, task.world_size) == (before.id(1), 1)
        saver_state.tasks.finish(task, "")
        storing.join(5)
        assert not storing.is_alive()
    saver_state.breaks.finish(ended)
    assert not any(slot.pinned for m in saver_state._ranks.memories.values() for slot in m.slots)


def test_the_same_world_is_not_asked_twice_about_the_same_step():
    saver_state, _ = broken_world(3)
    saver_state.breaks.finish(saver_state.breaks.next())
    again = Worker(saver_state, 0, stores=True)
    leave(again)
    assert not saver_state.breaks.pending


def test_a_predecessor_whose_end_was_not_heard_of_counts_as_ended():
    saver_state = SaverState()
    worker = Worker(saver_state, 0, stores=True)
    saver_state._ranks.memories[0].pid = 2**22 + 1  # no such process
    worker.save(1)
    Worker(saver_state, 0, session=2)
    assert saver_state.breaks.pending


def test_savers_that_do_not_answer_are_not_waited_for_longer(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrover.checkpoint.saver.breakpoint.VOTE_PATIENCE", 0.1)
    saver_state = SaverState()
    joined = JoinSaver(5, 2, (0,), save_at_breakpoint=True)
    _, owner, _ = saver_state.attach(0, 1)
    saver_state.join(0, joined)
    saver_state.detach(0, owner, goodbye=False)
    ended = saver_state.breaks.next()
    Breakpoints(open_store(tmp_path), saver_state.breaks, 1)._carry_out(ended)
    assert list(tmp_path.iterdir()) == []


def test_savers_of_lost_nodes_are_not_waited_for_as_long(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrover.checkpoint.saver.breakpoint.PARTIAL_PATIENCE", 0.1)
    saver_state = SaverState()
    own = Worker(saver_state, 0, (0,), size=2)
    own.save(3)
    leave(own)
    saver_state.store_at_end(60.0, partial=True)
    ended = saver_state.breaks.next()
    Breakpoints(open_store(tmp_path), saver_state.breaks, 1)._carry_out(ended)
    assert ended.problem == "The savers of some ranks do not answer."


def test_savers_of_nodes_whose_workers_take_long_to_end_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrover.checkpoint.saver.breakpoint.VOTE_PATIENCE", 0.0)
    saver_state = SaverState()
    own = Worker(saver_state, 0, (0,), size=2)
    own.save(3)
    saver_state.store_at_end(60.0)
    leave(own)
    ended = saver_state.breaks.next()
    store = open_store(tmp_path)
    voting = threading.Thread(
        target=Breakpoints(store, saver_state.breaks, 1)._carry_out, args=(ended,), daemon=True
    )
    voting.start()
    until(lambda: [*tmp_path.rglob("*.vote")], 5)
    held = {1: ended.saves[0]}
    Ballot(store, ended.group.joined.session).cast(Vote(2, (1,), held, None))
    until(lambda: saver_state.tasks.ready, 5)
    saver_state.tasks.finish(saver_state.tasks.next(), "")
    voting.join(5)
    assert not voting.is_alive()


def test_a_lost_node_has_its_part_stored_from_its_replica(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrover.checkpoint.saver.breakpoint.VOTE_PATIENCE", 0.1)
    saver_state = SaverState()
    own = Worker(saver_state, 0, (0,), stores=True, size=2)
    replica = Worker(saver_state, 1, (0, 1))
    for worker in (replica, own):
        worker.save(3)
    replica.leave()
    leave(own)
    ended = saver_state.breaks.next()
    voting = threading.Thread(
        target=Breakpoints(open_store(tmp_path), saver_state.breaks, 1)._carry_out, args=(ended,)
    )
    voting.start()
    task = saver_state.tasks.next()
    assert (task.step, task.ranks) == (3, (0, 1))
    assert sorted(saver_state.tasks.sources(task)) == [0, 1]
    saver_state.tasks.finish(task, "")
    voting.join(5)
    assert list(tmp_path.iterdir()) == []


def test_what_a_rank_left_is_not_written_over_before_its_peers_have_ended():
    saver_state = SaverState()
    old = [Worker(saver_state, rank, (0, 1), stores=True) for rank in range(2)]
    for worker in old:
        worker.save(1)
    leave(old[0])
    new = Worker(saver_state, 0, (0, 1), session=2)
    for step in (5, 6):
        new.save(step)
    assert new.steps == [1, 6]
    leave(old[1])
    assert saver_state.breaks.next().saves == {0: (old[0].id(1),), 1: (old[1].id(1),)}


def voting(path) -> SaverState:
    """The state of a saver that votes and carries out what was decided."""
    saver_state = SaverState()
    breakpoints = Breakpoints(open_store(path), saver_state.breaks, saver_state.saver)
    threading.Thread(target=breakpoints.run, daemon=True).start()
    return saver_state


def at_end(saver_state: SaverState, *problems: str) -> protocol.SavedNow:
    """What the agent learns, if each task that there is ends with a problem or an empty text."""
    asking = threading.Thread(
        target=lambda: setattr(asking, "said", saver_state.stored_at_end()), daemon=True
    )
    asking.start()
    for problem in problems:
        saver_state.tasks.finish(saver_state.tasks.next(), problem)
    return told(asking)


def test_the_agent_learns_what_became_of_the_memory_of_workers_that_ended(tmp_path):
    saver_state = voting(tmp_path)
    nothing = protocol.SavedNow(-1, "")
    assert at_end(saver_state) == nothing, "no worker has joined"
    worker = Worker(saver_state, 0)
    saver_state.store_at_end()
    leave(worker)
    assert at_end(saver_state) == nothing, "nothing was saved"
    for session, problem in ((2, "The disk is full."), (3, "")):
        worker = Worker(saver_state, 0, session=session)
        worker.save(session)
        saver_state.store_at_end()
        leave(worker)
        said = protocol.SavedNow(-1 if problem else session, problem)
        assert at_end(saver_state, problem) == said
        assert at_end(saver_state) == said, "it is asked again"


@pytest.mark.parametrize("problem", ["", "The disk is full."])
def test_the_agent_learns_what_became_of_a_step_that_an_earlier_world_was_storing(
    tmp_path, problem
):
    saver_state = voting(tmp_path)
    before = Worker(saver_state, 0)
    before.save(1, to_storage=True)
    leave(before)
    after = Worker(saver_state, 0, session=2)
    saver_state.keep(0, before.id(1))
    saver_state.store_at_end()
    leave(after)
    until(lambda: [*tmp_path.rglob("*.vote")], 5)
    assert at_end(saver_state, problem) == protocol.SavedNow(-1 if problem else 1, problem)


def test_the_agent_learns_that_the_storage_takes_no_votes(tmp_path):
    (tmp_path / "file").touch()
    saver_state = voting(tmp_path / "file")
    worker = Worker(saver_state, 0)
    worker.save(1)
    saver_state.store_at_end()
    leave(worker)
    assert at_end(saver_state).problem == "The storage failed: Not a directory."


@pytest.mark.parametrize("answers", [False, True])
def test_the_agent_learns_why_nodes_store_nothing_together(tmp_path, monkeypatch, answers):
    monkeypatch.setattr("dlrover.checkpoint.saver.breakpoint.VOTE_PATIENCE", 0.1)
    nodes = [voting(tmp_path), voting(tmp_path)]
    if answers:
        monkeypatch.setattr("dlrover.checkpoint.saver.breakpoint.VOTE_PATIENCE", 30.0)
    workers = [Worker(node, rank, (rank,), size=2) for rank, node in enumerate(nodes)]
    for step, worker in enumerate(workers):
        worker.save(step + 1)
    for node, worker in list(zip(nodes, workers, strict=True))[: 1 + answers]:
        node.store_at_end()
        leave(worker)
    why = (
        "The ranks have no save in common."
        if answers
        else "The savers of some ranks do not answer."
    )
    assert at_end(nodes[0]) == protocol.SavedNow(-1, why)


def test_one_node_says_what_all_have_stored(tmp_path):
    nodes = [voting(tmp_path), voting(tmp_path)]
    for rank, node in enumerate(nodes):
        worker = Worker(node, rank, (rank,), size=2)
        worker.save(1)
        node.store_at_end()
        leave(worker)
    assert [at_end(node, "").step for node in nodes] == [1, -1]


def ask(saver_state: SaverState, number: str = "1") -> threading.Thread:
    """A user's request, on its way; its answer is the thread's ``said``."""
    asking = threading.Thread(
        target=lambda: setattr(asking, "said", saver_state.save_now(number)), daemon=True
    )
    asking.start()
    return asking


def told(asking: threading.Thread) -> protocol.SavedNow:
    asking.join(30)
    return asking.said  # type: ignore[attr-defined]


def test_what_a_user_asks_for_is_stored_while_the_training_goes_on(tmp_path):
    saver_state = voting(tmp_path)
    workers = [Worker(saver_state, rank, (0, 1), generations=3) for rank in range(2)]
    assert "nothing to memory yet" in told(ask(saver_state)).problem
    for worker in workers:
        worker.save(1)
    workers[0].save(2)
    workers[1].write(2)
    asking = ask(saver_state)
    task = saver_state.tasks.next()
    assert (task.step, sorted(task.slots)) == (1, [0, 1]), "the newest that both have"
    workers[0].save(3, to_storage=True)
    assert 1 in workers[0].steps, "it is not overwritten"
    saver_state.tasks.finish(task, "")
    assert told(asking) == protocol.SavedNow(1, "")
    assert saver_state.tasks.find(workers[0].id(3)) is not None, "what the program stores goes on"
    asking = ask(saver_state)
    assert told(asking) == protocol.SavedNow(1, ""), "it is stored already"
    for worker in workers:
        worker.save(4)
    asking = ask(saver_state)
    saver_state.tasks.finish(saver_state.tasks.next(), "The disk is full.")
    assert told(asking) == protocol.SavedNow(-1, "The disk is full.")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProtocolError, match="no number"):
        saver_state.save_now("../1")


def test_nodes_that_save_often_wait_for_a_save_in_common(tmp_path):
    nodes = [voting(tmp_path), voting(tmp_path)]
    early = Worker(nodes[0], 0, (0,), size=2, generations=3)
    late = Worker(nodes[1], 1, (1,), size=2)
    for step in (1, 2):
        early.save(step)
        late.save(step)
    first = ask(nodes[0])
    until(lambda: list(tmp_path.glob(".breakpoint.*/*.vote")), 30)
    early.save(3)
    for step in (3, 4):
        late.save(step)
    second = ask(nodes[1])
    for node in nodes:
        task = node.tasks.next()
        assert task.step == 3
        node.tasks.finish(task, "")
    assert told(first) == told(second) == protocol.SavedNow(3, "")
    assert not any(s.pinned for n in nodes for m in n._ranks.memories.values() for s in m.slots)


def test_other_nodes_do_not_hold_up_a_training_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrover.checkpoint.saver.saver.STARVING_PATIENCE", 0.2)
    with protocol.new_socket() as listener:
        saver = Saver(
            open_store(tmp_path), storage.identity(open_store(tmp_path)), KeepLast(2), 1.0, listener
        )
        worker = Worker(saver._state, 0, (0,), size=2)
        for step in (1, 2):
            worker.save(step, to_storage=True)
        saving = threading.Thread(target=worker.save, args=(3,))
        saving.start()
        task = saver._state.tasks.next()
        problem = saver._store_task(task)
        assert "other nodes did not store their parts within 0.2 s" in problem
        saver._state.tasks.finish(task, problem)
        saving.join(5)
        assert worker.steps == [2, 3]


@pytest.mark.torch
@pytest.mark.parametrize("again", ["request", "end of the world"])
def test_what_could_not_be_stored_on_request_is_stored_when_it_is_tried_again(tmp_path, again):
    store = open_store(tmp_path)
    with protocol.new_socket() as listener:
        saver = Saver(store, storage.identity(store), KeepLast(2), 1.0, listener)
        state = saver._state
        breakpoints = Breakpoints(store, state.breaks, state.saver)
        threading.Thread(target=breakpoints.run, daemon=True).start()
        worker = Worker(state, 0, stores=True)
        worker.save(1)
        asking = ask(state)
        task = state.tasks.next()
        saver._give_up(task)  # another node's disk is full
        problem = saver._store_task(task)
        state.tasks.finish(task, problem)
        assert told(asking) == protocol.SavedNow(
            -1, "Step 1 was not stored: another node gave it up."
        )
        if again == "request":
            asking = ask(state, "2")
        else:
            state.detach(0, worker.owner, goodbye=False)
        task = state.tasks.next()
        problem = saver._store_task(task)
        state.tasks.finish(task, problem)
        assert problem == ""
        assert again != "request" or told(asking) == protocol.SavedNow(1, "")
        assert storage.steps(store) == [1]


def test_a_generation_without_its_memory_is_not_granted():
    saver_state = SaverState()
    worker = Worker(saver_state, 0, generations=3)
    assert saver_state.begin(0, 1, ready=0) == 0, "none is there yet: wait for the first"
    assert worker.steps == []
    worker.save(1)
    assert saver_state.begin(0, 2, ready=1) == 1, "the only one holds the newest step"
    assert worker.steps == [1]
    worker.save(2)
    assert saver_state.begin(0, 3, ready=2) == 0, "the third one is not waited for"
    assert worker.steps == [2]
