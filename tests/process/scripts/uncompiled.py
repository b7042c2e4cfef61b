"""PyTorch without its compiler, which optimizers and `DistributedDataParallel` import though nothing is compiled.

The import takes as long as all of PyTorch, in each process that starts. A program that uses more of the compiler than
the few functions here gets the real one.
"""

import importlib
import sys
import types
from typing import Any

import torch

NAME = "torch._dynamo"


class Uncompiled(types.ModuleType):
    """What a training that is not compiled uses of ``torch._dynamo``."""

    utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def graph_break() -> None: ...

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # an import of a part of it
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME], torch._dynamo
        return getattr(importlib.import_module(NAME), name)


if NAME not in sys.modules:
    sys.modules[NAME] = torch._dynamo = Uncompiled(NAME)
