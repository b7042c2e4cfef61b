"""Sharded data: datasets leased in shards to whichever worker is free, from files, tables and streams."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.data.dataloader import ElasticDataLoader
    from dlrover.data.dataset import ElasticDataset
    from dlrover.data.records import Records
    from dlrover.data.sources.files import TfRecords
    from dlrover.data.sources.parquet import Parquet
    from dlrover.data.sources.raydata import write_stream
    from dlrover.data.sources.stream import Message, Stream
    from dlrover.data.sources.tables import Table
    from dlrover.data.sources.text import Csv, JsonLines, Lines

__all__ = [
    "Csv",
    "ElasticDataLoader",
    "ElasticDataset",
    "JsonLines",
    "Lines",
    "Message",
    "Parquet",
    "Records",
    "Stream",
    "Table",
    "TfRecords",
    "write_stream",
]

__getattr__ = lazy(
    __name__,
    {
        "Csv": "dlrover.data.sources.text",
        "ElasticDataLoader": "dlrover.data.dataloader",
        "ElasticDataset": "dlrover.data.dataset",
        "JsonLines": "dlrover.data.sources.text",
        "Lines": "dlrover.data.sources.text",
        "Message": "dlrover.data.sources.stream",
        "Parquet": "dlrover.data.sources.parquet",
        "Records": "dlrover.data.records",
        "Stream": "dlrover.data.sources.stream",
        "Table": "dlrover.data.sources.tables",
        "TfRecords": "dlrover.data.sources.files",
        "write_stream": "dlrover.data.sources.raydata",
    },
    extra="torch",
)
