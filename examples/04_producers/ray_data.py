"""A Ray Data pipeline whose result goes to a stream of Redis: ``python ray_data.py URL STREAM RUN``.

RUN names this run of the pipeline: who repeats a run with the same name and the same data adds nothing to the stream.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import ray
from push import push
from ray.data import Datasink
from ray.data.block import BlockAccessor


class RedisSink(Datasink[int]):
    """Adds each task's rows as a producer of its own. A task that Ray tries again adds what is missing."""

    def __init__(self, url: str, stream: str, run: str) -> None:
        self.url, self.stream, self.run = url, stream, run

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        return push(self.url, self.stream, f"{self.run}-{ctx.task_idx}", rows(blocks))


def rows(blocks: Iterable[Any]) -> Iterable[dict[str, Any]]:
    for block in blocks:
        yield from BlockAccessor.for_block(block).iter_rows(public_row_format=True)


def main() -> None:
    url, stream, run = sys.argv[1:4]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    pipeline = ray.data.range(1000, override_num_blocks=8).map(
        lambda row: {"n": int(row["id"]), "square": int(row["id"]) ** 2}
    )
    pipeline.write_datasink(RedisSink(url, stream, run))
    print(f"pushed {pipeline.count()} rows")


if __name__ == "__main__":
    main()
