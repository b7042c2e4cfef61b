"""The process of a role of the original's unified API: what its actor does around the entry point."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import threading
from typing import Any

from dlrover.errors import ConfigurationError
from dlrover.original.runtime import export_marked, hosted
from dlrover.roles.runtime import worker
from dlrover.roles.runtime.environment import given


def main() -> None:
    """Export what is marked in the module and in the object of its class, then run the function or ``run()``.

    A role that is no driver can be called until the job ends.

    Raises:
        ConfigurationError: A driver is a class without ``run()``.
    """
    known = hosted()
    joined = worker.start(ready=False)
    group = _process_group() if known.has_group else None
    module_name, _, name = known.entry.rpartition(".")
    module = importlib.import_module(module_name)
    program: Any = getattr(module, name, None)
    if not callable(program):
        raise ConfigurationError(f"The module {module_name} has no {name} that can be called.")
    export_marked("", module)
    if inspect.isclass(program):
        made = program()
        export_marked("", made)
        program = getattr(made, "run", None)
        if program is None and known.is_driver:
            raise ConfigurationError(
                f"role {given().role}: entry {known.entry}: the class has no run(), so that the role would never end;"
                " add run() or not_driver()."
            )
    joined.ready()
    if program is not None:
        program()
    if not known.is_driver:
        threading.Event().wait()
    if group is not None and group.is_initialized():
        group.destroy_process_group()


def _process_group() -> Any:
    """Set up PyTorch's process group and return its module; None without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch  # noqa: PLC0415 - the program's own
    from torch import distributed  # noqa: PLC0415

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # noqa: TID251 - as programs do
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return distributed
