"""Read-only servers: they follow a training's checkpoints and answer HTTP and the raw protocol."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from dlrover.cli import embedding
from dlrover.embedding.remote import wire
from dlrover.embedding.remote.client import ServerGroup
from dlrover.embedding.remote.saving import TableCheckpoints
from dlrover.embedding.remote.wire import Op, ReplyStatus, RowFrame
from dlrover.embedding.serving import raw
from dlrover.embedding.serving.app import ReadOnlyServer
from dlrover.embedding.serving.follower import CheckpointFollower
from dlrover.embedding.serving.raw import ServedTables
from dlrover.embedding.table import HashTable
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError
from tests.embedding.servers import DIM, OPTIONS, Cluster, Model, cluster, expire, train

HOUR = 3600.0
"""Seconds between looks in tests, which look themselves."""


@contextmanager
def serving(place: Path) -> Iterator[ReadOnlyServer]:
    with closing(ReadOnlyServer(str(place), "token", poll=HOUR)) as server:
        server.start()
        yield server


def asked(
    server: ReadOnlyServer, method: str, path: str, body: object = None, token: str = "token"
):
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        data = body if isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, data, {"Authorization": f"Bearer {token}"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def serves(follower: CheckpointFollower, model: Model) -> bool:
    keys = np.array(sorted(model), np.int64)
    rows = follower.served.tables["users"].peek(keys)
    return len(follower.served.tables["users"]) == len(model) and all(
        (row == model[key]).all() for key, row in zip(keys.tolist(), rows, strict=True)
    )


def test_what_a_training_saves_is_followed_with_what_it_removes(tmp_path: Path) -> None:
    with cluster(2) as (made, group):
        checkpoints, model = TableCheckpoints(made.directory, str(tmp_path)), Model()
        train(group, model, 2)
        checkpoints.save(1)
        checkpoints.wait()
        follower = CheckpointFollower(str(tmp_path))
        assert serves(follower, model)
        tables = follower.served.tables
        for step in (2, 3):  # one look for each, then one for two
            train(group, model, 1, seed=step)
            expire(group, model, 50)
            checkpoints.save(step)
            checkpoints.wait()
            if step == 2:
                follower.look()
                assert serves(follower, model)
        train(group, model, 1, seed=9)
        checkpoints.save(4)
        checkpoints.wait()
        follower.look()
        assert serves(follower, model)
        assert follower.served.tables is tables, "increments are applied in place"
        lag = follower.lag()
        assert (lag.step, lag.newest_step, lag.behind, lag.error) == (4, 4, 0, "")
        expire(group, model, 50)
        checkpoints.save(5, full=True)
        checkpoints.wait()
        follower.look()
        assert serves(follower, model)
        assert follower.served.tables is not tables


def followed(
    made: Cluster, group: ServerGroup, place: Path, later: str = "users"
) -> tuple[CheckpointFollower, Model, Model]:
    """Save steps 1 and 2, a table that is opened ``later`` between them; return what follows them and serves the first, and the rows of each."""
    checkpoints, model = TableCheckpoints(made.directory, str(place)), Model()
    train(group, model, 1)
    checkpoints.save(1)
    checkpoints.wait()
    follower, before = CheckpointFollower(str(place)), model.copy()
    group.open(later, OPTIONS)
    train(group, model, 1, seed=1)
    checkpoints.save(2)
    checkpoints.wait()
    return follower, before, model


@pytest.mark.parametrize("later", ["users", "items"])
def test_a_damaged_part_leaves_all_rows_as_they_were(tmp_path: Path, later: str) -> None:
    with cluster(2) as (made, group):
        follower, before, _model = followed(made, group, tmp_path, later)
        served = follower.served.id
        (part,) = [path for path in tmp_path.glob("*/part-1.rows") if served not in str(path)]
        part.write_bytes(part.read_bytes()[:-1])
        follower.look()
        assert serves(follower, before)
        started = CheckpointFollower(str(tmp_path))
        assert started.served.step == started.lag().behind == 1
        assert "is damaged" in started.lag().error
        assert serves(started, before)


def test_an_increment_that_was_applied_in_part_leaves_nothing_of_it(tmp_path: Path) -> None:
    with cluster(1) as (made, group):
        checkpoints, model = TableCheckpoints(made.directory, str(tmp_path)), Model()
        train(group, model, 2)
        items = group.open("items", OPTIONS)
        group.rows(items, DIM, np.arange(5), insert=True)
        checkpoints.save(1)
        checkpoints.wait()
        first = {key: row.copy() for key, row in model.items()}
        follower = CheckpointFollower(str(tmp_path))
        train(group, model, 2, seed=1)
        group.push(items, np.arange(5), np.ones((5, DIM), np.float32))
        checkpoints.save(2)
        checkpoints.wait()
        table = follower.served.tables["items"]
        restore = table.restore_rows
        table.restore_rows = _out_of_memory
        follower.look()
        assert follower.lag().error == "There is no memory for it."
        table.restore_rows = restore
        assert checkpoints.load(1) == 1
        train(group, first, 1, seed=2)
        checkpoints.save(3)
        checkpoints.wait()
        follower.look()
        assert follower.served.step == 3
        assert serves(follower, first)


def _out_of_memory(*_given: object) -> None:
    raise MemoryError


def test_an_older_chain_that_is_damaged_stops_neither_training_nor_serving(tmp_path: Path) -> None:
    with cluster(1) as (made, group):
        checkpoints, model = TableCheckpoints(made.directory, str(tmp_path)), Model()
        for step in (1, 2):
            train(group, model, 1, seed=step)
            checkpoints.save(step)
            checkpoints.wait()
        (first,) = [
            path
            for path in tmp_path.glob("*/manifest.json")
            if not json.loads(path.read_bytes())["parent"]
        ]
        first.write_bytes(first.read_bytes()[:50])
        for step in (3, 4):  # adds to what is damaged; then full again
            train(group, model, 1, seed=step)
            checkpoints.save(step)
            checkpoints.wait()
        follower = CheckpointFollower(str(tmp_path))
        assert follower.served.step == 4
        assert "manifest.json is damaged" in follower.lag().error
        assert serves(follower, model)
        assert checkpoints.load() == 4


def test_damage_is_reported_and_what_was_served_still_is(tmp_path: Path) -> None:
    with cluster(1) as (made, group):
        follower, before, model = followed(made, group, tmp_path)
    (part,) = [
        path for path in tmp_path.glob("*/part-0.rows") if follower.served.id not in str(path)
    ]
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    follower.look()
    lag = follower.lag()
    assert (lag.step, lag.newest_step, lag.behind) == (1, 2, 1)
    assert "is damaged" in lag.error
    assert serves(follower, before)
    part.write_bytes(whole)
    follower.look()
    assert follower.lag().error == ""
    assert serves(follower, model)


def test_a_file_is_served_and_its_successor_after_it(tmp_path: Path) -> None:
    table, keys = HashTable(DIM, optimizer="adam"), np.arange(10)
    table.lookup(keys)
    table.save(tmp_path / "items")
    follower = CheckpointFollower(str(tmp_path / "items"))
    served = follower.served
    follower.look()
    assert follower.served is served
    table.update(keys, np.ones((10, DIM)))
    table.save(tmp_path / "items")
    follower.look()
    assert (follower.served.tables["items"].peek(keys) == table.peek(keys)).all()
    assert follower.lag().step == 1
    (tmp_path / "items").unlink()
    follower.look()
    assert "items cannot be read: No such file or directory" in follower.lag().error
    with pytest.raises(ConfigurationError, match="has no embedding checkpoint"):
        CheckpointFollower(str(tmp_path))


def test_serving_begins_with_the_first_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, tries, ended = tmp_path / "items", [], threading.Event()

    def make() -> CheckpointFollower:
        tries.append(1)
        if len(tries) == 3:
            HashTable(DIM).save(place)
        return CheckpointFollower(str(place))

    follower = embedding._when_stored(make, 60.0, 0.01, ended)
    assert [*follower.served.tables] == ["items"]
    said = "items has no embedding checkpoint. Waiting for the first one: 0 s of 60 s.\n"
    assert capsys.readouterr().out == f"{tmp_path}/{said}"
    place.unlink()
    tries = [1] * 9
    with pytest.raises(ConfigurationError, match="has no embedding checkpoint"):
        embedding._when_stored(make, 0.0, 0.01, ended)
    ended.set()
    assert embedding._when_stored(make, 60.0, 0.01, ended) is None


@pytest.fixture
def table(tmp_path: Path) -> HashTable:
    made = HashTable(DIM)
    made.lookup(np.arange(5))
    made.lookup(["anna"])
    made.save(tmp_path / "users")
    return made


def test_http_gives_rows_and_the_lag(tmp_path: Path, table: HashTable) -> None:
    with serving(tmp_path / "users") as server:
        status, found = asked(server, "POST", "/lookup", {"keys": [3, 77, -(2**63)]})
        assert (status, found["table"], found["step"]) == (200, "users", 0)
        rows = np.array(found["rows"], np.float32)
        assert (rows == table.peek(np.array([3, 77, -(2**63)]))).all()
        _, found = asked(server, "POST", "/lookup", {"keys": ["anna"], "table": "users"})
        assert (np.array(found["rows"], np.float32) == table.peek(["anna"])).all()
        assert asked(server, "POST", "/lookup", {"keys": []})[1]["rows"] == []
        status, found = asked(server, "GET", "/status")
        assert status == 200
        assert found["tables"] == {"users": {"number": 0, "dim": DIM, "rows": 6}}
        assert found["lag"]["behind"] == 0


def test_http_refuses_what_is_wrong(tmp_path: Path, table: HashTable) -> None:
    cases = [
        (("POST", "/lookup", {"keys": [1]}, "other"), 401, "Authorization is not Bearer"),
        (("GET", "/lookup"), 404, "There is no GET /lookup."),
        (("POST", "/lookup", b"{"), 400, "The body is wrong"),
        (("POST", "/lookup", {"keys": [2**63]}), 400, "keys are wrong"),
        (("POST", "/lookup", {"keys": [1, "a"]}), 400, "keys are wrong"),
        (("POST", "/lookup", {"keys": [1, "2"]}), 400, "keys are wrong"),
        (("POST", "/lookup", {"keys": [1.5]}), 400, "The body is wrong"),
        (("POST", "/lookup", {"keys": [1], "table": "items"}), 404, "accepted are users"),
        (("POST", "/lookup", {"keys": [0] * ((1 << 20) + 1)}), 400, "at most 1048576"),
    ]
    with serving(tmp_path / "users") as server:
        for request, status, message in cases:
            found = asked(server, *request)
            assert found[0] == status, request[:2]
            assert message in found[1]["error"]
        for length in ("33554433", "x", "-1", "9" * 5000):
            with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as sent:
                headers = {"Authorization": "Bearer token", "Content-Length": length}
                sent.request("POST", "/lookup", None, headers)
                assert sent.getresponse().status == 413


def test_the_raw_protocol_gives_rows_and_changes_nothing(tmp_path: Path, table: HashTable) -> None:
    with serving(tmp_path / "users") as server:
        address = f"127.0.0.1:{server.raw_port}"
        with closing(ServedTables(address, "token")) as client:
            keys = np.arange(-3, 9)
            assert (client.peek("users", keys) == table.peek(keys)).all()
            assert client.report().tables["users"].rows == 6
            with pytest.raises(ConfigurationError, match="table is 'items'; accepted are users"):
                client.peek("items", keys)
        with pytest.raises(InfrastructureError, match="does not answer, or has another token"):
            ServedTables(address, "other")
        secret = raw.secret_of("token")
        with closing(wire.connect("127.0.0.1", server.raw_port, secret, 10)) as sock:
            receiver = wire.FrameReceiver(sock)
            for frame in (
                RowFrame(Op.PUSH, keys=1), RowFrame(Op.PEEK, table=1), RowFrame(Op.PEEK, keys=2), RowFrame(Op.EVICT),
            ):  # fmt: skip
                wire.send(sock, frame)
                assert receiver.receive().status is ReplyStatus.REFUSED
        with pytest.raises(ConfigurationError, match="address is 'here'; HOST:PORT is accepted"):
            ServedTables("here", "token")
    with pytest.raises(InfrastructureError, match="does not answer"):
        ServedTables(address, "token")


def test_a_client_goes_on_with_another_server(tmp_path: Path, table: HashTable) -> None:
    keys = np.arange(5)
    with serving(tmp_path / "users") as server:
        port = server.raw_port
        client = ServedTables(f"127.0.0.1:{port}", "token")
        assert (client.peek("users", keys) == table.peek(keys)).all()
    with pytest.raises(InfrastructureError, match="does not answer"):
        client.peek("users", keys)
    table.update(keys, np.ones((5, DIM)))
    table.save(tmp_path / "users")
    with closing(ReadOnlyServer(str(tmp_path / "users"), "token", raw_port=port)) as server:
        server.start()
        for _ in range(2):
            assert (client.peek("users", keys) == table.peek(keys)).all()
    with closing(ReadOnlyServer(str(tmp_path / "users"), "token", raw_port=port)) as server:
        server.start()
        assert client.report().tables["users"].rows == 6
    client.close()


def test_a_reply_that_came_too_late_is_of_no_other_request(
    tmp_path: Path, table: HashTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(tmp_path / "users") as server,
        closing(ServedTables(f"127.0.0.1:{server.raw_port}", "token")) as client,
    ):
        client.report()
        with monkeypatch.context() as context:
            context.setattr(wire.FrameReceiver, "receive", _late)
            with pytest.raises(InfrastructureError, match="timed out"):
                client.peek("users", np.arange(2))
        keys = np.arange(2, 4)
        assert (client.peek("users", keys) == table.peek(keys)).all()


def _late(_receiver: wire.FrameReceiver) -> RowFrame:
    raise TimeoutError("timed out")


def test_clients_give_keys_as_to_a_table(tmp_path: Path, table: HashTable) -> None:
    with (
        serving(tmp_path / "users") as server,
        closing(ServedTables(f"127.0.0.1:{server.raw_port}", "token")) as client,
    ):
        assert (client.peek("users", ["anna"]) == table.peek(["anna"])).all()
        with pytest.raises(ConfigurationError, match="keys are of type float64"):
            client.peek("users", np.array([1.5]))


def test_a_token_may_have_any_letters(tmp_path: Path, table: HashTable) -> None:
    with closing(ReadOnlyServer(str(tmp_path / "users"), "geheim-é", poll=HOUR)) as server:
        server.start()
        token = "geheim-é".encode().decode("latin-1")  # http.client sends bytes so
        assert asked(server, "GET", "/status", token=token)[0] == 200


def test_tables_keep_their_numbers(tmp_path: Path) -> None:
    """A training that starts anew may open its tables in another order, or others."""
    rows = {"users": 7, "items": 5, "words": 3}

    def saved(names: list[str]) -> None:
        with cluster(1) as (made, group):
            checkpoints = TableCheckpoints(made.directory, str(tmp_path))
            for name in names:
                keys = np.arange(rows[name])
                group.rows(group.open(name, OPTIONS), DIM, keys, insert=True)
            checkpoints.save(1)
            checkpoints.wait()

    saved(["users", "items", "words"])
    with (
        serving(tmp_path) as server,
        closing(ServedTables(f"127.0.0.1:{server.raw_port}", "token")) as client,
    ):

        def has(name: str) -> bool:
            return client.peek(name, np.arange(9)).any(axis=1).sum() == rows[name]

        assert all(has(name) for name in rows)
        saved(["words", "items", "users"])
        server.follower.look()
        assert all(has(name) for name in rows)
        saved(["words", "items"])
        server.follower.look()
        assert has("items")
        assert has("words")
        with pytest.raises(ProtocolError, match="has no table users"):
            has("users")
        assert {name: info.number for name, info in client.report().tables.items()} == {
            "items": 1,
            "words": 2,
        }
        with pytest.raises(ConfigurationError, match="table is 'users'; accepted are words, items"):
            has("users")


def test_a_client_goes_on_with_rows_of_another_dimension(tmp_path: Path, table: HashTable) -> None:
    keys = np.arange(5)
    with (
        serving(tmp_path / "users") as server,
        closing(ServedTables(f"127.0.0.1:{server.raw_port}", "token")) as client,
    ):
        assert (client.peek("users", keys) == table.peek(keys)).all()
        wider = HashTable(2 * DIM)
        wider.lookup(keys)
        wider.save(tmp_path / "users")
        server.follower.look()
        assert (client.peek("users", keys) == wider.peek(keys)).all()


def test_rows_are_never_torn_while_an_increment_is_applied(tmp_path: Path) -> None:
    """Each increment sets all numbers of a row to one value; readers see one value in each row."""
    keys, torn, reads, ended = np.arange(2000), [], [], threading.Event()
    with cluster(1) as (made, group):
        checkpoints, users = (
            TableCheckpoints(made.directory, str(tmp_path)),
            group.open("users", OPTIONS),
        )
        group.rows(users, DIM, keys, insert=True)
        checkpoints.save(0)
        checkpoints.wait()
        with serving(tmp_path) as server:

            def read() -> None:
                with closing(ServedTables(f"127.0.0.1:{server.raw_port}", "token")) as client:
                    while not ended.is_set():
                        rows = client.peek("users", keys)
                        reads.append(1)
                        torn.extend(np.flatnonzero((rows != rows[:, :1]).any(1)).tolist())

            reader = threading.Thread(target=read)
            reader.start()
            for step in range(1, 11):
                group.push(users, keys, np.full((2000, DIM), -1, np.float32))
                checkpoints.save(step)
                checkpoints.wait()
                server.follower.look()
            ended.set()
            reader.join()
            assert (server.follower.served.tables["users"].peek(keys) == 13).all()
    assert reads
    assert not torn
