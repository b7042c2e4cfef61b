"""Other systems as producers: the examples, with the real system where it is installed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from dlrover.data.records import Records
from dlrover.data.sources.stream import Stream

EXAMPLES = Path(__file__).parents[2] / "examples" / "04_producers"
SQUARES = [{"n": n, "square": n * n} for n in range(1000)]


@pytest.fixture
def spark(monkeypatch) -> ModuleType:
    """The example for Spark, which needs nothing of Spark but `Row`."""
    pytest.importorskip("redis")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("spark")


def pushed(url: str) -> list[dict]:
    """What a training reads of the stream."""
    decode = lambda message: json.loads(message.value["row"])  # noqa: E731
    data = Records(Stream(f"{url}?stream=squares", until="now", decode=decode))
    found = sorted(data, key=lambda row: row["n"])
    data.close()
    return found


class Row:
    """What the example uses of a row of Spark."""

    def __init__(self, n: int) -> None:
        self.n = n

    def asDict(self, recursive: bool = False) -> dict:  # noqa: N802
        assert recursive
        return {"n": self.n, "square": self.n**2}


@pytest.fixture
def url(redis_port: int) -> str:
    import redis

    redis.Redis(port=redis_port).flushall()
    return f"redis://127.0.0.1:{redis_port}/0"


def test_partitions_of_spark_and_attempts_that_are_made_again(url, spark, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["push"], "BATCH", 40)
    partition = spark.pushing(url, "squares", "run-1")

    def attempt(index: int) -> int:
        return sum(partition(index, map(Row, range(125 * index, 125 * index + 125))))

    def broken(index: int) -> None:
        rows = (Row(n) if n < 125 * index + 90 else 1 / 0 for n in range(125 * index, 1000))
        with pytest.raises(ZeroDivisionError):
            list(partition(index, rows))

    with ThreadPoolExecutor(4) as executors:
        list(executors.map(broken, [2, 5, 2]))
        assert sum(executors.map(attempt, [0, 1, 2, 3, 4, 5, 6, 7, 3, 3, 0])) == 11 * 125
    assert pushed(url) == SQUARES


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ray_data(url, tmp_path) -> None:
    pytest.importorskip("ray")
    env = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(EXAMPLES / "ray_data.py"), url, "squares"]
    for _ in range(2):
        done = subprocess.run(
            [*command, "run-1"], env=env, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "pushed 1000 rows" in done.stdout
    assert pushed(url) == SQUARES
