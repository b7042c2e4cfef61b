"""The saver: one process per node, which holds the memory checkpoints. Runs without torch."""
