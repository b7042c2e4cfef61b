"""Samples in files and tables, by number, and in streams: for `Records` and ``ElasticDataset``."""
