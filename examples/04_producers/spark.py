"""A Spark job whose result goes to a stream of Redis: ``spark-submit --py-files push.py spark.py URL STREAM RUN``.

RUN names this run of the job. The package redis has to be installed where the executors run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from push import push


def pushing(url: str, stream: str, run: str) -> Callable[[int, Iterable[Any]], Iterator[int]]:
    """A function for ``RDD.mapPartitionsWithIndex``: adds the rows of a partition, and gives their number.

    Each partition is a producer of its own. An attempt that Spark makes again adds what is missing, so the order
    within a partition must not depend on the attempt.
    """

    def partition(index: int, rows: Iterable[Any]) -> Iterator[int]:
        yield push(url, stream, f"{run}-{index}", (row.asDict(recursive=True) for row in rows))

    return partition


def main() -> None:
    from pyspark.sql import SparkSession

    url, stream, run = sys.argv[1:4]
    spark = SparkSession.builder.appName("to-dlrover").getOrCreate()
    frame = spark.range(1000).selectExpr("id AS n", "id * id AS square")
    pushed = frame.rdd.mapPartitionsWithIndex(pushing(url, stream, run))
    print(f"pushed {pushed.sum()} rows")


if __name__ == "__main__":
    main()
