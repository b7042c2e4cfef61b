"""Frozen records that every layer shares: what to launch, nodes, failures, events.

Nothing here does I/O, reads a clock or the environment.
"""
