"""Streams with a broker in memory: what is read, where reading goes on, and what is said when it cannot."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given, settings, strategies as st

from dlrover import launched
from dlrover.data import feed, records, services
from dlrover.data.records import Records, acknowledged
from dlrover.data.services import LocalService
from dlrover.data.sources.stream import Fetched, Message, Stream
from dlrover.errors import ConfigurationError, InfrastructureError, UserCodeError
from dlrover.spec.requests.shards import Span
from tests.data.shelf import MemoryStream, Shelf, fast_and_clean, read

__all__ = ["fast_and_clean", "read"]
pytestmark = pytest.mark.usefixtures("fast_and_clean")


@pytest.mark.parametrize("gap", [1, 5])
def test_everything_is_read_once(read, gap: int) -> None:
    shelf = Shelf(3, gap)
    for partition in range(3):
        shelf.send(100, partition)
    data = read(shelf, until="now", shard=8)
    got = list(data)
    assert Counter(got) == Counter(shelf.sent)
    assert [*acknowledged([data.state_dict()])] == [
        Span(number, 0, offsets[-1] + 1) for number, offsets in enumerate(shelf.offsets)
    ], "what is empty between messages counts as read"
    for partition in range(3):
        own = [place for place in got if place[0] == partition]
        assert own == sorted(own)


def test_a_gap_that_a_broker_knows_takes_no_time(read) -> None:
    shelf = Shelf()
    shelf.tells_gaps = True
    for _ in range(5):
        shelf.send(40)
        shelf.offsets[0].append(shelf.offsets[0][-1] + 10**12)
        shelf.times[0].append(0.0)
        shelf.sent.append((0, shelf.offsets[0][-1]))
    data = read(shelf, until="now", shard=8)
    assert list(data) == shelf.sent
    assert len(shelf.asked) < 400
    assert [*acknowledged([data.state_dict()])] == [Span(0, 0, shelf.offsets[0][-1] + 1)]
    assert data._client._rate < 10**9, "who has passed a gap does not take more for that"


def test_what_is_sent_later_is_read_too(read) -> None:
    shelf = Shelf(2, gap=3)
    data = iter(read(shelf, start="latest"))
    reader_is_there = threading.Event()
    got = []

    def take() -> None:
        reader_is_there.set()
        got.extend(next(data) for _ in range(60))

    reader = threading.Thread(target=take)
    reader.start()
    reader_is_there.wait()
    for number in range(6):
        shelf.send(10, number % 2)
        reader.join(0.02)
    reader.join(10)
    assert Counter(got) == Counter(shelf.sent)
    data.close()


def test_a_job_can_begin_with_what_comes_next(read) -> None:
    shelf = Shelf()
    shelf.send(50)
    data = read(shelf, start="latest", idle=0.1)
    assert list(data) == []
    shelf.send(5)
    assert list(data) == shelf.sent[50:]
    shelf.send(5)
    assert list(data) == shelf.sent[55:], "after a pause it goes on"


def test_a_restore_goes_on_behind_the_last_message_that_was_handed_out(read) -> None:
    shelf = Shelf(2, gap=4)
    shelf.send(60, 0)
    shelf.send(40, 1)
    first = read(shelf, until="now", shard=5)
    samples = iter(first)
    got = [next(samples) for _ in range(33)]
    state = first.state_dict()
    next(samples)
    shelf.send(9, 1)  # behind the end that the first start found
    again = read(shelf, until="now", shard=9)
    again.load_state_dict(state)
    assert Counter([*got, *again]) == Counter(shelf.sent[:100])


def test_a_state_from_before_the_first_message_keeps_the_beginning(read) -> None:
    shelf = Shelf()
    shelf.send(10)
    data = read(shelf, start="latest", idle=0.1)
    list(data)
    state = data.state_dict()
    shelf.send(10)
    again = read(shelf, start="latest", idle=0.1)
    again.load_state_dict(state)
    assert list(again) == shelf.sent[10:]


def test_a_new_partition_is_read_from_its_first_message(read) -> None:
    shelf = Shelf()
    shelf.send(10)
    data = read(shelf, idle=0.1)
    assert list(data) == shelf.sent
    state = data.state_dict()
    shelf.add_partition()
    shelf.send(5, 1)
    again = read(shelf, start="latest", idle=0.1)
    again.load_state_dict(state)
    assert list(again) == shelf.sent[10:]


def test_a_partition_that_is_added_is_named_and_read_by_the_next_start(read, caplog) -> None:
    shelf = Shelf()
    shelf.send(10)
    data = read(shelf, idle=0.2)
    assert list(data) == shelf.sent
    shelf.add_partition()
    shelf.send(5, 1)
    assert list(data) == []
    assert (
        caplog.text.count("memory://host/topic has 2 partitions by now, and the job reads 1") == 1
    )
    again = read(shelf, idle=0.1)
    again.load_state_dict(data.state_dict())
    assert list(again) == shelf.sent[10:]


def test_a_stream_that_ends_before_what_was_seen_of_it_is_an_error(read) -> None:
    shelf = Shelf()
    shelf.send(50)
    data = iter(read(shelf))
    for _ in range(50):
        next(data)
    del shelf.offsets[0][20:]
    with pytest.raises(
        InfrastructureError,
        match="Partition 0 of memory://host/topic ends at offset 20, and the job has seen 50",
    ):
        next(data)


def test_as_many_messages_are_asked_for_as_are_not_too_large(read, monkeypatch) -> None:
    monkeypatch.setattr(feed, "CHUNK", 500)
    monkeypatch.setattr(feed, "CHUNK_BYTES", 1000)
    shelf = Shelf()
    shelf.size = 100
    shelf.send(400)
    assert len(list(read(shelf, until="now", shard=400))) == 400
    assert set(shelf.asked[1:]) == {10}
    shelf.size, shelf.asked = 1, []
    assert len(list(read(shelf, until="now", shard=400))) == 400
    assert max(shelf.asked) > 200, "small ones are read many at a time"


def test_fewer_messages_are_asked_for_than_a_broker_has_broken_off(read, monkeypatch) -> None:
    monkeypatch.setattr(feed, "CHUNK", 500)
    shelf = Shelf()
    shelf.most = 4
    shelf.send(60)
    assert list(read(shelf, until="now", shard=60)) == shelf.sent
    assert shelf.asked[:4] == [50, 12, 3, 6]


@pytest.mark.parametrize("length", [100, 300])
def test_long_names_are_told_apart(length: int) -> None:
    pytest.importorskip("redis")
    one, other = (Records(f"redis://host/0?stream={'a' * length}{end}") for end in "xy")
    state = one.state_dict()
    Records(f"redis://host/0?stream={'a' * length}x").load_state_dict(state)
    with pytest.raises(ConfigurationError, match="order"):
        other.load_state_dict(state)


def test_what_was_removed_before_it_was_read_is_an_error(read) -> None:
    shelf = Shelf()
    shelf.send(100)
    data = read(shelf, until="now", shard=10)
    samples = iter(data)
    got = [next(samples) for _ in range(20)]
    shelf.removed[0] = 55
    with pytest.raises(InfrastructureError) as raised:
        got.extend(samples)
    assert got == shelf.sent[: len(got)]
    at = len(got)
    assert f"Messages with offsets {at} to " in str(raised.value)
    assert "partition 0 of memory://host/topic were removed before they were read; keep" in str(
        raised.value
    )


def test_what_was_removed_can_be_skipped(read, caplog) -> None:
    caplog.set_level(logging.WARNING)
    shelf = Shelf()
    shelf.send(100)
    data = read(shelf, until="now", shard=10, lost="skip")
    samples = iter(data)
    got = [next(samples) for _ in range(20)]
    shelf.removed[0] = 55
    got.extend(samples)
    assert got[-45:] == shelf.sent[55:]
    assert "to 54 of partition 0" in caplog.text or "to 5" in caplog.text
    assert "they are skipped" in caplog.text


def test_a_stream_that_was_made_anew_is_refused(read) -> None:
    shelf = Shelf()
    shelf.send(10)
    data = read(shelf, until="now")
    list(data)
    again = read(Shelf(), until="now")
    again.load_state_dict(data.state_dict())
    with pytest.raises(
        InfrastructureError, match="ends at offset 0, and the checkpoint has read it up to 10"
    ):
        next(iter(again))


def test_a_message_that_cannot_be_decoded_is_skipped(read, caplog) -> None:
    def decode(message: Message) -> int:
        if message.offset % 40 == 12:
            raise ValueError("rotten")
        return message.offset

    shelf = Shelf(gap=4)
    shelf.send(50)
    bad = [offset for _, offset in shelf.sent if offset % 40 == 12]
    data = read(shelf, until="now", decode=decode, attempts=2)
    got = list(data)
    assert bad
    assert acknowledged([data.state_dict()]).count == shelf.sent[-1][1] + 1 - len(bad)
    assert Counter(got) == Counter(offset for _, offset in shelf.sent if offset not in bad)
    for offset in bad:
        assert f"offset {offset} of partition 0: ValueError: rotten" in caplog.text


def test_too_many_that_cannot_be_decoded_are_an_error(read) -> None:
    shelf = Shelf()
    shelf.send(50)
    with pytest.raises(UserCodeError, match="could not be read, more than max_skipped"):
        list(read(shelf, until="now", decode=lambda message: message.absent))


def test_a_broker_that_is_away_for_a_moment_changes_nothing(read, caplog) -> None:
    shelf = Shelf()
    shelf.send(30)
    shelf.away = 2
    data = iter(read(shelf, until="now"))
    got = [next(data) for _ in range(10)]
    shelf.away = 2
    assert [*got, *data] == shelf.sent
    assert "memory://host/topic does not answer" in caplog.text
    assert "secret" not in caplog.text


def test_a_broker_that_stays_away_is_an_error(read, monkeypatch) -> None:
    monkeypatch.setattr(feed, "PATIENCE", 0.05)
    shelf = Shelf()
    shelf.send(30)
    data = read(shelf)
    samples = iter(data)
    for _ in range(30):
        next(samples)
    shelf.away = 1 << 30
    with pytest.raises(
        InfrastructureError,
        match=r"memory://host/topic did not answer for 0 s: OSError: no way to \*\*\*",
    ):
        next(samples)


def test_what_the_first_worker_finds_stands_for_all(read, monkeypatch) -> None:
    shared = LocalService()
    monkeypatch.setattr(services, "connect", lambda: shared)
    shelf = Shelf()
    shelf.send(20)
    first, second = (read(shelf, start="latest", until="now") for _ in range(2))
    assert list(first) == []
    shelf.send(20)
    assert list(second) == []
    assert first.state_dict()["begins"] == second.state_dict()["begins"]


def test_what_another_worker_gives_back_is_read(read, monkeypatch) -> None:
    shared = LocalService()
    monkeypatch.setattr(services, "connect", lambda: shared)
    shelf = Shelf()
    shelf.send(30)
    first, second = read(shelf, shard=30), read(shelf, shard=30, idle=3.0)
    assert next(iter(first)) == shelf.sent[0]
    rest = iter(second)
    giving_back = threading.Timer(0.2, first.close)
    giving_back.start()
    assert sorted(next(rest) for _ in range(29)) == shelf.sent[1:]
    giving_back.join()
    rest.close()


def test_a_job_that_begins_again_without_a_checkpoint_does_not_skip(read, monkeypatch) -> None:
    shared = LocalService()
    monkeypatch.setattr(services, "connect", lambda: shared)
    shelf = Shelf()
    shelf.send(20)
    assert list(read(shelf, start="latest", idle=0.05)) == []
    shelf.send(20)
    monkeypatch.setattr(launched, "given", launched.Given(round=2))
    assert list(read(shelf, start="latest", idle=0.05)) == shelf.sent[20:]


def test_a_job_that_begins_again_without_a_checkpoint_goes_on_in_a_copy(
    read, monkeypatch, caplog
) -> None:
    shared = LocalService()
    monkeypatch.setattr(services, "connect", lambda: shared)
    shelf = Shelf()
    shelf.source_ids = {"t": "first"}
    shelf.send(20)
    assert list(read(shelf, idle=0.05)) == shelf.sent
    shelf.source_ids = {"t": "copy"}
    monkeypatch.setattr(launched, "given", launched.Given(round=2))
    with pytest.raises(InfrastructureError, match="is not the one that the job has read"):
        list(read(shelf, idle=0.05))
    monkeypatch.setattr(launched, "given", launched.Given(round=3))
    assert list(read(shelf, idle=0.05, lost="skip")) == shelf.sent
    assert caplog.text.count("is not the one that the job has read") == 1


@pytest.mark.parametrize("first", [0, 1])
def test_a_job_knows_a_copy_also_if_one_of_its_workers_has_not_begun_to_read_it(
    read, first: int
) -> None:
    shelf = Shelf()
    shelf.source_ids = {"t": "first"}
    shelf.send(20)
    data = read(shelf, until="now")
    list(islice(data, 10))
    data.close()
    shelf.source_ids = {"t": "copy"}
    states = []
    for rank in range(2):
        copied = read(shelf, until="now", lost="skip")
        copied.load_state_dict(data.state_dict())
        if rank == first:
            list(islice(copied, 3))
        states.append({**copied.state_dict(), "rank": rank, "world_size": 2})
        copied.close()
    again = read(shelf, until="now")
    again.load_rank_states(states)
    assert list(again) == shelf.sent[13:]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "mqtt://user:secret@host/x",
            "No broker has addresses such as mqtt://host/x; these are read: redis://",
        ),
        ("redis://user:secret@host/0", r"redis://host/0 must name \?stream=KEY"),
        ("redis://host/0?stream=a&stream=a", "each key once"),
        ("redis://host/zero?stream=a", "names no number of a data base"),
        ("redis://host/0?stream=a&topic=b", "has an option topic; accepted: stream, group"),
        ("redis://host/0?stream=a&group=", "has an empty group"),
        ("redis://host:99999/0?stream=a", "wrong port"),
        ("kafka://host:9092,other:99999/topic", "wrong port"),
        ("redis://host:6379,other:6379/0?stream=a", "names 2 hosts; one is accepted"),
        ("redis://user:secret#1@host/0?stream=a", "wrong port"),
        ("redis://user:6/secret@host/0?stream=a", "an @ behind its host: special characters"),
        ("redis://user:6?secret@host/0?stream=a", "an @ behind its host: special characters"),
        ("redis://user:6#secret@host/0?stream=a", "an @ behind its host: special characters"),
        ("redis://user:p@6/secret@host/0?stream=a", "an @ behind its host: special characters"),
        ("redis://[::1/0?stream=a", "wrong host in brackets"),
        ("redis://host/0?stream=a#b", "has a # in it; write %23"),
        (
            "nats://host/clicks?group=a.b",
            "has the group 'a.b'; letters, digits, _ and - are accepted",
        ),
        ("amqp://host/clicks?group=a", "has an option group; accepted: vhost"),
        ("kafka://host/a,b", "names 2 topics; one is read"),
        ("kafka://host/a?group.id=b", "has an option group.id; it is not accepted"),
        ("nats:///clicks", "names no host"),
        ("nats://host/a.b", r"has the stream 'a\.b'; names have no blanks"),
        ("nats://host/a,b/c", "has the stream 'b/c'"),
        ("amqp://host/a," + 128 * "é", "a queue whose name has 256 bytes; up to 255 are accepted"),
        ("nats://host", "must name a stream as its path"),
    ],
)
def test_wrong_addresses_are_refused(url: str, message: str) -> None:
    for module in ("redis", "nats", "pika", "confluent_kafka"):
        pytest.importorskip(module)
    with pytest.raises(ConfigurationError, match=message) as raised:
        Records(url)
    assert "secret" not in str(raised.value)


def test_a_name_may_have_commas_and_slashes() -> None:
    pytest.importorskip("pika")
    broker = Stream("amqp://host/a%2Cb,%2Fc%20d").broker()
    assert broker.identity == "rabbitmq a,b /c d"
    assert broker._queues == ["a,b", "/c d"]


def test_several_hosts_have_a_port_each() -> None:
    pytest.importorskip("confluent_kafka")
    broker = Stream("kafka://me:secret@host:9092,other:9093/topic").broker()
    assert broker.address.servers == "host:9092,other:9093"
    assert str(broker.address) == "kafka://host:9092,other:9093/topic"


@pytest.mark.parametrize(
    ("came", "first", "said"),
    [
        (range(30), 25, ""),
        (range(30), 60, ""),
        (range(20, 30), 20, "offsets 0 to 19 of partition 0"),
        ([*range(10), *range(20, 30)], 25, "offsets 10 to 24 of partition 0"),
        (range(10), 60, "offsets 10 to 29 of partition 0"),
    ],
)
def test_what_came_before_it_was_removed_is_not_lost(caplog, came, first: int, said: str) -> None:
    """A broker that removes messages while they are fetched: afterwards, ``first`` is the first that it has."""
    reader = feed.Feed(MemoryStream(Shelf(), lost="skip"))
    fetched = Fetched([Message(0, offset, b"") for offset in came], 30, first)
    reader._broker.fetch = lambda *_: fetched
    read = [message for _, message in reader.read(Span(0, 0, 30), lambda _: None) if message]
    assert read == fetched.messages
    assert said in caplog.text
    assert ("were removed" in caplog.text) == bool(said)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("redis://host/0?stream=a", "redis", "redis"),
        ("nats://host/a", "nats", "nats"),
        ("amqp://host/a", "pika", "rabbitmq"),
        ("pulsar://host/a", "pulsar", "pulsar"),
        ("kafka://host/a", "confluent_kafka", "kafka"),
    ],
)
def test_a_client_that_is_not_installed_is_named(monkeypatch, url, package, extra) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    scheme = url.partition(":")[0]
    said = rf"{scheme}:// needs the package {package}: pip install 'dlrover\[{extra}\]>="
    with pytest.raises(ConfigurationError, match=said):
        Records(url)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="start is 'first'; accepted: 'earliest', 'latest', or a time with"
    ):
        Stream("redis://host/0?stream=a", start="first")
    with pytest.raises(ConfigurationError, match="idle is 0 s"):
        Stream("redis://host/0?stream=a", idle=0)
    with pytest.raises(ConfigurationError, match="A stream has no epochs"):
        Records(MemoryStream(Shelf()), shuffle=True)


# ---- whatever happens


class Job:
    """Workers of a job that share a service, a model that counts, and its last checkpoint."""

    def __init__(self, shelf: Shelf, monkeypatch) -> None:
        self.shelf, self.patch = shelf, monkeypatch
        self.service = LocalService()
        self.workers: list[Records] = []
        self.readers: list[Iterator] = []
        self.model: Counter = Counter()
        self.checkpoint: tuple[Counter, list[dict]] | None = None
        monkeypatch.setattr(services, "connect", lambda: self.service)
        self.begin(2)

    def begin(self, count: int) -> None:
        """All workers die without a word, others go on from the checkpoint."""
        for worker in self.workers:
            if worker._client is not None:
                worker._client._service = LocalService()  # its last words are not heard
            worker.close()
        self.patch.setattr(launched, "given", launched.Given(round=launched.given.round + 1))
        model, states = self.checkpoint or (Counter(), None)
        self.model = Counter(model)
        self.workers = [Records(MemoryStream(self.shelf, idle=0.08), shard=4) for _ in range(count)]
        for number, worker in enumerate(self.workers):
            self.be(number)
            if states is not None:
                worker.load_rank_states(states)
            worker._opened()
        self.readers = [iter(worker) for worker in self.workers]

    def be(self, number: int) -> None:
        self.patch.setattr(services, "world", lambda: (number, len(self.workers)))
        self.patch.setattr(records, "_LOADS", Counter())  # each worker is a process

    def learn(self, number: int, count: int) -> bool:
        number %= len(self.workers)
        for _ in range(count):
            sample = next(self.readers[number], None)
            if sample is None:
                self.readers[number] = iter(self.workers[number])
                return False
            self.model[sample] += 1
        return True

    def save(self) -> None:
        states = []
        for number, worker in enumerate(self.workers):
            self.be(number)
            states.append(worker.state_dict())
        self.checkpoint = Counter(self.model), states

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


SEND, LEARN, SAVE, CRASH = range(4)
steps = st.tuples(
    st.sampled_from([SEND, SEND, LEARN, LEARN, SAVE, CRASH]), st.integers(0, 3), st.integers(1, 15)
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.lists(steps, min_size=8, max_size=16))
def test_every_message_counts_once(partitions: int, gap: int, program) -> None:
    shelf = Shelf(partitions, gap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launched, "given", launched.Given(round=0))
        job = Job(shelf, patch)
        try:
            for kind, a, b in program:
                if kind == SEND:
                    shelf.send(b, a % partitions)
                elif kind == LEARN:
                    job.learn(a, b)
                elif kind == SAVE:
                    job.save()
                else:
                    job.begin(1 + a)
            for _ in range(2):  # what one of them gives back, another takes
                for number in range(len(job.workers)):
                    job.learn(number, 1000)
            assert job.model == Counter(shelf.sent)
        finally:
            job.close()
