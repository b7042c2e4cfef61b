"""Tables by row, on SQLite and on servers of MariaDB and PostgreSQL."""

import logging
import pickle
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest

from dlrover import launched
from dlrover.data import Table
from dlrover.data.records import Records
from dlrover.data.sources import tables, waiting
from dlrover.errors import ConfigurationError, InfrastructureError
from tests.databases import PASSWORD, Server, mariadb, postgresql
from tests.support.children import Child
from tests.support.proxy import Proxy

sa = pytest.importorskip("sqlalchemy")

QUOTED = quote(PASSWORD, safe="")


@pytest.fixture(scope="session")
def maria_server() -> Iterator[Server]:
    with mariadb() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    with postgresql() as server:
        yield server


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("maria", marks=pytest.mark.slow),
        pytest.param("postgres", marks=pytest.mark.slow),
    ]
)
def url(request, tmp_path) -> str:
    if request.param == "sqlite":
        (tmp_path / "base").touch()
        return f"sqlite:///{tmp_path}/base"
    server: Server = request.getfixturevalue(f"{request.param}_server")
    return server.url()


def fill(url: str, keys, *, key_type=None, primary: bool = True, name: str = "users") -> None:
    """A table whose rows were written in another order than that of their keys."""
    metadata = sa.MetaData()
    key = sa.Column("id", key_type or sa.Integer, primary_key=primary, autoincrement=False)
    table = sa.Table(
        name, metadata, key, sa.Column("name", sa.String(40)), sa.Column("size", sa.Float)
    )
    engine = sa.create_engine(tables._url(sa, url))
    with engine.begin() as connection:
        table.drop(connection, checkfirst=True)
        table.create(connection)
        rows = [{"id": key, "name": f"n{key}", "size": 0.5} for key in reversed(list(keys))]
        if rows:
            connection.execute(table.insert(), rows)
    engine.dispose()


def execute(url: str, statement: str) -> None:
    engine = sa.create_engine(tables._url(sa, url))
    with engine.begin() as connection:
        connection.execute(sa.text(statement))
    engine.dispose()


@pytest.fixture
def open_table(url) -> Iterator:
    made = []

    def make(**options) -> Table:
        made.append(Table(url, "users", **options))
        return made[-1]

    yield make
    for table in made:
        table.close()


def ids(table) -> list:
    return [row["id"] for row in table]


def test_rows_in_the_order_of_the_key(url, open_table) -> None:
    keys = [*range(0, 50, 3), *range(1000, 1007)]
    fill(url, keys)
    for page in (1, 5, 24, 1000):
        table = open_table(page=page)
        assert len(table) == len(keys)
        assert ids(table) == keys
    assert table[2] == {"id": 6, "name": "n6", "size": 0.5}
    assert ids(pickle.loads(pickle.dumps(table))) == keys


def test_a_range_of_keys_and_columns(url, open_table) -> None:
    fill(url, range(100))
    table = open_table(first=10, last=89, page=7, columns=["name", "id"])
    assert ids(table) == list(range(10, 90))
    assert table[0] == {"name": "n10", "id": 10}
    assert len(open_table(first=200)) == 0


def test_keys_that_are_text(url, open_table) -> None:
    keys = sorted(f"{number:02d}" for number in range(30))
    fill(url, keys, key_type=sa.String(8))
    assert ids(open_table(page=4)) == keys


def test_rows_that_come_are_not_seen_and_those_that_go_are_an_error(url, open_table) -> None:
    fill(url, range(20))
    table = open_table(page=8)
    execute(url, "INSERT INTO users (id, name, size) VALUES (20, 'n20', 0.5)")
    assert ids(table) == list(range(20))
    table.close()
    execute(url, "DELETE FROM users WHERE id = 10")
    assert table[3]["id"] == 3
    with pytest.raises(InfrastructureError, match="has 7 rows from the key 8 on, and had 8"):
        table[12]


def test_what_cannot_be_read_in_an_order_is_refused(url, open_table) -> None:
    fill(url, range(5), primary=False)
    with pytest.raises(ConfigurationError, match="a primary key of 0 columns; name one unique"):
        open_table()
    with pytest.raises(
        ConfigurationError, match=r"The column id of table users .* no unique index"
    ):
        open_table(key="id")
    execute(url, "CREATE UNIQUE INDEX by_id ON users (id)")
    assert ids(open_table(key="id", page=2)) == list(range(5))
    execute(url, "INSERT INTO users (name) VALUES ('nobody')")
    with pytest.raises(ConfigurationError, match="have no id; the key must have a value"):
        open_table(key="id")
    with pytest.raises(ConfigurationError, match="has no column weight; it has id, name, size"):
        open_table(key="id", columns=["weight"])
    with pytest.raises(ConfigurationError, match="There is no table others of"):
        Table(url, "others")


def test_dealing_a_table(url, open_table) -> None:
    fill(url, range(1000))
    read = []

    class Counting(Table):
        def _read(self, number: int):
            read.append(number)
            return super()._read(number)

    data = Records(Counting(url, "users", page=100), shuffle=True, epochs=2)
    try:
        for _ in data.until_end():
            assert sorted(ids(data)) == list(range(1000))
    finally:
        data.close()
        data.source.close()
    assert len(read) <= 20


@pytest.mark.slow
@pytest.mark.parametrize("server", ["maria_server", "postgres_server"])
def test_a_database_that_is_away_is_waited_for_and_its_password_is_not_shown(
    request, server, caplog, monkeypatch
) -> None:
    found = request.getfixturevalue(server)
    url = found.url().replace("mysql://", "mariadb://")
    fill(url, range(20))
    table = Table(url, "users", page=5)
    assert table[0]["id"] == 0
    found.stop()
    with ThreadPoolExecutor(1) as thread, caplog.at_level(logging.WARNING):
        row = thread.submit(table.__getitem__, 19)
        time.sleep(0.3)
        assert not row.done()
        found.start()
        assert row.result()["id"] == 19
    table.close()
    assert "cannot be read; retrying" in caplog.text

    wrong = url.replace(QUOTED, f"{QUOTED}x")
    with pytest.raises(ConfigurationError, match="cannot be read") as refused:
        Table(wrong, "users")
    monkeypatch.setattr(waiting, "PATIENCE", 0.2)
    found.stop()
    try:
        with pytest.raises(InfrastructureError, match="cannot be read") as away:
            table[9]
    finally:
        found.start()
        table.close()
    said = f"{refused.value}{away.value}{table!r}{caplog.text}"
    assert PASSWORD not in said
    assert QUOTED not in said


@pytest.mark.slow
@pytest.mark.parametrize("server", ["maria_server", "postgres_server"])
def test_a_table_is_opened_once_its_database_is_there(request, server, caplog, monkeypatch) -> None:
    """A worker may start again while the database does."""
    found = request.getfixturevalue(server)
    url = found.url()
    fill(url, range(20))
    found.stop()
    try:
        with ThreadPoolExecutor(1) as thread, caplog.at_level(logging.WARNING):
            table = thread.submit(Table, url, "users")
            while "cannot be read; retrying" not in caplog.text:
                assert not table.done(), table.exception()
                time.sleep(0.01)
            found.start()
            assert len(table.result()) == 20
        with pytest.raises(ConfigurationError, match="cannot be read"):
            Table(url.rpartition("/")[0] + "/nowhere", "users")
        found.stop()
        monkeypatch.setattr(waiting, "PATIENCE", 0.2)
        with pytest.raises(InfrastructureError, match="cannot be read"):
            Table(url, "users")
    finally:
        found.stop()
        found.start()


@pytest.mark.parametrize(
    ("kind", "error", "away"),
    [
        ("postgresql", "FATAL:  the database system is starting up", True),
        ("postgresql", "FATAL:  the database system is not yet accepting connections", True),
        ("postgresql", "FATAL:  server login has been failing, try again later", True),
        ("postgresql", 'FATAL:  password authentication failed for user "me"', False),
        ("mysql", (1040, "Too many connections"), True),
        ("mysql", (1203, "User me already has more than 'max_user_connections'"), True),
        ("mysql", (1226, "User 'me' has exceeded the 'max_user_connections' resource"), True),
        ("mysql", (1045, "Access denied for user 'me'"), False),
    ],
)
def test_a_refusal_that_may_pass_is_distinguished(
    monkeypatch, kind: str, error, away: bool
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.05)
    arguments = error if isinstance(error, tuple) else (error,)
    refused = sa.exc.OperationalError("connect", {}, Exception(*arguments))

    def refuse(*_: object) -> None:
        raise refused

    monkeypatch.setattr(Table, "_engine", refuse)
    with pytest.raises(InfrastructureError if away else ConfigurationError, match="cannot be read"):
        Table(f"{kind}://host/base", "users")


@pytest.mark.parametrize(("kind", "driver"), [("mysql", "pymysql"), ("postgresql", "psycopg")])
def test_a_host_that_no_name_server_knows_is_waited_for_at_a_restart_only(
    monkeypatch, kind: str, driver: str
) -> None:
    pytest.importorskip(driver)

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigurationError, match="Name or service not known"):
        Table(f"{kind}://nowhere/base", "users")
    monkeypatch.setattr(waiting, "PATIENCE", 0.05)
    monkeypatch.setattr(launched, "given", launched.Given(round=2))
    with pytest.raises(InfrastructureError, match="Name or service not known"):
        Table(f"{kind}://nowhere/base", "users")


@pytest.mark.slow
@pytest.mark.parametrize("server", ["maria_server", "postgres_server"])
def test_what_is_refused_to_a_worker_that_starts_again_is_no_mistake_of_the_program(
    request, server, monkeypatch
) -> None:
    """As during the rotation of a password, or while a table is replaced."""
    url = request.getfixturevalue(server).url()
    fill(url, range(20))
    refused = url.replace(QUOTED, f"{QUOTED}x"), "users"
    missing = url, "elsewhere"
    monkeypatch.setattr(waiting, "PATIENCE", 0.2)
    for given, error in (
        (launched.Given(round=1), ConfigurationError),
        (launched.Given(round=2), InfrastructureError),
    ):
        monkeypatch.setattr(launched, "given", given)
        with pytest.raises(error, match="cannot be read") as said:
            Table(*refused)
        assert QUOTED not in str(said.value)
        with pytest.raises(error, match=r"(?i)there is no"):
            Table(*missing)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["maria_server", "postgres_server"])
def test_a_table_that_is_gone_costs_no_sample(request, server) -> None:
    url = request.getfixturevalue(server).url()
    fill(url, range(200))
    table = Table(url, "users", page=50)
    execute(url, "DROP TABLE users")
    data = Records(table)
    try:
        with pytest.raises(InfrastructureError, match="cannot be read"):
            list(data)
    finally:
        data.close()
        table.close()


@pytest.mark.slow
@pytest.mark.parametrize("server", ["maria_server", "postgres_server"])
def test_a_server_that_does_not_answer_is_asked_again(request, server, caplog) -> None:
    """A stopped process and a lost machine close no connection."""
    found = request.getfixturevalue(server)
    fill(found.url(), range(20))
    proxy = Proxy(found.port)
    table = Table(
        found.url().replace(f":{found.port}/", f":{proxy.port}/") + "?read_timeout=0.5",
        "users",
        page=5,
    )
    try:
        assert table[0]["id"] == 0
        proxy.stall()
        with caplog.at_level(logging.WARNING):
            assert table[19]["id"] == 19
    finally:
        table.close()
        proxy.close()
    assert "cannot be read; retrying" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
def test_a_server_that_never_answers_is_no_endless_wait(kind, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{kind}://me:geheim@127.0.0.1:{silent.getsockname()[1]}/base"
        with pytest.raises(InfrastructureError, match=r"cannot be read: .*time"):
            Table(f"{url}?connect_timeout=2&read_timeout=1", "users")
    with pytest.raises(ConfigurationError, match="read_timeout of the URL is 'soon'; accepted"):
        Table(f"{url}?read_timeout=soon", "users")


def test_wrong_urls_are_named_without_their_secrets(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="URL of a database cannot be read") as error:
        Table("geheim@host", "users")
    assert "geheim" not in str(error.value)
    with pytest.raises(ConfigurationError, match=r"There is no file .*nowhere of SQLite"):
        Table(f"sqlite:///{tmp_path}/nowhere", "users")
    with pytest.raises(ConfigurationError, match="page is 0"):
        Table("sqlite://", "users", page=0)


def test_secrets_of_the_url_are_cut_out_of_errors(tmp_path) -> None:
    (tmp_path / "base").touch()
    fill(f"sqlite:///{tmp_path}/base", range(3))
    table = Table(f"sqlite:///{tmp_path}/base", "users")
    table._url = sa.engine.make_url("postgresql://me:geheim@host/base?sslpassword=tief")
    assert table._error_text(Exception("no geheim\nor tief")) == "no *** or ***"
    assert repr(table) == "table users of postgresql://host/base"
    table.close()


def test_a_process_that_was_forked_has_a_connection_of_its_own(url, open_table) -> None:
    fill(url, range(20))
    table = open_table(page=5)
    assert table[0]["id"] == 0
    assert Child(lambda: ids(table)).result() == list(range(20))
    table._read_last.clear()
    assert ids(table) == list(range(20))
