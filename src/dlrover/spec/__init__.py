"""Frozen records that all layers share: launch specifications, nodes, failures, events.

This package does no I/O and reads neither a clock nor the environment.
"""
