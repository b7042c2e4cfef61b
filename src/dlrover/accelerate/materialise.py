"""Parameters equal on all ranks: broadcast, or initialised on each where the model is on the meta device."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrover.errors import ConfigurationError


class Materialiser:
    """Brings the parts of a model to the device, one after the other, so that a whole copy need not fit.

    What is on the meta device is initialised as the model does it. The random numbers of a module follow from a
    seed and the module's name, so they depend neither on the strategy nor on the order of the parts.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._names = {id(module): name for name, module in model.named_modules()}
        self._meta = any(_on_meta(module) for module in model.modules())
        self._ready: dict[int, object] = {}
        self.seed = 0
        """Equal on all ranks after `equalise`."""

    def check(self) -> None:
        """Check that what is on the meta device can be initialised.

        Raises:
            ConfigurationError: a module cannot; the message names it.
        """
        for name, module in self._model.named_modules():
            if _on_meta(module) and self._method(module) is None:
                raise ConfigurationError(
                    f"The module {name!r} ({type(module).__name__}) is on the meta device and has no"
                    " reset_parameters, which would initialise its parameters and buffers."
                )

    def equalise(self) -> None:
        """Give all ranks rank 0's values and a common seed. Collective."""
        seed = torch.randint(2**31, (1,))
        if dist.is_initialized():
            seed = seed.to(self._device)
            dist.broadcast(seed, src=0)
            with torch.no_grad():
                for tensor in [*self._model.parameters(), *self._model.buffers()]:
                    if not tensor.is_meta:
                        # Of an expanded dimension, all elements are one in memory.
                        once = tuple(slice(None if each else 1) for each in tensor.stride())
                        mine = tensor[once]
                        here = mine.to(self._device).contiguous()
                        dist.broadcast(here, src=0)
                        mine.copy_(here)
        self.seed = int(seed)

    def bring(self, part: nn.Module) -> None:
        """Bring a part of the model to the device, but for what was brought before."""
        if id(part) in self._ready:
            return
        self._ready[id(part)] = part
        for child in part.children():
            self.bring(child)
        new = [(name, tensor) for name, tensor in _own(part) if id(tensor) not in self._ready]
        for name, tensor in new:
            self._move(part, name, tensor)
        self._ready.update((id(tensor), tensor) for _, tensor in _own(part))
        method = self._method(part) if self._meta else None
        if method is not None and (new or not any(True for _ in _own(part))):
            self._initialise(part, method)

    def _move(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, nn.Parameter):
            here = torch.empty_like(tensor, device=self._device) if tensor.is_meta else tensor.to(self._device).contiguous()  # fmt: skip
            setattr(module, name, here)
        elif tensor.is_meta:  # in place, because another module may have the same parameter
            data = torch.empty_like(tensor, device=self._device)
            torch.utils.swap_tensors(tensor, nn.Parameter(data, tensor.requires_grad))
        else:
            tensor.data = tensor.data.to(self._device)

    def _method(self, module: nn.Module) -> Callable[[], Any] | None:
        """Return what initialises a module: of Hugging Face's models, one method does it for all."""
        whole = getattr(self._model, "_init_weights", None)
        if whole is not None:
            return lambda: whole(module)
        found = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        return found if callable(found) else None

    def _initialise(self, module: nn.Module, method: Callable[[], Any]) -> None:
        devices = [] if self._device.type == "cpu" else [self._device.index]
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(self.seed ^ zlib.crc32(self._names.get(id(module), "").encode()))
            method()


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for _, tensor in _own(module))
