"""Steps in several passes: gradients that are scaled and added up, and what a model returns for a whole step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from dlrover.errors import ConfigurationError

LossFunction = Callable[[Any, Any], torch.Tensor]
"""Returns the mean loss of ``(data, output)``."""
FORMATS = (None, "unpack_sequence", "unpack_dict")
"""How a model is called: ``model(data)``, ``model(*data)`` or ``model(**data)``."""


@dataclass(frozen=True)
class Weighting:
    """What the gradients of a rank's mean loss are multiplied by."""

    weight: float
    """So that gradients averaged over the ranks are those of the global batch's mean."""
    scale: Callable[[], float]
    """The scale of fp16, which the optimizer divides by."""
    common: int = 0
    """A number of passes must divide it, so that those of all ranks are equal; 0 if all ranks have as many samples."""

    @property
    def factor(self) -> float:
        """Both."""
        return self.weight * self.scale()


@dataclass
class StepOutput:
    """What a model returns whose step takes several passes: the loss, whose ``backward`` adds the gradients."""

    loss: torch.Tensor


def call(model: nn.Module, data: Any, form: str | None) -> Any:
    """Call a model with data in a format."""
    match form:
        case "unpack_sequence":
            return model(*data)
        case "unpack_dict":
            return model(**data)
    return model(data)


def data_of(args: tuple[Any, ...], kwargs: dict[str, Any], form: str | None) -> Any:
    """Return the data that a model was called with in a format.

    Raises:
        ConfigurationError: it was called in another way.
    """
    if form == "unpack_dict" and kwargs and not args:
        return kwargs
    if form == "unpack_sequence" and args and not kwargs:
        return args
    if form is None and len(args) == 1 and not kwargs:
        return args[0]
    raise ConfigurationError(
        f"The model was called with {len(args)} positional arguments and the names {sorted(kwargs)}; with the"
        f" model_input_format {form!r} it takes the whole data."
    )


def loss_of_output(_data: Any, output: Any) -> torch.Tensor:
    """Return the loss that a model itself computed: that of a Hugging Face model, or of a whole step.

    Raises:
        ConfigurationError: the output has no loss.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigurationError(
            f"The model returned a {type(output).__name__} without a loss; pass loss_func(data, output)."
        )
    return loss


def samples(data: Any) -> int:
    """Return the number of samples in data: the first size of its first tensor.

    Raises:
        ConfigurationError: there is no tensor.
    """
    for leaf in tree_flatten(data)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise ConfigurationError(f"The data is a {type(data).__name__} without tensors.")


def divisible(value: Any, whole: int) -> bool:
    """Return whether a value is a tensor of all ``whole`` samples, and not one that they share, such as positions."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == whole


def split(data: Any, count: int) -> list[tuple[Any, float]]:
    """Split the tensors of data by samples into ``count`` nearly equal parts, each with its share of the samples.

    Other values are in each part. If there are too few samples, the first one is repeated, with the share 0.
    """
    leaves, form = tree_flatten(data)
    whole = samples(data)
    parts: list[Sequence[Any]] = []
    for leaf in leaves:
        if divisible(leaf, whole):
            filling = leaf[:1].expand(max(0, count - whole), *leaf.shape[1:])
            parts.append(torch.cat([leaf, filling]).tensor_split(count))
        else:
            parts.append([leaf] * count)
    sizes = torch.arange(whole).tensor_split(count)
    return [
        (tree_unflatten([part[number] for part in parts], form), len(sizes[number]) / whole)
        for number in range(count)
    ]


class _Scaled(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(_context: Any, loss: torch.Tensor, factor: Callable[[], Any]) -> torch.Tensor:
        _context.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> Any:
        return gradient * _context.factor(), None


def scaled(loss: torch.Tensor, factor: Callable[[], Any]) -> torch.Tensor:
    """Return the same loss, whose gradients are multiplied by what ``factor`` returns in the backward pass."""
    result: torch.Tensor = _Scaled.apply(loss, factor)
    return result


class _Collected(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        _context: Any, _anchor: torch.Tensor, loss: torch.Tensor, add: Callable[[Any], None]
    ) -> torch.Tensor:
        _context.add = add
        return loss.detach().clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> Any:
        _context.add(gradient)
        return torch.zeros_like(gradient), None, None


def collected(
    parameters: Iterable[nn.Parameter], run: Callable[[], torch.Tensor], scale: float
) -> torch.Tensor:
    """Run forward and backward passes now; return the loss, whose ``backward`` adds the gradients.

    Args:
        parameters: those whose gradients ``run`` computes.
        run: computes gradients, multiplied by ``scale``, and returns the loss.
        scale: what ``backward`` is going to multiply gradients by: the scale of fp16.
    """
    known = [parameter for parameter in parameters if parameter.requires_grad]
    before = [parameter.grad for parameter in known]
    for parameter in known:
        parameter.grad = None
    loss = run()
    new = [parameter.grad for parameter in known]
    for parameter, gradient in zip(known, before, strict=True):
        parameter.grad = gradient

    def add(outside: torch.Tensor) -> None:
        weight = outside / scale
        for parameter, gradient in zip(known, new, strict=True):
            if gradient is None:
                continue
            gradient.mul_(weight)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        new.clear()

    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    result: torch.Tensor = _Collected.apply(anchor, loss, add)
    return result


class Accumulated(nn.Module):  # type: ignore[misc]
    """A model that takes the data of a step in several passes; it returns a `StepOutput` when it trains.

    All ranks make equally many, because they wait for each other in each.
    """

    def __init__(
        self,
        model: nn.Module,
        passes: int,
        form: str | None,
        loss_function: LossFunction,
        weighting: Weighting,
    ) -> None:
        super().__init__()
        self.module = model
        self._count, self._form = passes, form
        self._loss_function, self._weighting = loss_function, weighting

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss and the gradients of all micro-batches; without gradients, the model's output."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        data = data_of(args, kwargs, self._form)
        parts = split(data, self._count)
        scale = self._weighting.scale()
        parameters = self.module.parameters()
        return StepOutput(collected(parameters, lambda: self._passes(parts, scale), scale))

    def _passes(self, parts: Sequence[tuple[Any, float]], scale: float) -> torch.Tensor:
        losses = []
        with torch.enable_grad():
            for number, (part, share) in enumerate(parts):
                with _synchronized(self.module, last=number == len(parts) - 1):
                    loss = self._loss_function(part, call(self.module, part, self._form)) * share
                    (loss * (self._weighting.weight * scale)).backward()
                losses.append(loss.detach())
        return torch.stack(losses).sum()


def _synchronized(model: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Let replicas average gradients in the last pass only. Shards add up what they have averaged, which needs less memory."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()  # type: ignore[no-any-return]
    return contextlib.nullcontext()
