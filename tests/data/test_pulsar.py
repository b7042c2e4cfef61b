"""What is Pulsar's own: batches, ledgers with gaps, what is trimmed, subscriptions, partitions, addresses."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.data import Message, Stream, feed
from dlrover.data.records import Records
from dlrover.data.sources.stream import Bounds
from dlrover.errors import ConfigurationError, InfrastructureError
from tests.brokers import Topic, admin, fresh, pulsar_running, pulsar_topic
from tests.pulsar.broker import ask
from tests.services import free_port
from tests.support.children import Child

pulsar = pytest.importorskip("pulsar")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
QUIET = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)


def number(message: Message) -> int:
    return int(message.value)


@pytest.fixture
def read() -> Iterator:
    """Makes data sets of an address and closes them."""
    made = []

    def make(url: str, **options) -> Records[int]:
        made.append(Records(Stream(url, **{"decode": number, **options})))
        return made[-1]

    yield make
    for data in made:
        data.close()


@pytest.fixture
def client(pulsar_port: int) -> Iterator[pulsar.Client]:
    made = pulsar.Client(f"pulsar://127.0.0.1:{pulsar_port}", logger=QUIET)
    yield made
    made.close()


@contextlib.contextmanager
def broker_of(url: str) -> Iterator:
    with contextlib.closing(Stream(url).broker()) as broker:
        yield broker


def name_of(topic: Topic) -> str:
    return topic.url.rpartition("/")[2]


# ---- batches


@pytest.mark.parametrize("batch", [2, 7, 50])
def test_messages_of_batches_have_offsets_of_their_own(pulsar_port: int, read, batch: int) -> None:
    topic = pulsar_topic(pulsar_port, batch, entries=3)
    topic.send(range(300))
    assert list(read(topic.url, until="now")) == list(range(300))
    with broker_of(topic.url) as broker:
        (bounds,) = broker.bounds()
        messages = broker.fetch(0, *bounds, 1000).messages
    offsets = [message.offset for message in messages]
    assert offsets == sorted(set(offsets))
    assert (bounds.first, bounds.end) == (offsets[0], offsets[-1] + 1)
    assert [offset & 0xFFF for offset in offsets[:batch]] == list(range(batch))


@pytest.mark.parametrize("batch", [1, 4, 25])
def test_reading_begins_and_ends_at_every_place(pulsar_port: int, batch: int) -> None:
    """Also in the middle of a batch, behind its last message, and at the end of a ledger."""
    topic = pulsar_topic(pulsar_port, batch, entries=3)
    topic.send(range(50))
    with broker_of(topic.url) as broker:
        (bounds,) = broker.bounds()
        messages = broker.fetch(0, *bounds, 1000).messages
        assert [int(message.value) for message in messages] == list(range(50))
        for at, message in enumerate(messages):
            for start, expected in ((message.offset, at), (message.offset + 1, at + 1)):
                last = min(49, at + 3)
                stop = messages[last].offset
                if start < stop:
                    got = broker.fetch(0, start, stop, 1000)
                    assert got.messages == messages[expected:last]
                    assert got.stop >= stop
                    assert got.first == start, "nothing was removed"


def test_a_restore_in_the_middle_of_a_batch(pulsar_port: int, read) -> None:
    topic = pulsar_topic(pulsar_port, 10, entries=2)
    topic.send(range(100))
    first = read(topic.url)
    samples = iter(first)
    got = [next(samples) for _ in range(37)]
    again = read(topic.url, until="now")
    again.load_state_dict(first.state_dict())
    assert [*got, *again] == list(range(100))


def test_a_message_has_its_key_and_its_properties(client, pulsar_port: int, read) -> None:
    topic = pulsar_topic(pulsar_port)
    producer = client.create_producer(name_of(topic))
    producer.send(b"1", properties={"a": "b"}, partition_key="k")
    producer.send("ü".encode())
    first, second = read(topic.url, until="now", decode=lambda message: message)
    assert first[2:] == (b"1", b"k", {"a": "b"})
    assert second[2:] == ("ü".encode(), None, {})


@pytest.mark.parametrize("kind", ["LZ4", "ZLib", "ZSTD", "SNAPPY"])
def test_compressed_messages(client, pulsar_port: int, read, kind: str) -> None:
    topic = pulsar_topic(pulsar_port)
    how = getattr(pulsar.CompressionType, kind)
    producer = client.create_producer(
        name_of(topic),
        compression_type=how,
        batching_enabled=True,
        batching_max_publish_delay_ms=1,
    )
    for sample in range(100):
        producer.send_async(str(sample).encode(), None)
    producer.flush()
    assert list(read(topic.url, until="now")) == list(range(100))


# ---- ledgers


def test_ledgers_of_others_between_those_of_a_topic_take_no_time(pulsar_port: int, read) -> None:
    topic = pulsar_topic(pulsar_port, entries=50)
    for first in range(0, 200, 50):
        topic.send(range(first, first + 50))
        ask(admin(pulsar_port), "skip", ledgers=1_000_000)
    topic.send(range(200, 210))
    began = time.monotonic()
    assert list(read(topic.url, until="now")) == list(range(210))
    assert time.monotonic() - began < 10


def test_what_comes_to_an_empty_topic_is_read_however_many_ledgers_there_are(
    pulsar_port: int, read
) -> None:
    ask(admin(pulsar_port), "skip", ledgers=10_000_000)
    topic = pulsar_topic(pulsar_port)
    data = read(topic.url, idle=1.0)
    assert list(data) == []
    topic.send(range(30))
    assert list(data) == list(range(30))
    with broker_of(topic.url) as broker:
        (bounds,) = broker.bounds()
        assert bounds.first >> 32 > 10_000_000


def test_nothing_is_lost_of_a_topic_that_was_empty_and_is_read_by_several(
    pulsar_port: int, read
) -> None:
    topic = pulsar_topic(pulsar_port)
    with broker_of(topic.url) as broker:
        assert broker.bounds() == [Bounds(0, 0)]
        topic.send(range(3))
        ((_, end),) = broker.bounds()
        for start in (0, 409_600, 4_096_000):
            fetched = broker.fetch(0, start, start + 409_600, 50)
            assert fetched.messages == []
            assert fetched.first == start
            assert fetched.stop > 1 << 32, "all that is empty is reported at once"
        assert len(broker.fetch(0, fetched.stop, end, 50).messages) == 3


def test_the_end_of_a_ledger_is_no_loss_and_its_removal_is_one(pulsar_port: int) -> None:
    topic = pulsar_topic(pulsar_port, entries=10)
    topic.send(range(30))
    with broker_of(topic.url) as broker:
        (bounds,) = broker.bounds()
        messages = broker.fetch(0, *bounds, 1000).messages
        last = messages[9].offset
        assert broker.fetch(0, last + 1, bounds.end, 5).first == last + 1
        topic.keep(20)
        assert broker.fetch(0, messages[10].offset, bounds.end, 5).first == messages[10].offset
        fetched = broker.fetch(0, messages[4].offset, bounds.end, 5)
        assert fetched.first == messages[10].offset
        assert fetched.messages == messages[10:15]


def test_what_is_removed_in_front_of_a_reader_is_named(pulsar_port: int, read) -> None:
    """A reader that is open jumps over ledgers that are removed, and says nothing."""
    topic = pulsar_topic(pulsar_port, entries=10)
    topic.send(range(10))
    data = iter(read(topic.url))
    assert [next(data) for _ in range(5)] == list(range(5))
    topic.send(range(10, 600))
    topic.keep(100)
    with pytest.raises(InfrastructureError, match="were removed before they were read"):
        list(data)


def test_all_of_a_topic_that_is_removed_before_it_was_read_is_named(pulsar_port: int, read) -> None:
    topic = pulsar_topic(pulsar_port, entries=10)
    topic.send(range(30))
    with broker_of(topic.url) as broker:
        (bounds,) = broker.bounds()
    topic.send(range(30, 31))  # begins a ledger
    topic.keep(1)
    with broker_of(topic.url) as broker:
        at = bounds.first + (5 << 12)
        fetched = broker.fetch(0, at, bounds.end, 50)
        assert fetched.messages == []
        assert fetched.first == bounds.end


def test_what_is_removed_behind_what_a_reader_has_already_is_named_by_the_next_fetch(
    pulsar_port: int,
) -> None:
    topic = pulsar_topic(pulsar_port, entries=10)
    topic.send(range(60))
    with broker_of(topic.url) as broker:
        ((first, end),) = broker.bounds()
        at = broker.fetch(0, first, end, 2).stop
        topic.keep(20)
        fetched = broker.fetch(0, at, end, 50)
        if (
            int(fetched.messages[0].value) == 2
        ):  # unless its client was too slow to have more than was asked for
            count = len(fetched.messages)
            assert [int(message.value) for message in fetched.messages] == list(range(2, 2 + count))
            assert fetched.first == at
            assert fetched.stop == fetched.messages[-1].offset + 1
            fetched = broker.fetch(0, fetched.stop, end, 50)
        assert [int(message.value) for message in fetched.messages] == list(range(40, 60))
        assert fetched.first == fetched.messages[0].offset


def test_all_messages_that_are_removed_are_named(pulsar_port: int) -> None:
    topic = pulsar_topic(pulsar_port, entries=10, retained=False)
    topic.send(range(10))
    with broker_of(topic.url) as broker:
        ((first, end),) = broker.bounds()
    ask(admin(pulsar_port), "roll", name_of(topic))
    with broker_of(topic.url) as broker:
        assert broker.fetch(0, first, end, 50) == ([], end, end)


def test_an_id_in_no_batch_has_no_place_in_one() -> None:
    """The client takes ``ledger:entry:0`` to be behind ``ledger:entry``, and says that there is nothing."""
    broker = Stream("pulsar://host/a").broker()
    made = [broker._id(3, 7 << 32 | 5 << 12 | place) for place in (0, 2)]
    assert [(m.ledger_id(), m.entry_id(), m.batch_index()) for m in made] == [(7, 5, -1), (7, 5, 2)]


def test_what_no_subscription_needs_is_removed_and_what_the_group_needs_is_kept(
    pulsar_port: int, read
) -> None:
    """Pulsar's default: there is no retention."""
    topic = pulsar_topic(pulsar_port, entries=10, retained=False)
    topic.send(range(100))
    assert list(read(topic.url, until="now")) == list(range(90, 100))
    data = read(topic.in_group("job"))
    samples = iter(data)
    next(samples)
    topic.send(range(100, 200))
    got = [next(samples) for _ in range(50)]
    assert got == list(range(91, 141))
    state = data.state_dict()
    data.commit_rank_states([state])
    topic.send(range(200, 300))
    again = read(topic.in_group("job"), until="now")
    again.load_state_dict(state)
    assert list(again) == list(range(141, 300))
    known = ask(admin(pulsar_port), "subscriptions", name_of(topic))
    assert [name for name in known if not name.startswith("reader-")] == ["job"]


@pytest.mark.parametrize("taken", [19, 20, 21])
def test_a_checkpoint_at_the_end_of_a_ledger_can_be_restored(
    pulsar_port: int, read, taken: int
) -> None:
    topic = pulsar_topic(pulsar_port, entries=10, retained=False)
    url = topic.in_group("job")
    with broker_of(url) as broker:
        broker.bounds()  # somebody makes the subscription before messages are sent
    topic.send(range(60))
    data = read(url)
    samples = iter(data)
    got = [next(samples) for _ in range(taken)]
    data.commit_rank_states([data.state_dict()])
    topic.send(range(60, 80))
    again = read(url, until="now")
    again.load_state_dict(data.state_dict())
    assert [*got, *again] == list(range(80))


def test_the_group_is_at_the_last_message_of_the_checkpoint(pulsar_port: int, read) -> None:
    topic = pulsar_topic(pulsar_port)
    topic.send(range(100))
    data = read(topic.in_group("job"))
    samples = iter(data)

    def backlog() -> int:
        return ask(admin(pulsar_port), "backlog", name_of(topic), subscription="job")

    next(samples)
    assert backlog() == 100
    for _ in range(9):
        next(samples)
    data.commit_rank_states([data.state_dict()])
    assert backlog() == 91, "the tenth message is not acknowledged"


def test_a_subscription_that_somebody_reads_with_is_left_alone(
    client, pulsar_port: int, read, caplog
) -> None:
    caplog.set_level(logging.WARNING)
    topic = pulsar_topic(pulsar_port)
    topic.send(range(50))
    consumer = client.subscribe(name_of(topic), "job")
    data = read(topic.in_group("job"))
    samples = iter(data)
    for _ in range(20):
        next(samples)
    data.commit_rank_states([data.state_dict()])
    assert "The subscription job of pulsar://127.0.0.1" in caplog.text
    assert "has consumers; name a subscription without consumers" in caplog.text
    consumer.close()
    caplog.clear()
    data.commit_rank_states([data.state_dict()])
    assert not caplog.records
    assert topic.lag("job") == 30


# ---- partitions


def test_partitions_of_a_topic(pulsar_port: int, read) -> None:
    topic = pulsar_topic(pulsar_port, 3, partitions=4)
    topic.send(range(400))
    data = read(topic.in_group("job"), until="now", decode=lambda message: message)
    messages = list(data)
    assert sorted(int(message.value) for message in messages) == list(range(400))
    assert {message.partition for message in messages} == {0, 1, 2, 3}
    for partition in range(4):
        own = [int(m.value) for m in messages if m.partition == partition]
        assert own == sorted(own)
    data.commit_rank_states([data.state_dict()])
    backlog = ask(admin(pulsar_port), "backlog", name_of(topic), subscription="job")
    assert backlog == 4, "the last batch of each"


def test_a_partition_that_is_empty(client, pulsar_port: int, read) -> None:
    topic = pulsar_topic(pulsar_port, partitions=2)
    producer = client.create_producer(f"{name_of(topic)}-partition-1")
    for sample in range(20):
        producer.send(str(sample).encode())
    assert list(read(topic.url, until="now")) == list(range(20))
    url = f"{topic.url}-partition-1"
    assert list(read(url, until="now")) == list(range(20)), "a partition is a topic, too"


# ---- how much is asked for


def test_who_waits_keeps_the_reader_that_has_seen_the_end(pulsar_port: int) -> None:
    topic = pulsar_topic(pulsar_port)
    topic.send(range(10))
    with broker_of(topic.url) as broker:
        known = broker.bounds()
        before = broker._tails[0]
        assert broker.bounds() == known
        assert broker._tails[0] is before
        topic.send(range(10, 20))
        assert broker.bounds()[0].end == known[0].end + (10 << 12)


def test_who_has_seen_the_end_knows_it_though_all_is_removed(pulsar_port: int, read) -> None:
    topic = pulsar_topic(pulsar_port, entries=10, retained=False)
    topic.send(range(10))
    data = read(topic.url, idle=1.0)
    assert len(list(data)) == 10
    with broker_of(topic.url) as broker:
        ((_, end),) = broker.bounds()
        ask(admin(pulsar_port), "roll", name_of(topic))
        broker._firsts.clear()
        assert broker.bounds() == [Bounds(end, end)]
    with broker_of(topic.url) as broker:
        assert broker.bounds() == [Bounds(0, 0)], "nobody can tell"
    again = read(topic.url)
    again.load_state_dict(data.state_dict())
    with pytest.raises(InfrastructureError, match="was recreated or has lost messages"):
        next(iter(again))


def test_the_group_keeps_the_last_message_that_was_read(pulsar_port: int, read) -> None:
    topic = pulsar_topic(pulsar_port, entries=10, retained=False)
    topic.send(range(10))
    data = read(topic.in_group("job"), idle=0.5)
    assert len(list(data)) == 10
    data.commit_rank_states([data.state_dict()])
    ask(admin(pulsar_port), "roll", name_of(topic))
    again = read(topic.in_group("job"), idle=1.0)
    again.load_state_dict(data.state_dict())
    assert list(again) == []
    topic.send(range(10, 30))
    assert list(again) == list(range(10, 30))


def test_a_reader_goes_on_where_it_was(pulsar_port: int, monkeypatch) -> None:
    topic = pulsar_topic(pulsar_port, entries=100)
    topic.send(range(300))
    with broker_of(topic.url) as broker:
        (bounds,) = broker.bounds()
        opened = []
        make = broker._open
        monkeypatch.setattr(broker, "_open", lambda *args: opened.append(args[-1]) or make(*args))
        at, got, step = bounds.first, [], 7 << 12
        while at < bounds.end:
            stop = min(at + step, bounds.end)
            fetched = broker.fetch(0, at, stop, 3)
            got += [int(message.value) for message in fetched.messages]
            at, step = min(fetched.stop, stop), 7 << 12 if fetched.messages else 1 << 32
        assert got == list(range(300))
        assert opened == [3, 1, 1], "the first message was looked up twice, between ledgers"


@pytest.mark.parametrize(("batch", "entries"), [(1, 100), (25, 4), (400, 1)])
def test_a_shard_is_about_a_hundred_messages(pulsar_port: int, batch: int, entries: int) -> None:
    topic = pulsar_topic(pulsar_port, batch)
    topic.send(range(800))
    with broker_of(topic.url) as broker:
        assert broker.shard(broker.bounds()) == entries << 12


# ---- addresses and errors


@pytest.mark.parametrize(
    ("path", "topic"),
    [
        ("a", "persistent://public/default/a"),
        ("t/n/a", "persistent://t/n/a"),
        ("persistent/t/n/a", "persistent://t/n/a"),
    ],
)
def test_addresses(path: str, topic: str) -> None:
    broker = Stream(f"pulsar://h:6650,i:6651/{path}?group=g").broker()
    assert broker.identity == f"pulsar {topic}"
    assert broker.group == "g"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("pulsar://h", "has the path ''; accepted: a topic, or tenant/namespace/topic"),
        ("pulsar://h/a/b", "has the path 'a/b'"),
        ("pulsar://h/a//b", "has the path 'a//b'"),
        ("pulsar://h/a/b/c/d", "has the path 'a/b/c/d'"),
        ("pulsar://h/a?subscription=b", "has an option subscription; accepted: group"),
        ("pulsar://h/a?group=", "has an empty group"),
        ("pulsar://h:6650,i:x/a", "has a wrong port"),
    ],
)
def test_addresses_that_are_wrong(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Stream(url).broker()


def test_an_address_that_the_client_refuses() -> None:
    with (
        broker_of("pulsar://secret@[::1]:6650,h/a") as broker,
        pytest.raises(ConfigurationError, match="is not accepted by pulsar-client") as said,
    ):
        broker.bounds()
    assert "secret" not in str(said.value)


@pytest.mark.parametrize(
    ("parts", "fits"),
    [
        (((1 << 31) - 1, (1 << 20) - 1, 4095), True),
        ((1 << 31, 0, -1), False),
        ((1, 1 << 20, -1), False),
        ((1, 1, 4096), False),
    ],
)
def test_ids_that_fit_into_an_offset(parts: tuple[int, int, int], fits: bool) -> None:
    from dlrover.data.sources import pulsar as source

    class One:
        def read_next(self, _: int):
            return self

        def message_id(self):
            return pulsar.MessageId(0, *parts)

    if fits:
        assert source._found(One()).offset == (1 << 63) - 1
    else:
        with pytest.raises(ConfigurationError, match="has no offset: ledger, entry and place"):
            source._found(One())


@pytest.mark.parametrize(
    ("user", "sent"),
    [("secret@", "secret"), (":secret@", "secret"), ("me:secret@", "me:secret")],
)
def test_a_token_or_a_password_comes_to_the_broker(
    tmp_path: Path, read, user: str, sent: str
) -> None:
    port = free_port()
    with pulsar_running(tmp_path, port, sent):
        name = fresh()
        ask(admin(port), "make", name)
        assert list(read(f"pulsar://{user}127.0.0.1:{port}/{name}", until="now")) == []


def test_a_wrong_token_is_an_error_late_and_never_shown(
    tmp_path: Path, read, monkeypatch, caplog, capfd
) -> None:
    """The client takes a broker that refuses it for one that is away, and tries again."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(feed, "PATIENCE", 1.0)
    port = free_port()
    with (
        pulsar_running(tmp_path, port, "right"),
        pytest.raises(InfrastructureError, match="did not answer for 1 s: Timeout") as said,
    ):
        list(read(f"pulsar://hidden@127.0.0.1:{port}/a"))
    shown = "".join(capfd.readouterr()) + caplog.text + str(said.value)
    assert "hidden" not in shown


def test_a_broker_that_is_not_there_is_waited_for(read, monkeypatch) -> None:
    monkeypatch.setattr(feed, "PATIENCE", 1.0)
    with pytest.raises(InfrastructureError, match="did not answer for 1 s"):
        list(read(f"pulsar://127.0.0.1:{free_port()}/a"))


# ---- the client's threads


def test_connections_end_with_the_broker(pulsar_port: int) -> None:
    topic = pulsar_topic(pulsar_port)
    topic.send(range(50))
    before = threading.active_count()
    _, open_before = ask(admin(pulsar_port), "connections")
    with broker_of(topic.url) as broker:
        (bounds,) = broker.bounds()
        broker.fetch(0, *bounds, 5)
    assert threading.active_count() <= before  # those that other tests have left may end
    until = time.monotonic() + 30
    while ask(admin(pulsar_port), "connections")[1] > open_before:
        assert time.monotonic() < until, "it is still connected"
        time.sleep(0.02)
    (subscriptions,) = [ask(admin(pulsar_port), "subscriptions", name_of(topic))]
    assert subscriptions == [], "readers are forgotten"


def test_a_process_that_is_forked_ends_nothing_of_its_parent(pulsar_port: int) -> None:
    topic = pulsar_topic(pulsar_port)
    topic.send(range(50))
    with broker_of(topic.url) as broker:
        (bounds,) = broker.bounds()
        broker.fetch(0, *bounds, 5)
        gc.collect()  # What other tests left is not the child's to end.

        def end() -> None:
            nonlocal broker
            broker.close()
            del broker
            gc.collect()

        Child(end, within=5).result()
        assert len(broker.fetch(0, bounds.first, bounds.end, 50).messages) == 50
