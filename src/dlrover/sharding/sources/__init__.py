"""Samples in files and tables, by number, and in streams: for `Records` and ``ElasticDataset``."""

from dlrover.sharding.sources.parquet import Parquet
from dlrover.sharding.sources.stream import Message, Stream
from dlrover.sharding.sources.tables import Table
from dlrover.sharding.sources.text import Csv, JsonLines, Lines
from dlrover.sharding.sources.tfrecord import TfRecords

__all__ = ["Csv", "JsonLines", "Lines", "Message", "Parquet", "Stream", "Table", "TfRecords"]
