"""Datasets leased in shards: who reads which samples, and which of them a model has learned from."""
