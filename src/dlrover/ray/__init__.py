"""The Ray engine: a job's master and nodes as detached actors of a Ray cluster."""
