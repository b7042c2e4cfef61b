"""A Ray Data pipeline whose result goes to ``dlrover ingest``: ``python ray_data.py URL STREAM RUN``.

The token is the environment variable DLROVER_TOKEN. RUN names this run of the pipeline: whoever repeats a run
with the same name and the same data repeats nothing in the stream.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import ray
from ray.data import Datasink
from ray.data.block import BlockAccessor

from dlrover.sharding.ingest.client import Endpoint, Producer


class IngestSink(Datasink[int]):
    """Pushes each task's rows as a producer of its own. A task that Ray tries again pushes them again: they are kept once."""

    def __init__(self, url: str, token: str, stream: str, run: str) -> None:
        self.url, self.token, self.stream, self.run = url, token, stream, run

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        endpoint = Endpoint(self.url, self.token)
        producer = Producer(endpoint, self.stream, f"{self.run}-{ctx.task_idx}")
        try:
            return producer.push(rows(blocks))
        finally:
            endpoint.close()


def rows(blocks: Iterable[Any]) -> Iterable[dict[str, Any]]:
    for block in blocks:
        yield from BlockAccessor.for_block(block).iter_rows(public_row_format=True)


def main() -> None:
    url, stream, run = sys.argv[1:4]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    pipeline = ray.data.range(1000, override_num_blocks=8).map(
        lambda row: {"n": int(row["id"]), "square": int(row["id"]) ** 2}
    )
    pipeline.write_datasink(IngestSink(url, os.environ["DLROVER_TOKEN"], stream, run))
    print(f"pushed {pipeline.count()} rows")


if __name__ == "__main__":
    main()
