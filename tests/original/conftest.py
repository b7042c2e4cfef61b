"""Some names of the original need PyTorch."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    collect_ignore = ["test_training.py"]  # it needs the extra "torch"
