"""A Spark job whose result goes to ``dlrover ingest``: ``spark-submit spark.py URL STREAM RUN``.

The token is the environment variable DLROVER_TOKEN of the driver. RUN names this run of the job. DLRover has to be
installed where the executors run; `push` needs nothing of Spark.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dlrover.sharding.ingest.client import Endpoint, Producer


def push(
    url: str, token: str, stream: str, run: str
) -> Callable[[int, Iterable[Any]], Iterator[int]]:
    """A function for ``RDD.mapPartitionsWithIndex``: pushes the rows of a partition, and gives their number.

    Each partition is a producer of its own. An attempt that Spark makes again pushes the same rows in the same
    order, and they are kept once. So the order within a partition must not depend on the attempt.
    """

    def partition(index: int, rows: Iterable[Any]) -> Iterator[int]:
        endpoint = Endpoint(url, token)
        producer = Producer(endpoint, stream, f"{run}-{index}")
        try:
            yield producer.push(row.asDict(recursive=True) for row in rows)
        finally:
            endpoint.close()

    return partition


def main() -> None:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - `push` is used without it

    url, stream, run = sys.argv[1:4]
    spark = SparkSession.builder.appName("to-dlrover").getOrCreate()
    frame = spark.range(1000).selectExpr("id AS n", "id * id AS square")
    pushed = frame.rdd.mapPartitionsWithIndex(push(url, os.environ["DLROVER_TOKEN"], stream, run))
    print(f"pushed {pushed.sum()} rows")


if __name__ == "__main__":
    main()
