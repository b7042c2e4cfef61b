"""A program that runs alone: reading, restoring, and what cannot be read."""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest

from dlrover import launched
from dlrover.data import client, records, services
from dlrover.data.records import Records
from dlrover.data.services import LocalService
from dlrover.errors import ConfigurationError, InfrastructureError, UserCodeError
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.shards import SettleShards, ShardReply, Span


class Rotten(list):
    """Records of which some cannot be read."""

    bad = frozenset({5, 77})

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError("rotten")
        return super().__getitem__(index)


@pytest.fixture(autouse=True)
def _no_threads_stay() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        assert thread.name != "dlrover-shards" or not thread.is_alive()


@pytest.fixture
def read() -> Iterator:
    """Makes data sets and closes them."""
    made = []

    def make(source=range(100), **options) -> Records:
        made.append(Records(source, **options))
        return made[-1]

    yield make
    for data in made:
        data.close()


def everything(data: Records) -> list:
    return [sample for _ in data.until_end() for sample in data]


def test_all_samples_of_all_epochs(read) -> None:
    data = read(epochs=2, shard=7)
    assert everything(data) == [*range(100), *range(100)]
    assert data.epoch == 2
    assert everything(data) == []


def test_each_epoch_is_shuffled_anew_and_every_time_in_the_same_way(read) -> None:
    first = everything(read(epochs=2, shuffle=True, seed=1))
    assert first == everything(read(epochs=2, shuffle=True, seed=1))
    assert first[:100] != first[100:]
    assert sorted(first[:100]) == sorted(first[100:]) == list(range(100))
    assert first != everything(read(epochs=2, shuffle=True, seed=2))


def test_the_incomplete_last_shard_can_be_left_out(read) -> None:
    assert everything(read(shard=30, drop_last=True)) == list(range(90))


def test_reading_goes_on_where_it_was_left(read) -> None:
    data = read(shard=10)
    for sample in data:
        if sample == 33:
            break
    assert list(data) == list(range(34, 100))


def test_a_restore_goes_on_behind_the_last_sample_that_was_handed_out(read) -> None:
    data = read(epochs=2, shuffle=True, shard=10)
    samples = iter(data)
    seen = Counter(next(samples) for _ in range(33))
    state = data.state_dict()
    for _ in range(20):
        next(samples)
    again = read(epochs=2, shuffle=True, shard=7)
    again.load_state_dict(state)
    seen.update(everything(again))
    assert seen == dict.fromkeys(range(100), 2)


def test_one_object_can_be_rolled_back(read) -> None:
    data = read(shard=10)
    samples = iter(data)
    head = [next(samples) for _ in range(12)]
    state = data.state_dict()
    next(samples)
    data.load_state_dict(state)
    assert [*head, *data] == list(range(100))


def test_a_loop_goes_on_from_the_checkpoint_that_is_restored_within_it(read) -> None:
    data = read(epochs=2, shard=10)
    learned: list[int] = []
    state, then, restores = data.state_dict(), list(learned), 2
    for _ in data.until_end():
        for sample in data:
            learned.append(sample)
            if len(learned) == 55:
                state, then = data.state_dict(), list(learned)
            elif len(learned) == 120 and restores:
                restores -= 1
                data.load_state_dict(state)
                learned = list(then)
                if restores:
                    break
    assert learned == [*range(100), *range(100)]


def packed(data: Records, most: int) -> Iterator[list[int]]:
    """Lists of samples whose sum is at most ``most``, as the documentation packs texts into sequences."""
    places: list[Span] = []
    sequence: list[int] = []
    for place, sample in data.read_ahead():
        if sum(sequence) + sample > most:
            data.acknowledge(places)
            yield sequence
            places, sequence = [], []
        places.append(place)
        sequence.append(sample)
    data.acknowledge(places)
    yield sequence
    data.end_epoch()


def test_samples_of_a_sequence_that_is_not_full_are_packed_again_after_a_restore(read) -> None:
    seen: list[int] = []
    data = read(epochs=2, shard=7)
    for stop in (3, 1, 8, 0, 1000):
        sequences = (sequence for _ in data.until_end() for sequence in packed(data, 99))
        for sequence in islice(sequences, stop):
            seen += sequence
        state, data = data.state_dict(), read(epochs=2, shard=7)
        data.load_state_dict(state)
    assert Counter(seen) == dict.fromkeys(range(100), 2)


def test_a_loop_that_reads_ahead_begins_with_what_the_last_one_has_not_acknowledged(read) -> None:
    data = read(shard=10)
    ahead = data.read_ahead()
    places = [next(ahead)[0] for _ in range(5)]
    data.acknowledge(places[:3])
    assert [sample for _, sample in data.read_ahead()] == list(range(3, 100))


def test_a_loop_within_a_loop_reads_the_rest_of_one_epoch(read) -> None:
    data = read(epochs=2, shard=10)
    seen = []
    for sample in data:
        seen += [sample, *data]
    assert seen == list(range(100))
    assert data.epoch == 1


def test_a_loop_that_is_left_behind_keeps_nothing_from_the_next(read) -> None:
    data = read(shard=50)
    loops = [iter(data) for _ in range(3)]
    seen = [next(loop) for _ in range(4) for loop in loops]
    assert [*seen, *data] == list(range(100))
    assert [list(loop) for loop in loops] == [[], [], []]
    assert data.epoch == 1


def test_threads_that_share_a_data_set_miss_no_epoch(read) -> None:
    data = read(epochs=3, shard=10)
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.extend(everything(data))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert Counter(seen) == dict.fromkeys(range(100), 3)
    assert data.epoch == 3


def test_samples_from_before_a_restore_are_not_counted_after_it(read) -> None:
    data = read()
    ahead = data.read_ahead()
    place, _ = next(ahead)
    data.load_state_dict(data.state_dict())
    with pytest.raises(ConfigurationError, match=r"loop that has ended; begin a new loop"):
        data.acknowledge([place])


def test_the_state_at_the_end_of_an_epoch_begins_the_next(read) -> None:
    data = read(epochs=2)
    list(data)
    again = read(epochs=2)
    again.load_state_dict(data.state_dict())
    assert [epoch for epoch in again.until_end() if list(again)] == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "other"}, "name 'other'; in the checkpoint it has 'data'"),
        ({"source": range(99)}, "size 99; in the checkpoint it has 100"),
        ({"shuffle": True}, "order 'shuffled with seed 0'; in the checkpoint"),
    ],
)
def test_the_state_of_another_data_set_is_refused(read, change, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(**change).load_state_dict(read().state_dict())


def test_a_second_data_set_of_a_name_is_refused_in_a_job(read, monkeypatch) -> None:
    """The master would take both for one: each would get what is left of the other."""
    master = LocalService()
    monkeypatch.setattr(services, "connect", lambda: master)
    monkeypatch.setattr(launched, "given", launched.Given(relay="a master"))
    monkeypatch.setattr(records, "_OPENED", {})
    taken = r"already opened a data set with the name data; make it once, with epochs= .* name=\.$"
    first = read()
    next(iter(first))
    for other in (read(), read(range(50))):
        with pytest.raises(ConfigurationError, match=taken):
            list(other)
    state = first.state_dict()
    first.close()
    with pytest.raises(ConfigurationError, match=taken):
        list(read())
    again = read()
    again.load_state_dict(state)
    assert list(again) == list(range(1, 100))
    assert len(list(read(name="another"))) == 100


def test_workers_that_describe_a_data_set_in_several_ways_are_at_fault(read, monkeypatch) -> None:
    """The next start would fail in the same way."""
    master = LocalService()
    monkeypatch.setattr(services, "connect", lambda: master)
    next(iter(read()))
    with pytest.raises(ConfigurationError, match="has size 99 here and 100 for the first worker"):
        list(read(range(99)))


def test_one_state_of_several_is_refused(read) -> None:
    state = {**read().state_dict(), "world_size": 4}
    with pytest.raises(ConfigurationError, match="saved by 4 ranks, and the state of 1"):
        read().load_state_dict(state)
    with pytest.raises(ConfigurationError, match="no state of a data set"):
        read().load_state_dict({"epoch": 3})
    for none in (None, "text", {**read().state_dict(), "version": 2}):
        with pytest.raises(ConfigurationError, match="no state of a data set"):
            read().load_state_dict(none)


def test_states_that_overlap_are_refused(read) -> None:
    data = read()
    next(iter(data))
    states = [{**data.state_dict(), "world_size": 2, "rank": rank} for rank in range(2)]
    with pytest.raises(InfrastructureError, match="Two ranks of this checkpoint have learned"):
        read().load_rank_states(states)
    assert records.acknowledged([data.state_dict()]).count == 1


def test_what_cannot_be_read_is_skipped_and_logged(read, caplog) -> None:
    caplog.set_level(logging.WARNING)
    data = read(Rotten(range(100)), epochs=2, shuffle=True)
    assert Counter(everything(data)) == {n: 2 for n in range(100) if n not in Rotten.bad}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert (
        sum("after 3 attempts" in line and "record 5: ValueError: rotten" in line for line in said)
        == 2
    )


def test_too_many_that_cannot_be_read_are_an_error(read) -> None:
    with pytest.raises(
        UserCodeError, match=r"2 samples .* more than max_skipped \(1\).*ValueError: rotten"
    ):
        list(read(Rotten(range(100)), max_skipped=1))


class Away(list):
    """Records of a source that is away from one of them on."""

    def __getitem__(self, index: int) -> int:
        if index >= 20:
            raise InfrastructureError("the table cannot be read")
        return super().__getitem__(index)


def test_a_source_that_is_away_costs_no_sample(read) -> None:
    data, got = read(Away(range(100))), []
    with pytest.raises(InfrastructureError, match="the table cannot be read"):
        got.extend(data)
    assert got == list(range(20))
    data.source = range(100)
    assert list(data) == list(range(20, 100))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_source_that_is_away_from_a_loader_costs_no_sample(num_workers: int) -> None:
    from dlrover.data import ElasticDataset

    with contextlib.closing(ElasticDataset(Away(range(100)))) as data:
        got: list[int] = []
        with pytest.raises(InfrastructureError, match=r"^the table cannot be read$"):
            got.extend(int(n) for batch in data.loader(8, num_workers=num_workers) for n in batch)
        assert got == list(range(16)), "the batch with record 20 is read again"
        data.source = range(100)
        got.extend(int(n) for batch in data.loader(8, num_workers=num_workers) for n in batch)
    assert got == list(range(100))


def test_endless_epochs_without_samples_are_refused(read) -> None:
    for source, options in ([], {}), (range(5), {"shard": 10, "drop_last": True}):
        with pytest.raises(ConfigurationError, match=r"has no samples: .* would never end"):
            read(source, epochs=0, **options)
        assert everything(read(source, epochs=2, **options)) == []


def test_wrong_arguments_are_refused(read) -> None:
    with pytest.raises(ConfigurationError, match=r"`int` >= 1 - at `\$.shard`"):
        read(shard=0)
    data = read()
    data.close()
    with pytest.raises(ConfigurationError, match="was closed"):
        next(iter(data))


def test_several_processes_without_a_master_are_refused(read, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="WORLD_SIZE is 2, and no DLRover master"):
        next(iter(read()))


def test_a_rank_on_its_way_to_survivors_takes_no_samples_from_them(read, monkeypatch) -> None:
    """It would not learn from them, nor would anybody else."""
    monkeypatch.setattr(launched, "given", launched.Given(survive=True, attempt=1))
    with pytest.raises(InfrastructureError, match=r"data set data, .*; all ranks start again\.$"):
        next(iter(read()))
    monkeypatch.setattr(launched, "call", 2)  # of a function that all call again
    assert len(everything(read())) == 100


def test_a_function_that_is_called_again_reads_anew_in_old_and_new_processes(read, monkeypatch):
    master = LocalService()
    monkeypatch.setattr(services, "connect", lambda: master)
    monkeypatch.setattr(records, "_LOADS", Counter())

    def restored(call: int, state: dict) -> Records:
        monkeypatch.setattr(launched, "call", call)
        data = read(shard=10)
        data.load_state_dict(state)
        return data

    first = read(shard=10)
    samples = iter(first)
    taken = [next(samples) for _ in range(15)]
    state = first.state_dict()
    old = restored(1, state)
    next(iter(old))
    again = restored(2, state)  # the second one that this process restores
    seen = [next(iter(again))]
    again.close()
    monkeypatch.setattr(records, "_LOADS", Counter())  # as in a process that is new
    seen += everything(restored(2, state))
    assert sorted(taken + seen) == list(range(100))


def test_parameter_servers_are_no_readers(read, monkeypatch) -> None:
    """Else the states of the workers alone would be an incomplete checkpoint."""
    place = {"RANK": "1", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    state = read().state_dict()
    assert (state["rank"], state["world_size"]) == (1, 2)


class Flaky(LocalService):
    """A master that is away for a while, and whose answers get lost."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def ask(self, request) -> ShardReply | Unanswered:
        self.asked += 1
        if self.asked % 3 == 0:
            super().ask(request)
            return Unanswered(away="the answer was lost")
        return Unanswered(away="away") if self.asked % 3 == 1 else super().ask(request)


def test_a_master_that_is_away_now_and_then_changes_nothing(read, monkeypatch) -> None:
    monkeypatch.setattr(records.services, "connect", Flaky)
    monkeypatch.setattr(client, "RETRY", (0.0, 0.0))
    assert everything(read(epochs=2, shard=20)) == [*range(100), *range(100)]


class Refusing(LocalService):
    def ask(self, request) -> ShardReply | Unanswered:
        return (
            Unanswered(refused="no")
            if type(request).__name__ == "TakeShards"
            else super().ask(request)
        )


def test_a_refusal_reaches_the_training(read, monkeypatch) -> None:
    monkeypatch.setattr(services, "connect", Refusing)
    data = read()
    with pytest.raises(InfrastructureError, match=r"^no$"):
        list(data)
    with pytest.raises(InfrastructureError, match=r"^no$"):
        data.state_dict()


def test_a_worker_that_was_cut_off_for_too_long_does_not_save(read, monkeypatch) -> None:
    monkeypatch.setattr(client, "RENEWAL_WAIT", 0.1)
    data = read(timeout=0.05)
    samples = iter(data)
    next(samples)
    gone = threading.Event()
    monkeypatch.setattr(LocalService, "ask", lambda *_: (gone.set(), Unanswered(away="away"))[1])
    assert gone.wait(5)
    until = threading.Event()
    until.wait(0.1)
    with pytest.raises(InfrastructureError, match="may belong to others by now"):
        data.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("patient", [True, False])
def test_an_epoch_may_wait_for_what_others_have_taken(read, monkeypatch, patient: bool) -> None:
    """One worker dies with samples that it has not read; another gets them if it waits for that."""
    shared = LocalService()
    monkeypatch.setattr(services, "connect", lambda: shared)
    monkeypatch.setattr(client, "REPORT_INTERVAL", 0.02)
    dying = read(shard=10)
    first = next(iter(dying))
    got: list[int] = []
    other = read(shard=10, wait_for_others=patient)
    reader = threading.Thread(target=lambda: got.extend(other))
    reader.start()
    reader.join(0.5)
    assert reader.is_alive() == patient
    dying.close()
    reader.join(10)
    assert not reader.is_alive()
    assert first not in got
    assert len(got) == len(set(got))
    assert (len(got) == 99) == patient


@pytest.mark.slow
def test_a_stored_checkpoint_is_left_out_of_later_ones_so_that_they_stay_small(
    read, monkeypatch
) -> None:
    shared = LocalService()
    monkeypatch.setattr(services, "connect", lambda: shared)
    monkeypatch.setattr(records, "SETTLED", 20)
    monkeypatch.setattr(client, "REPORT_INTERVAL", 0.02)
    readers = [read(shard=1, epochs=40) for _ in range(2)]
    seen: Counter[int] = Counter()

    def samples(data: Records) -> Iterator[int]:
        for _ in data.until_end():
            yield from data

    def states() -> list[dict]:
        return [
            {**data.state_dict(), "rank": rank, "world_size": 2}
            for rank, data in enumerate(readers)
        ]

    def learn(count: int) -> None:
        for _ in range(count):
            seen.update(next(loop) for loop in loops)

    loops = [samples(data) for data in readers]
    learn(3)
    assert not readers[0].commits
    early = states()
    learn(600)
    assert readers[0].commits, "what a rank saves of its own has become large"
    large, stored = states(), Counter(seen)
    readers[0].commit_rank_states(large)
    readers[0].commit_rank_states(early)  # late
    learn(100)
    small, then = states(), Counter(seen)
    for before, after in zip(large, small, strict=True):
        assert len(after["acknowledged"]) < len(before["acknowledged"]) / 2
    for data in readers:
        data.close()
    for saved, learned in ((small, then), (large, stored)):
        shared = LocalService()
        again = read(shard=7, epochs=40)
        again.load_rank_states(saved)
        learned.update(everything(again))
        assert learned == dict.fromkeys(range(100), 40)


def test_a_checkpoint_from_before_a_restore_is_not_left_out(read, monkeypatch) -> None:
    """The restore may have undone what it contains."""
    monkeypatch.setattr(records, "SETTLED", 0)
    asked: list[object] = []
    ask = LocalService.ask
    monkeypatch.setattr(LocalService, "ask", lambda self, it: (asked.append(it), ask(self, it))[1])
    data = read(shard=10)
    samples = iter(data)
    start = data.state_dict()
    for _ in range(30):
        next(samples)
    undone = data.state_dict()
    data.load_state_dict(start)
    next(iter(data))
    data.commit_rank_states([undone])
    assert not any(isinstance(request, SettleShards) for request in asked)
    data.commit_rank_states([data.state_dict()])
    assert any(isinstance(request, SettleShards) for request in asked)
