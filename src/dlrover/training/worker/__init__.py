"""The runner of a user's program in a worker process, its hooks and its progress board."""
