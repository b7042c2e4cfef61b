"""Embedding tables on servers: the processes that hold them, and their clients."""
