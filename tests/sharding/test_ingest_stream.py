"""What was pushed to the endpoint is dealt once, whoever reads it."""

import json
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from dlrover.errors import ConfigurationError
from dlrover.sharding.ingest.client import Endpoint, Producer
from dlrover.sharding.ingest.server import Server
from dlrover.sharding.ingest.streams import Streams
from dlrover.sharding.records import Records
from dlrover.sharding.sources.stream import Address, Stream

pytestmark = pytest.mark.slow


@pytest.fixture
def port(tmp_path) -> Iterator[int]:
    streams = Streams(tmp_path, {"clicks": 3}, 1 << 30)
    server = Server(("127.0.0.1", 0), streams, "secret")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()
    streams.close()


def push(port: int, name: str, values: range) -> None:
    there = Endpoint(f"http://127.0.0.1:{port}", "secret")
    Producer(there, "clicks", name).push(values)
    there.close()


def clicks(port: int) -> Stream:
    url = f"ingest://:secret@127.0.0.1:{port}/clicks"
    return Stream(url, decode=lambda message: json.loads(message.value), until="now")


def test_a_restore_goes_on_behind_what_was_learned_from(port) -> None:
    for name in range(6):
        push(port, f"p{name}", range(100 * name, 100 * name + 100))
    data = Records(clicks(port), shard=7)
    seen: Counter[int] = Counter()
    for count, sample in enumerate(data, 1):
        seen[sample] += 1
        if count == 250:
            state = data.state_dict()
            break
    data.close()
    again = Records(clicks(port), shard=20)
    again.load_state_dict(state)
    seen.update(again)
    again.close()
    assert seen == dict.fromkeys(range(600), 1)


def test_wrong_addresses(port, monkeypatch) -> None:
    for url, message in (
        (f"ingest://127.0.0.1:{port}", "must name one stream"),
        (f"ingest://127.0.0.1:{port}/clicks?x=1", "has an option x"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Stream(url).broker()
    for token in ("secret", "wrong"):
        monkeypatch.setenv("DLROVER_INGEST_TOKEN", token)
        broker = Stream(f"ingest://127.0.0.1:{port}/clicks").broker()
        if token == "secret":
            assert broker.bounds() == [(0, 0)] * 3
        else:
            with pytest.raises(ConfigurationError, match="401"):
                broker.bounds()
        broker.close()
    assert "geheim" not in str(Address("ingest://:geheim@host/clicks"))
