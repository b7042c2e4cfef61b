"""Read-only servers of embedding tables: they follow checkpoints, and answer HTTP and the raw protocol."""
