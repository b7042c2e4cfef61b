"""Two moments per parameter, updated element by element: by the compiled library or by PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrover import config
from dlrover._native import library
from dlrover._native.kernels import overlap
from dlrover._native.updates import Tensors, Updates, updates
from dlrover.errors import ConfigurationError
from dlrover.optim import codes
from dlrover.optim.dense import by_rows
from dlrover.optim.tensors import local

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""Entries of a parameter's state that have its shape."""


class Member(NamedTuple):
    """This rank's parts of the tensors of one parameter."""

    parameter: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    largest: Tensor | None = None
    """Largest ``square`` so far, if the optimizer keeps it."""

    @property
    def four(self) -> tuple[Tensor, ...]:
        """All but the last."""
        return self[:4]


class MomentRule(NamedTuple):
    """How an optimizer updates a parameter and its two moments."""

    kernel: str
    """Name of the update in `Updates`."""
    scalars: Callable[[int, dict[str, Any]], Any]
    """Return the scalars of the compiled update, from the step's number and the group's options."""
    plain: Callable[[int, dict[str, Any], list[list[Tensor]], list[Tensor]], None]
    """Update lists of parameters, gradients, means and squares of one type, and the largest squares, by PyTorch."""


class Moments:
    """The algorithm of `AGD` and `AdamW`: states in 32 or in 8 bits, which a rule updates.

    The state of a parameter is that of PyTorch's Adam: ``step``, ``exp_avg`` and ``exp_avg_sq``, in float32 or, for
    float64 parameters, in float64. With 8 bits, ``exp_avg`` and the root of ``exp_avg_sq`` are codes of one byte
    (`codes`), and ``exp_avg_scale`` and ``exp_avg_sq_scale`` hold a float32 for each 256 of them. The form is that of
    the state which a parameter has, so an optimizer continues a state that was saved with the other one.

    The compiled library updates float32 and bfloat16 tensors in the memory of the CPU; PyTorch updates others.
    bfloat16 parameters are rounded at random to one of their two neighbours. The draws depend on the step, the
    parameters' places in the optimizer and which of them have gradients only: ranks with the same parameters and
    gradients compute the same bits.
    """

    def __init__(self, rule: MomentRule, state_bits: int, *, amsgrad: bool = False) -> None:
        if state_bits not in (8, 32):
            raise ConfigurationError(f"state_bits is {state_bits}; accepted are 8 and 32.")
        if state_bits == 8 and amsgrad:
            raise ConfigurationError("amsgrad is True; with state_bits 8 it must be False.")
        self._rule, self.eager = rule, state_bits == 8
        self._choice = config.native(config.environ())
        _compiled(self._choice)  # raises here, not in the first step

    @property
    def native(self) -> Updates | None:
        """The compiled updates, if there are any."""
        return _compiled(self._choice)

    def begin(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return moments of zero, in the form for this parameter."""
        state = {}
        if self.eager and codes.fits(parameter):
            for key, kind in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
                state[key], state[f"{key}_scale"] = codes.zeros(parameter, kind)
            return state
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])):
            state[key] = torch.zeros_like(parameter, dtype=dtype).detach()
        return state

    def update(
        self, step: int, members: dict[int, tuple[Tensor, dict[str, Tensor]]], group: dict[str, Any]
    ) -> None:
        """Update parameters: those with plain moments together, those with codes one by one."""
        compiled: dict[torch.dtype, dict[int, Member]] = {}
        rest: dict[tuple[torch.device, torch.dtype], dict[int, Member]] = {}
        for index, (parameter, entries) in members.items():
            state = {key: local(value) for key, value in entries.items()}
            place, gradient = local(parameter), local(parameter.grad)
            _check_shapes(index, place, gradient, state)
            if "exp_avg_scale" in state:
                self._update_codes(step, index, (place, gradient), state, group)
                continue
            member = Member(
                place, gradient, state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq")
            )
            if self._fits_kernel(member):
                compiled.setdefault(place.dtype, {})[index] = member
            else:
                rest.setdefault((place.device, place.dtype), {})[index] = member
        for some in compiled.values():
            self._update_compiled(step, some, group)
        for (device, _), others in rest.items():
            if device.type != "cpu":
                self._update_plain(step, others, group)
                continue
            for index, member in others.items():
                parts = by_rows([each for each in member if each is not None])
                for number, part in enumerate(parts):
                    self._update_plain(step, {index: Member(*part)}, group, number)

    def _update_codes(
        self,
        step: int,
        index: int,
        pair: tuple[Tensor, Tensor],
        state: dict[str, Tensor],
        group: dict[str, Any],
    ) -> None:
        """Update a parameter whose moments are codes."""
        keys = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
        draws = None
        for number, part in enumerate(by_rows([*pair, *(state[key] for key in keys)])):
            place, gradient, means, scales, roots, root_scales = part
            member = Member(
                place, gradient, codes.decode(means, scales), codes.decode(roots, root_scales).square_()
            )  # fmt: skip
            if self._fits_kernel(member):
                self._update_compiled(step, {index: member}, group, number)
            else:
                self._update_plain(step, {index: member}, group, number)
            if draws is None:  # the same for all rows: drawing takes long on the CPU
                size = place.numel() + scales.numel()
                chance = _chance(step, _place(index, -1), place.device)
                draws = torch.rand(2, size, device=place.device, generator=chance)
            codes.encode(member.mean, means, scales, draws[0])
            codes.encode(member.square.sqrt_(), roots, root_scales, draws[1])

    def _update_compiled(
        self, step: int, members: dict[int, Member], group: dict[str, Any], part: int = 0
    ) -> None:
        """Update members of one type, or this part of one, by the compiled library."""
        first, some = next(iter(members)), list(members.values())
        parameters, gradients, means, squares = (
            np.array([each.data_ptr() for each in column], np.uint64)
            for column in zip(*(member.four for member in some), strict=True)
        )
        sizes = np.array([member.parameter.numel() for member in some], np.uint64)
        if overlap(parameters, sizes * np.uint64(some[0].parameter.itemsize)):
            for index, member in members.items():  # not at once, by several threads
                self._update_compiled(step, {index: member}, group, part)
            return
        half = some[0].parameter.dtype == torch.bfloat16
        tensors = Tensors(parameters, gradients, (means, squares), sizes, half=half)
        run = getattr(self.native, self._rule.kernel)
        # The draws of several groups differ, though each call counts its tensors from 0.
        seed = step | _place(first, part) << 32
        run(tensors, self._rule.scalars(step, group), seed=seed, threads=torch.get_num_threads())
        # As after an update by PyTorch, a backward pass that needs the old values fails.
        for each in some:
            if not each.parameter.is_inference():
                torch.autograd.graph.increment_version(each.parameter)

    def _update_plain(
        self, step: int, members: dict[int, Member], group: dict[str, Any], part: int = 0
    ) -> None:
        """Update members of one device and type, or this part of one, by PyTorch."""
        some = list(members.values())
        kinds = [each.dtype for member in some for each in member if each is not None]
        dtype = functools.reduce(torch.promote_types, kinds, torch.float32)
        columns = zip(*(member.four for member in some), strict=True)
        lists = [[each.to(dtype) for each in column] for column in columns]
        largest = [each.largest for each in some if each.largest is not None]
        self._rule.plain(step, group, lists, largest)
        for member, mean, square in zip(some, *lists[2:], strict=True):
            for old, new in ((member.mean, mean), (member.square, square)):
                if new is not old:  # of a type of its own
                    old.copy_(new)
        for index, member, value in zip(members, some, lists[0], strict=True):
            place = member.parameter
            if place.dtype == torch.bfloat16:
                chance = _chance(step, _place(index, part), place.device)
                place.copy_(_rounded(value, chance))
            elif value is not place:
                place.copy_(value)

    def _fits_kernel(self, member: Member) -> bool:
        """Return whether the compiled library can update a member."""
        kinds = [each.dtype for each in member.four]
        single, half = torch.float32, torch.bfloat16
        return (
            self.native is not None
            and member.largest is None
            and kinds in ([single] * 4, [half, half, single, single])
            and all(
                each.device.type == "cpu"
                and each.is_contiguous()
                and not each.is_neg()
                # A tensor with operations of its own may have no memory.
                and type(each).__torch_dispatch__ is Tensor.__torch_dispatch__
                for each in member.four
            )
        )


def _check_shapes(
    index: int, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]
) -> None:
    """Refuse tensors of several shapes: the compiled library does not look."""
    moments = [(key, state[key]) for key in _MOMENTS if key in state]
    for key, tensor in [("gradient", gradient), *moments]:
        if tensor.shape != parameter.shape:
            raise ConfigurationError(
                f"Parameter {index} has the shape {list(parameter.shape)} and its {key} {list(tensor.shape)}; load"
                " the state of an optimizer of the same model, or make a new optimizer."
            )


@functools.cache
def _compiled(choice: str) -> Updates | None:
    return updates(choice) if library.use(choice).library is not None else None


def _place(index: int, part: int) -> int:
    """Return 32 bits for a part of a parameter, by its number and that of the parameter; 0 for the first of all."""
    return (index * 0x85EBCA6B + part * 0xC2B2AE35) % (1 << 32)


def _chance(step: int, place: int, device: torch.device) -> torch.Generator:
    seed = (step * 0x9E3779B1 + place) % (1 << 32)  # the CPU's generator reads 32 bits
    return torch.Generator(device).manual_seed(seed)


def _rounded(value: Tensor, chance: torch.Generator) -> Tensor:
    """Round float32 to bfloat16: to the upper or the lower neighbour, so that the expected value is exact."""
    words = value.view(torch.int32)
    noise = torch.randint(
        0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=chance
    )
    noise.masked_fill_(~value.isfinite(), 0)
    return (words + noise).bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)
