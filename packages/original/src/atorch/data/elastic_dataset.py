"""The data set whose samples the master deals, as in ATorch."""

from dlrover.original.sharding import ElasticDataset, SimpleElasticDataset

__all__ = ["ElasticDataset", "SimpleElasticDataset"]
