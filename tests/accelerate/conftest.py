"""Strategies are applied with PyTorch."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]  # they need the extra "torch"
