"""Rows on servers are those of one dict, whatever moves or dies."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from dlrover._native.tables import slots_of
from dlrover.embedding.machine.placement import Placement
from dlrover.embedding.options import Expiry, RowOptimizer, decoded
from dlrover.embedding.remote import client, holding, server, wire
from dlrover.embedding.remote.client import ServerGroup
from dlrover.embedding.remote.listener import OutdatedPlacementError
from dlrover.embedding.table import HashTable
from dlrover.errors import ConfigurationError, InfrastructureError, NoRoomError, ProtocolError
from dlrover.spec.requests.placement import SLOTS, Abandon, MoveSlots
from tests.embedding.servers import DIM, OPTIONS, LocalDirectory, Model, cluster, train
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_on_servers_are_those_of_one_table(count: int) -> None:
    with cluster(count) as (_, group):
        model: Model = {}
        train(group, model, 5)
        unknown = group.rows(0, DIM, np.array([10**9], np.int64), insert=False)
        assert (unknown == 0).all()
        assert group.rows(0, DIM, np.empty(0, np.int64), insert=True).shape == (0, DIM)


def test_servers_come_and_go_while_training() -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 3)
        made.start(2, servers=3)
        trained = threading.Thread(target=train, args=(group, model, 30, 1))
        trained.start()
        made.settle(lambda placement: placement.owners.count(2) == SLOTS // 3)
        made.servers[0].leave(made.directory)
        made.settle(lambda placement: placement.servers.keys() == {1, 2})
        made.servers[1].leave(made.directory)
        made.settle(lambda placement: placement.servers.keys() == {2})
        trained.join(30)
        assert not trained.is_alive()
        train(group, model, 3, seed=2)
        assert not made.recovered


def test_each_row_is_counted_once_while_slots_move() -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 5)
        before = made.directory.placement.version
        counts, versions = [], set[int]()
        for index in (2, 3):
            made.start(index, servers=index + 1)
        while made.directory.placement.moves or made.directory.placement.version < before + 10:
            counts.append(group.count_rows("users"))
            versions.add(made.directory.placement.version)
        assert set(counts) == {len(model)}
        assert len(versions) > 3, "some were counted between two moves"


def test_an_order_waits_for_a_server_that_comes_back() -> None:
    with cluster(2) as (made, group):
        train(group, {}, 3)
        rows = group.count_rows("users")
        made.kill(1)
        later = threading.Timer(0.3, made.start, (1, 2))
        later.start()
        assert 0 < group.count_rows("users") < rows
        made.kill(1)
        later = threading.Timer(0.3, made.start, (1, 3))
        later.start()
        assert group.evict() == 0
        later.join()


def test_a_lost_server_loses_its_slots_alone() -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 3)
        made.kill(1)
        made.start(1, start=2)
        for key in [key for key in model if slots_of(np.array([key]))[0] >= SLOTS // 2]:
            del model[key]
        train(group, model, 3, seed=1)
        assert made.recovered == [SLOTS // 2]


def test_a_server_that_is_replaced_gives_its_rows_to_the_next() -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 3)
        made.start(1, start=2)
        train(group, model, 3, seed=1)
        assert not made.recovered


def test_a_push_whose_reply_is_lost_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = client._Link.receive
    lost: list[int] = []

    def lose(link: client._Link) -> wire.RowFrame | None:
        reply = receive(link)
        if reply is not None and reply.op is wire.Op.PUSH and len(lost) < 5:
            lost.append(1)
            link.close()
            return None
        return reply

    monkeypatch.setattr(client._Link, "receive", lose)
    with cluster(2) as (_, group):
        train(group, {}, 4)
        assert len(lost) == 5


def test_slots_that_were_given_stay_given_by_a_placement_from_before() -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 3)
        giver, taker = made.servers[0], made.servers[1]
        waiting, given, go_on = threading.Event(), threading.Event(), threading.Event()
        follow, restore = giver._follow, taker._holding.restore

        def follow_late(placement):
            if not placement.moves and "second" in placement.tables and not given.is_set():
                waiting.set()
                assert given.wait(10)
            follow(placement)

        def restore_late(rows):
            given.set()
            assert go_on.wait(10)
            restore(rows)

        giver._follow, taker._holding.restore = follow_late, restore_late
        group.open("second", OPTIONS)
        assert waiting.wait(10)
        made.directory.ask(MoveSlots(0, 2.0, 1.0, dict.fromkeys(range(10), 1)))
        assert given.wait(10)
        until(lambda: giver._version == made.directory.placement.version)
        owned = giver._holding.owned()
        go_on.set()
        assert not set(owned.tolist()) & set(range(10))
        made.settle(lambda placement: not placement.moves)
        train(group, model, 3, seed=1)


def test_slots_are_given_by_the_server_that_has_them_alone() -> None:
    with cluster(3) as (made, _):
        block = threading.Event()
        restore = made.servers[1]._holding.restore
        made.servers[1]._holding.restore = lambda rows: (block.wait(10), restore(rows))
        made.directory.ask(MoveSlots(0, 2.0, 1.0, {0: 1}))
        with pytest.raises(ProtocolError, match="Slot 0 does not move from embedding server 2"):
            made.servers[2].check_gift(np.array([0]))
        block.set()


def test_rows_of_a_table_that_was_opened_a_moment_ago_move_too() -> None:
    with cluster(2) as (made, group):
        train(group, {}, 1)
        keys = np.arange(100_000)
        keys = keys[slots_of(keys) < 10]
        taker = made.servers[1]
        fetch = taker._fetch

        def fetch_after_the_opening(address, port, slots):
            if "second" not in made.directory.placement.tables:
                table = group.open("second", OPTIONS)
                group.rows(table, DIM, keys, insert=True)
                group.push(table, keys, np.ones((len(keys), DIM), np.float32))
            return fetch(address, port, slots)

        taker._fetch = fetch_after_the_opening
        made.directory.ask(MoveSlots(0, 2.0, 1.0, dict.fromkeys(range(10), 1)))
        made.settle(lambda placement: not placement.moves)
        made.servers[0]._nudged.set()
        until(lambda: made.servers[0]._version == made.directory.placement.version)
        rows = group.rows(group.open("second", OPTIONS), DIM, keys, insert=False)
        assert (rows == 2).all()


def test_a_server_that_is_replaced_while_slots_come_gives_its_rows_to_the_next() -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 3)
        replaced = made.servers[1]
        restore = replaced._holding.restore

        def replaced_meanwhile(rows):
            restore(rows)
            if made.servers[1] is replaced:
                made.start(1, start=2)

        replaced._holding.restore = replaced_meanwhile
        made.directory.ask(MoveSlots(0, 2.0, 1.0, dict.fromkeys(range(10), 1)))
        made.settle(lambda placement: not placement.moves and placement.servers[1].ready)
        train(group, model, 3, seed=1)
        assert not made.recovered


@pytest.mark.parametrize("event", ["owner replaced", "moved elsewhere"])
def test_a_late_report_takes_no_slots_whose_rows_have_changed_since(event: str) -> None:
    moves = MoveSlots(0, 2.0, 1.0, dict.fromkeys(range(10), 1))
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 3)
        taker = made.servers[1]
        report, fetched, go_on = taker._report, threading.Event(), threading.Event()

        def report_late(held):
            fetched.set()
            assert go_on.wait(10)
            report(held)

        taker._report = report_late
        made.directory.ask(moves)
        assert fetched.wait(10)
        if event == "owner replaced":
            made.start(0, start=2)
            made.settle(lambda placement: placement.servers[0].ready)
            train(group, model, 3, seed=1)
        else:
            made.start(2, servers=3)
            made.settle(lambda placement: not placement.moves.keys() & set(range(10)))
            train(group, model, 3, seed=1)
            made.directory.ask(moves)
        go_on.set()
        made.settle(lambda placement: not placement.moves)
        train(group, model, 3, seed=2)
        assert not made.recovered


def test_a_server_that_is_to_end_waits_until_the_next_start_has_its_rows() -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 3)
        replaced = made.servers[1]
        give, asked = replaced._holding.give, threading.Event()
        replaced._holding.give = lambda *given: (asked.wait(10), give(*given))
        made.start(1, start=2)
        replaced.leave(made.directory)
        asked.set()
        made.settle(lambda placement: placement.servers[1].ready)
        train(group, model, 3, seed=1)
        assert not made.recovered


def test_the_last_server_that_is_to_end_gives_its_rows_to_the_next_start() -> None:
    with cluster(1) as (made, group):
        model: Model = {}
        train(group, model, 3)
        made.servers[0].leave(made.directory)
        train(group, model, 3, seed=1)
        made.start(0, start=2)
        made.settle(lambda placement: placement.servers[0].ready)
        train(group, model, 3, seed=2)
        assert not made.recovered


def test_a_table_may_be_opened_while_rows_are_copied() -> None:
    with cluster(1) as (made, group):
        train(group, {}, 1)
        held = made.servers[0]._holding
        table = held._tables["users"]
        export = table.export_rows

        def export_while_one_is_opened(*given, **options):
            group.open("second", OPTIONS)
            held.open_tables(made.directory.look(-1))
            return export(*given, **options)

        table.export_rows = export_while_one_is_opened
        found, rows = held.export_changes("copy", "")
        assert rows == len(table) == len(found["keys/users"])


def test_a_server_without_room_for_slots_says_so_and_keeps_its_own(caplog) -> None:
    options = msgspec.structs.replace(decoded(OPTIONS), memory_bytes=300_000).json()
    keys = np.arange(100_000)
    with cluster(2) as (made, group):
        table = group.open("users", options)
        for first in range(0, len(keys), 1000):
            with suppress(NoRoomError):
                group.rows(table, DIM, keys[first : first + 1000], insert=True)
        of_second = keys[slots_of(keys) >= SLOTS // 2]
        rows = group.rows(table, DIM, of_second, insert=False)
        first_rows = group.rows(table, DIM, keys[slots_of(keys) < SLOTS // 2], insert=False)
        made.directory.ask(MoveSlots(0, 2.0, 1.0, dict.fromkeys(range(500), 1)))
        until(lambda: "There is no room for slots from" in caplog.text)
        assert (group.rows(table, DIM, of_second, insert=False) == rows).all()
        made.settle(lambda placement: not placement.moves)
        assert made.directory.look(-1).owners.count(0) > SLOTS // 2 - 500, "what had no room stays"
        of_first = keys[slots_of(keys) < SLOTS // 2]
        assert (group.rows(table, DIM, of_first, insert=False) == first_rows).all()


def test_a_copy_has_the_pushes_that_it_says() -> None:
    with cluster(1) as (made, group):
        train(group, {}, 2)
        held = made.servers[0]._holding
        table, keys = held._tables["users"], held._tables["users"].keys()
        before, export = table.peek(keys), table.export_rows
        push = threading.Thread(
            target=held.push, args=(0, 77, 1, keys, np.ones((len(keys), DIM), np.float32))
        )

        def export_beside_a_push(*given, **options):
            push.start()
            push.join(0.2)
            return export(*given, **options)

        table.export_rows = export_beside_a_push
        found, _ = held.export_changes("copy", "")
        push.join(10)
        assert 77 not in found["clients"]
        rows = dict(zip(found["keys/users"].tolist(), found["rows/users"], strict=True))
        for key, row in zip(keys.tolist(), before, strict=True):
            assert (rows[key][: 4 * DIM].view(np.float32) == row).all()
        assert (table.peek(keys) == before - 1).all()


def test_a_push_that_was_half_done_when_its_slots_moved_counts_once() -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 2)
        keys = np.array([*model], np.int64)
        some = keys[: len(keys) // 2]
        group.push(0, some, np.ones((len(some), DIM), np.float32))
        made.start(2, servers=3)
        made.settle(lambda placement: placement.owners.count(2) == SLOTS // 3)
        group._update -= 1  # the same push again, now with all keys
        group.push(0, keys, np.ones((len(keys), DIM), np.float32))
        done = set(slots_of(some).tolist())
        for key, row in zip(keys.tolist(), group.rows(0, DIM, keys, insert=False), strict=True):
            applied = key in some or slots_of(np.array([key]))[0] not in done
            assert (row == model[key] - applied).all(), key


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replaced", "abandoned"])
def test_no_update_is_confirmed_by_a_server_that_was_given_up_and_lives(
    monkeypatch, how: str
) -> None:
    monkeypatch.setattr(server, "LEASE", 0.5)
    monkeypatch.setattr(server, "RENEW", 0.05)
    monkeypatch.setattr(server, "GIVEN_UP", 1.0)
    monkeypatch.setattr(server, "FETCH_TIMEOUT", 0.2)
    monkeypatch.setattr(server, "RETRY", 0.05)
    keys = np.arange(50)
    with cluster(2) as (made, group):
        table = group.open("users", OPTIONS)
        group.rows(table, DIM, keys, insert=True)  # its connections stay
        network = made.networks[1]
        network.there.clear()
        if how == "replaced":
            made.start(1, start=2)
        else:
            made.directory.ask(Abandon(1, 1))
        group.push(table, keys, np.ones((len(keys), DIM), np.float32))
        made.settle(lambda placement: len(made.recovered) == 1 and not placement.moves)
        made.settle(lambda placement: all(each.ready for each in placement.servers.values()))
        seen = np.zeros(DIM)
        other = made.client()
        for _ in range(3):
            group.rows(table, DIM, keys, insert=True)
            group.push(table, keys, np.ones((len(keys), DIM), np.float32))
            rows = other.rows(table, DIM, keys, insert=False)
            assert (rows == group.rows(table, DIM, keys, insert=False)).all()
            assert (rows[-1] != seen).all()
            seen = rows[-1]
        other.close()
        network.there.set()


def test_a_server_that_was_given_up_and_answers_loses_no_row() -> None:
    with cluster(3) as (made, group):
        model: Model = {}
        train(group, model, 3)
        made.directory.ask(Abandon(1, 1))
        made.settle(lambda placement: placement.servers.keys() == {0, 2})
        train(group, model, 3, seed=1)
        assert not made.recovered


def test_a_server_answers_while_the_master_is_away_until_its_lease_is_over(monkeypatch) -> None:
    monkeypatch.setattr(server, "RENEW", 0.05)
    with cluster(1) as (made, group):
        model: Model = {}
        train(group, model, 3)
        made.networks[0].there.clear()
        train(group, model, 3, seed=1)
        made.servers[0]._sure_until = 0.0
        with pytest.raises(OutdatedPlacementError, match="has not heard for 45 s that its slots"):
            made.servers[0].check_lease()
        trained = threading.Thread(target=train, args=(group, model, 3, 2))
        trained.start()
        trained.join(0.2)
        assert trained.is_alive()
        made.networks[0].there.set()
        trained.join(10)
        assert not trained.is_alive()


def test_a_lost_journal_ends_servers_and_requests_with_an_error() -> None:
    with cluster(1) as (made, group):
        train(group, {}, 2)
        made.kill(0)

        def lose(*_: object) -> None:
            made.directory.placement = Placement()

        last = server.EmbeddingServer(0, 2, 1, made.directory, holding.HeldSlots(), lose)
        with pytest.raises(InfrastructureError, match="The master has lost its journal"):
            last.run()
        with pytest.raises(InfrastructureError, match="The master has lost its journal"):
            group.rows(0, DIM, np.arange(5), insert=True)


def test_only_who_knows_the_secret_is_served() -> None:
    with cluster(1) as (made, group):
        server = made.servers[0]
        with pytest.raises((ConnectionError, InfrastructureError)):
            wire.connect("127.0.0.1", server.port, b"guess", 5.0)
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(200)):
            with (
                suppress(ConnectionError),
                socket.create_connection(("127.0.0.1", server.port), 5.0) as sock,
            ):
                sock.sendall(garbage)
        train(group, {}, 1)


def test_a_fork_has_connections_of_its_own() -> None:
    with cluster(1) as (_, group):
        train(group, {}, 1)
        before = group._client, set(group._links.values())
        group._pid -= 1  # as in a fork: another process has the connections, too
        group.rows(0, DIM, np.array([10**6], np.int64), insert=True)
        assert group._client != before[0]
        assert not before[1] & set(group._links.values())


def test_a_request_that_is_wrong_is_refused_in_a_sentence() -> None:
    with cluster(1) as (_, group):
        table = group.open("users", OPTIONS)
        with pytest.raises(
            ConfigurationError, match="A push of 1 keys with 4 values each has 20 bytes"
        ):
            group.push(table, np.array([1], np.int64), np.ones((1, 3), np.float32))
        with pytest.raises(ConfigurationError, match="knows no table 7"):
            group.rows(7, DIM, np.array([1], np.int64), insert=True)
        with pytest.raises(ConfigurationError, match="is open with the options"):
            group.open("users", '{"dim": 5}')


def test_large_batches_and_slots_fit_the_limit_of_a_frame(monkeypatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY", 1 << 15)
    monkeypatch.setattr(client, "CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr(holding, "PORTION", 1 << 13)
    whole = HashTable.of(decoded(OPTIONS))
    keys = np.random.default_rng(0).integers(0, 4000, 20_000)
    gradients = np.random.default_rng(1).normal(size=(len(keys), DIM)).astype(np.float32)
    with cluster(2) as (made, group):
        table = group.open("users", OPTIONS)
        assert (group.rows(table, DIM, keys, insert=True) == whole.lookup(keys)).all()
        made.start(0, start=2)  # another process, while the first one answers
        made.settle(
            lambda placement: placement.servers[0].start == 2 and placement.servers[0].ready
        )
        assert made.recovered == []
        group.push(table, keys, gradients)
        whole.update(keys, gradients)
        assert (group.rows(table, DIM, keys, insert=False) == whole.peek(keys)).all()


def test_an_update_in_several_requests_is_one_update(monkeypatch) -> None:
    monkeypatch.setattr(client, "CHUNK_KEYS", 100)
    options = msgspec.structs.replace(
        decoded(OPTIONS), optimizer=RowOptimizer(name="adam"), expiry=Expiry(steps=2)
    )
    whole = HashTable.of(options)
    keys = np.random.default_rng(0).integers(0, 500, 1000)
    gradients = np.random.default_rng(1).normal(size=(len(keys), DIM)).astype(np.float32)
    with cluster(2) as (made, group):
        table = group.open("users", options.json())
        for _ in range(2):
            assert (group.rows(table, DIM, keys, insert=True) == whole.lookup(keys)).all()
            group.push(table, keys, gradients)
            whole.update(keys, gradients)
        assert (group.rows(table, DIM, keys, insert=False) == whole.peek(keys)).all()
        assert {each._holding.table(table).step for each in made.servers.values()} == {whole.step}
        assert group.evict() == whole.evict() == 0


def test_a_server_that_dies_while_it_hands_over_loses_the_rest(monkeypatch) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 5)
        monkeypatch.setattr(holding, "PORTION", 1)
        old = made.servers[0]
        export = old._holding.export

        def dying(slots, **options):
            if slots[0] >= 100:
                old.close()
                raise ConnectionResetError
            return export(slots, **options)

        monkeypatch.setattr(old._holding, "export", dying)
        made.start(0, start=2)
        made.settle(
            lambda placement: placement.servers[0].start == 2 and placement.servers[0].ready
        )
        assert made.recovered == [SLOTS // 2 - 100]
        keys = np.array([*model])
        lost = np.isin(slots_of(keys), np.arange(100, SLOTS // 2))
        rows = group.rows(group.open("users", OPTIONS), DIM, keys, insert=False)
        assert (rows[~lost] == np.array([*model.values()])[~lost]).all()
        assert (rows[lost] == 0).all()


def test_a_server_without_memory_says_so(monkeypatch) -> None:
    def out_of_memory(*_arguments, **_options):
        raise MemoryError

    with cluster(1) as (made, group):
        table = group.open("users", OPTIONS)
        with monkeypatch.context() as context:
            context.setattr(made.servers[0]._holding, "rows", out_of_memory)
            with pytest.raises(NoRoomError, match="has too little memory for the request"):
                group.rows(table, DIM, np.arange(3), insert=True)
        assert (group.rows(table, DIM, np.arange(3), insert=True) == 3).all()


def test_no_request_takes_the_reply_to_an_earlier_one() -> None:
    options = msgspec.structs.replace(decoded(OPTIONS), memory_bytes=300_000).json()
    with cluster(2) as (_, group):
        table = group.open("users", options)
        keys = np.arange(100_000)
        of_first = slots_of(keys) < SLOTS // 2
        some, others = keys[of_first], keys[~of_first]
        group.rows(table, DIM, others[:50], insert=True)
        group.push(table, others[:25], np.ones((25, DIM), np.float32))
        before = group.rows(table, DIM, others[:50], insert=False)
        with pytest.raises(NoRoomError, match="no room for more"):
            group.rows(table, DIM, np.concatenate([some, others[50:100]]), insert=True)
        assert (group.rows(table, DIM, others[:50], insert=False) == before).all()
        link = group._link(1)
        assert link is not None
        link.send(  # and the caller is interrupted
            wire.RowFrame(wire.Op.PEEK, table=table, keys=50), (others[50:100],)
        )
        assert (group.rows(table, DIM, others[:50], insert=False) == before).all()


def test_a_wait_for_servers_is_bounded_and_explained() -> None:
    group = ServerGroup(LocalDirectory(), timeout=0.05)
    with pytest.raises(
        InfrastructureError, match="Waiting for the embedding servers to start; waited"
    ):
        group.rows(0, DIM, np.array([1], np.int64), insert=True)
