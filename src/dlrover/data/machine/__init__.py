"""The pure part: queues of shards, and what a checkpoint holds of a dataset."""
