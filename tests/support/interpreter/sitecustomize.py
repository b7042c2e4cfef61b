"""Read by every Python process that a test starts: PyTorch imports its compiler only where a program compiles.

The first optimizer of a process imports ``torch._dynamo``, to keep it out of the optimizer's methods, and so does
``DistributedDataParallel``, to read a setting. That takes nearly as long as the import of PyTorch, two seconds in
each worker, and changes nothing where nobody compiles.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
import types


def without(unused, used):
    """``used`` once the compiler is imported, and ``unused`` before."""

    @functools.wraps(unused)
    def either(*args, **settings):
        return (used if "torch._dynamo" in sys.modules else unused)(*args, **settings)

    return either


def change_compile(module):
    disable = module._disable_dynamo

    def patient(function=None, recursive=True):
        if function is None:
            return functools.partial(patient, recursive=recursive)
        return without(function, disable(function, recursive))

    module._disable_dynamo = patient


def change_optimizer(module):
    decorate = module._use_grad_for_differentiable

    def patient(step):
        @functools.wraps(step)
        def alone(self, *args, **settings):
            with module.torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **settings)

        return without(alone, decorate(step))

    module._use_grad_for_differentiable = patient


def change_parallel(module):
    torch, wrapper = module.torch, module.DistributedDataParallel
    begin = wrapper.__init__

    @functools.wraps(begin)
    def alone(self, *args, **settings):
        mode = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # the default
        torch._dynamo = types.SimpleNamespace(utils=mode)
        try:
            begin(self, *args, **settings)
        finally:
            del torch._dynamo

    wrapper.__init__ = without(alone, begin)


CHANGES = {
    "torch._compile": change_compile,
    "torch.optim.optimizer": change_optimizer,
    "torch.nn.parallel.distributed": change_parallel,
}
"""What is changed of which modules."""


class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        CHANGES[module.__name__](module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
