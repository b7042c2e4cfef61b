"""Other systems as producers: the examples, with the real system where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dlrover.sharding.ingest.client import Endpoint, Reader
from dlrover.sharding.ingest.server import Server
from dlrover.sharding.ingest.streams import Streams

EXAMPLES = Path(__file__).parents[2] / "examples" / "04_ingest"


@pytest.fixture
def url(tmp_path) -> Iterator[str]:
    streams = Streams(tmp_path / "streams", {"squares": 4}, 1 << 30)
    server = Server(("127.0.0.1", 0), streams, "secret")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()
    streams.close()


def pushed(url: str) -> list[dict]:
    there = Endpoint(url, "secret")
    reader = Reader(there, "squares")
    found = []
    for partition, (at, end) in enumerate(reader.bounds()):
        assert at == 0
        records = reader.read(partition, 0, end, 1000).records
        assert len(records) == end
        found += [json.loads(record) for record in records]
    there.close()
    return sorted(found, key=lambda row: row["n"])


SQUARES = [{"n": n, "square": n * n} for n in range(1000)]


class Row:
    """What the example uses of a row of Spark."""

    def __init__(self, n: int) -> None:
        self.n = n

    def asDict(self, recursive: bool = False) -> dict:  # noqa: N802
        assert recursive
        return {"n": self.n, "square": self.n**2}


def test_partitions_of_spark_and_attempts_that_are_made_again(url) -> None:
    spec = importlib.util.spec_from_file_location("spark_example", EXAMPLES / "spark.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    partition = example.push(url, "secret", "squares", "run-1")

    def attempt(index: int, rows: int = 125) -> int:
        return sum(partition(index, map(Row, range(125 * index, 125 * index + rows))))

    with ThreadPoolExecutor(4) as executors:
        assert sum(executors.map(attempt, [0, 1, 2, 3, 4, 5, 6, 7, 3, 0])) == 1250
    assert pushed(url) == SQUARES


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ray_data(url, tmp_path) -> None:
    pytest.importorskip("ray")
    env = {
        **os.environ,
        "DLROVER_TOKEN": "secret",
        "HOME": str(tmp_path),
        "RAY_AUTH_MODE": "disabled",
    }
    command = [sys.executable, str(EXAMPLES / "ray_data.py"), url, "squares"]
    for _ in range(2):
        done = subprocess.run(
            [*command, "run-1"], env=env, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "pushed 1000 rows" in done.stdout
    assert pushed(url) == SQUARES
