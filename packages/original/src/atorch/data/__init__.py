"""Data sets of ATorch."""

from atorch.data.elastic_dataset import ElasticDataset, SimpleElasticDataset

__all__ = ["ElasticDataset", "SimpleElasticDataset"]
