"""Optimizers with two moments per parameter, updated element by element: by the compiled library or by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrover import config
from dlrover._native import library
from dlrover._native.updates import Tensors, updates
from dlrover.errors import ConfigurationError
from dlrover.optim import codes
from dlrover.optim.tensors import local, parameters, saved_states

CACHED, TEMPORARY = 1 << 16, 1 << 24
"""Elements whose coded moments are updated at once: few enough for the CPU's cache, and a bound of the memory."""


@dataclass(slots=True)
class Member:
    """One parameter in an update: this rank's parts of its tensors."""

    index: int
    """Number of the parameter in the optimizer."""
    parameter: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    largest: Tensor | None
    """Largest ``square`` so far, if the optimizer keeps it."""


class Lists(NamedTuple):
    """The tensors of an update by PyTorch, all of one type: float32 or float64."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    largest: list[Tensor]
    """Empty unless the optimizer keeps them."""


class MomentOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Base of `AGD` and `AdamW`.

    The state of a parameter is that of PyTorch's Adam: ``step``, ``exp_avg`` and ``exp_avg_sq``, in float32 or, for
    float64 parameters, in float64. With 8 bits, ``exp_avg`` and the root of ``exp_avg_sq`` are codes of one byte
    (`codes`), and ``exp_avg_scale`` and ``exp_avg_sq_scale`` hold a float32 for each 256 of them. The form is that of
    the state which a parameter has, so an optimizer continues a state that was saved with the other one.

    The compiled library updates float32 and bfloat16 tensors in the memory of the CPU; PyTorch updates others.
    bfloat16 parameters are rounded at random to one of their two neighbours. The draws depend on the step and the
    parameter's number only: ranks with the same parameters and gradients compute the same bits.
    """

    _kernel: ClassVar[str]
    """Name of the update in `Updates`."""

    def __init__(self, params: Any, defaults: dict[str, Any], state_bits: int) -> None:
        if state_bits not in (8, 32):
            raise ConfigurationError(f"state_bits is {state_bits}; accepted are 8 and 32.")
        if state_bits == 8 and defaults.get("amsgrad"):
            raise ConfigurationError("amsgrad is True; with state_bits 8 it must be False.")
        self._state_bits = state_bits
        choice = config.native(config.environ())
        self._native = updates(choice) if library.use(choice).library is not None else None
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Their 8-bit state is made at once, so that a load finds how it is spread."""
        super().add_param_group(param_group)
        if self._state_bits == 8:
            for parameter in param_group["params"]:
                if parameter.requires_grad:
                    self._begin(parameter, param_group)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: function that computes the gradients again and returns the loss.

        Returns:
            What ``closure`` returned.

        Raises:
            ConfigurationError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbers = {each: index for index, each in enumerate(parameters(self.param_groups))}
        for group in self.param_groups:
            by_step: dict[int, list[Member]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                step = self._count(parameter, group)
                if "exp_avg_scale" in self.state[parameter]:  # alone, which bounds the memory
                    self._update_codes(group, step, numbers[parameter], parameter)
                else:
                    member = self._member(numbers[parameter], parameter)
                    by_step.setdefault(step, []).append(member)
            for step, members in by_step.items():
                self._update(group, step, members)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, with its own types: PyTorch would convert it to those of the parameters."""
        super().load_state_dict(state_dict)
        for parameter, saved in saved_states(self.param_groups, state_dict):
            for key, value in saved.items():
                if key != "step" and isinstance(value, Tensor):
                    self.state[parameter][key] = value.detach().to(local(parameter).device)

    def _scalars(self, step: int, group: dict[str, Any]) -> Any:
        """Return the scalars of the compiled update."""
        raise NotImplementedError

    def _plain(self, step: int, group: dict[str, Any], lists: Lists) -> None:
        """Update tensors by PyTorch's operations on lists."""
        raise NotImplementedError

    # ---- the state of a parameter

    def _begin(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        state["step"] = torch.zeros((), dtype=torch.float32)
        if self._state_bits == 8 and codes.fits(parameter):
            for key, kind in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
                state[key], state[f"{key}_scale"] = codes.zeros(parameter, kind)
            return
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])]
        for key in keys:
            state[key] = torch.zeros_like(parameter, dtype=dtype).detach()

    def _count(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """Check the gradient, make the state if there is none, and return the number of the step."""
        check_gradient(self, parameter.grad)
        state = self.state[parameter]
        if not state:
            self._begin(parameter, group)
        state["step"] += 1
        return int(state["step"])

    def _member(self, index: int, parameter: Tensor) -> Member:
        state = self.state[parameter]
        largest = local(state["max_exp_avg_sq"]) if "max_exp_avg_sq" in state else None
        mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        return Member(index, local(parameter), local(parameter.grad), mean, square, largest)

    # ---- updates

    def _update_codes(
        self, group: dict[str, Any], step: int, index: int, parameter: Tensor
    ) -> None:
        """Update a parameter whose moments are codes, some rows at a time."""
        state = {key: local(value) for key, value in self.state[parameter].items()}
        whole = (
            local(parameter), local(parameter.grad),
            state["exp_avg"], state["exp_avg_scale"], state["exp_avg_sq"], state["exp_avg_sq_scale"],
        )  # fmt: skip
        chance = _chance(step, index, whole[0].device)
        elements = CACHED if whole[0].device.type == "cpu" else TEMPORARY
        rows = max(elements * len(whole[0]) // max(whole[0].numel(), 1), 1)
        for place, gradient, means, scales, roots, root_scales in zip(
            *(each.split(rows) for each in whole), strict=True
        ):
            mean = codes.decode(means, scales)
            square = codes.decode(roots, root_scales).square_()
            self._update(group, step, [Member(index, place, gradient, mean, square, None)])
            codes.encode(mean, means, scales, chance)
            codes.encode(square.sqrt_(), roots, root_scales, chance)

    def _update(self, group: dict[str, Any], step: int, members: list[Member]) -> None:
        """Update members whose moments are numbers."""
        rest: dict[tuple[torch.device, torch.dtype], list[Member]] = {}
        compiled: dict[torch.dtype, list[Member]] = {}
        for member in members:
            parameter = member.parameter
            if self._native is not None and _fits_kernel(member):
                compiled.setdefault(parameter.dtype, []).append(member)
            else:
                rest.setdefault((parameter.device, parameter.dtype), []).append(member)
        for dtype, some in compiled.items():
            assert self._native is not None
            tensors = Tensors(
                _addresses([member.parameter for member in some]),
                _addresses([member.gradient for member in some]),
                (
                    _addresses([member.mean for member in some]),
                    _addresses([member.square for member in some]),
                ),
                np.array([member.parameter.numel() for member in some], np.uint64),
                half=dtype == torch.bfloat16,
            )
            run = getattr(self._native, self._kernel)
            seed = step << 32 | some[0].index
            run(tensors, self._scalars(step, group), seed=seed, threads=torch.get_num_threads())
        for (device, _), some in rest.items():
            # On the CPU one by one: their temporary tensors then stay in its cache.
            size = 1 if device.type == "cpu" else len(some)
            for at in range(0, len(some), size):
                self._update_plain(group, step, some[at : at + size])

    def _update_plain(self, group: dict[str, Any], step: int, members: list[Member]) -> None:
        dtype = members[0].mean.dtype
        lists = Lists(
            [member.parameter.to(dtype) for member in members],
            [member.gradient.to(dtype) for member in members],
            [member.mean for member in members],
            [member.square for member in members],
            [member.largest for member in members if member.largest is not None],
        )
        self._plain(step, group, lists)
        for member, value in zip(members, lists.parameters, strict=True):
            if member.parameter.dtype == torch.bfloat16:
                value = _rounded(value, _chance(step, member.index, value.device))  # noqa: PLW2901
            if value is not member.parameter:
                member.parameter.copy_(value)


def check_rates(lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    """Raise `ConfigurationError` unless the values are those of an optimizer with two moments."""
    if not lr >= 0:
        raise ConfigurationError(f"lr is {lr}; it must be 0 or more.")
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigurationError(f"betas is {betas}; they must be from 0 to below 1.")
    if not weight_decay >= 0:
        raise ConfigurationError(f"weight_decay is {weight_decay}; it must be 0 or more.")


def check_gradient(optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
    """Raise `ConfigurationError` for a gradient that is sparse or complex."""
    if gradient.is_sparse or gradient.is_complex():
        kind = "sparse" if gradient.is_sparse else "complex"
        name = type(optimizer).__name__
        raise ConfigurationError(f"{name} got a {kind} gradient; it accepts dense real ones.")


def _fits_kernel(member: Member) -> bool:
    """Return whether the compiled library can update the member."""
    tensors = (member.parameter, member.gradient, member.mean, member.square)
    kinds = [tensor.dtype for tensor in tensors]
    single, half = torch.float32, torch.bfloat16
    return (
        member.largest is None
        and kinds in ([single] * 4, [half, half, single, single])
        and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
    )


def _addresses(tensors: list[Tensor]) -> Any:
    return np.array([tensor.data_ptr() for tensor in tensors], np.uint64)


def _chance(step: int, index: int, device: torch.device) -> torch.Generator:
    seed = (step * 0x9E3779B1 + index * 0x85EBCA6B) % (1 << 32)  # the CPU's generator reads 32 bits
    return torch.Generator(device).manual_seed(seed)


def _rounded(value: Tensor, chance: torch.Generator) -> Tensor:
    """Round float32 to bfloat16: to the upper or the lower neighbour, so that the expected value is exact."""
    words = value.view(torch.int32)
    noise = torch.randint(
        0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=chance
    )
    noise.masked_fill_(~value.isfinite(), 0)
    return (words + noise).bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)
