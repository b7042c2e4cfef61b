"""Checkpoints in storage: directories, object stores, formats and leases. Runs without torch."""
