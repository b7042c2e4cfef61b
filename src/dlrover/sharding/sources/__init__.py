"""Samples in files, by their number: for `Records` and ``ElasticDataset``."""

from dlrover.sharding.sources.text import Csv, JsonLines, Lines
from dlrover.sharding.sources.tfrecord import TfRecords

__all__ = ["Csv", "JsonLines", "Lines", "TfRecords"]
