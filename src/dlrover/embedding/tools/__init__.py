"""Offline tools for the checkpoints of embedding tables: list, export."""
