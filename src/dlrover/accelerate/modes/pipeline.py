"""Pipeline parallelism: parts of the blocks on different ranks, run by PyTorch's schedules.

Every rank runs the model's own ``forward``, on the same data, with stand-ins for what other ranks have: blocks that
do nothing, one that returns what came from the rank before, and one that ends the pass. So positions, masks and
whatever else the model derives from its input are computed on each rank, and names stay as they are.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from dlrover.accelerate.anatomy import Anatomy
from dlrover.accelerate.microbatch import (
    LossFunction,
    StepOutput,
    Weighting,
    call,
    collected,
    data_of,
    divisible,
    samples,
    split,
)
from dlrover.accelerate.strategies import divide, stages_of
from dlrover.accelerate.world import Grid
from dlrover.errors import ConfigurationError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of activations, by the number that stands for them."""


ORDER = "calls its blocks in another order than it lists them, or more than once"
BETWEEN = "changes what a block returns before the next one gets it"
AROUND = "uses after its blocks what it had before them, as skip connections do"


FIRST = "gives its blocks something else than a tensor as first argument, the hidden state"
REENTRANT = "calls a block without gradients, as checkpoint(..., use_reentrant=True) does; use_reentrant=False works"


def _refused(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"Strategy: pp is more than 1; accepted is 1, because the model {reason}."
    )


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return what a block gets from the one before."""
    found = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(found, torch.Tensor):
        raise _refused(FIRST)
    return found


class _LeftError(Exception):
    """Ends a pass through a part of the model, with what the next one gets."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Skip(nn.Module):  # type: ignore[misc]
    """In place of a block of another part."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _hidden(args, kwargs)


class _Enter(nn.Module):  # type: ignore[misc]
    """In place of the last block of the part before: returns what it sent."""

    hidden: torch.Tensor | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            raise _refused(ORDER)
        if hidden.requires_grad and not torch.is_grad_enabled():
            raise _refused(REENTRANT)
        return hidden


class _Leave(nn.Module):  # type: ignore[misc]
    """In place of the first block of the part after."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise _LeftError(_hidden(args, kwargs))


class _Zeros(nn.Module):  # type: ignore[misc]
    """In place of an embedding whose result is not used."""

    def __init__(self, width: int, *, per_index: bool) -> None:
        super().__init__()
        self._width, self._per_index = width, per_index
        self.value = 0.0

    def forward(self, item: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        shape = item.shape if self._per_index else item.shape[:-1]
        return torch.full((), self.value, device=item.device).expand(*shape, self._width)


class _Same(nn.Module):  # type: ignore[misc]
    """In place of a norm whose result is not used."""

    value = 0.0

    def forward(self, item: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return item + self.value


class _Absent(nn.Module):  # type: ignore[misc]
    """In place of a module that another part has, and that runs after the blocks."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        raise _refused(f"uses {self._name!r} before its blocks and registers it after them")


class StagePart(nn.Module):  # type: ignore[misc]
    """One part of a model: from the activations of the part before, and the data, to its own or the loss."""

    def __init__(
        self, model: nn.Module, end: nn.Module, enter: _Enter | None, form: str | None, loss: LossFunction | None
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self._form, self._loss = form, loss
        self.__dict__["_enter"], self.__dict__["_end"] = enter, end  # they are in the model

    def forward(self, *hidden: torch.Tensor, data: Any) -> torch.Tensor:
        """Return the activations ``[samples, ...]`` for the next part, or the loss ``[1]``."""
        if self._enter is not None:
            (self._enter.hidden,) = hidden
        try:
            output = call(self.model, data, self._form)
        except _LeftError as left:
            return left.hidden.contiguous()
        assert self._loss is not None
        return torch.stack([self._loss(data, output).float()])

    def check(self, *hidden: torch.Tensor, data: Any) -> None:
        """Check that the part gets all that it needs, and gives all that others need of it.

        Without gradients, and without changes of buffers.

        Raises:
            ConfigurationError: the model's ``forward`` is no chain of its blocks.
        """
        returned: list[Any] = []
        handle = self._end.register_forward_hook(lambda _block, _args, output: returned.append(output))  # fmt: skip
        stand_ins = [module for module in self.model.modules() if isinstance(module, _Zeros | _Same)]  # fmt: skip
        with torch.no_grad(), _kept_buffers(self.model):
            try:
                usual = self(*hidden, data=data)
                for module in stand_ins:
                    module.value = math.nan
                strange = self(*hidden, data=data)
            finally:
                handle.remove()
                for module in stand_ins:
                    module.value = 0.0
        if len(returned) != 2:
            raise _refused(ORDER)
        if self._loss is None and not usual.allclose(_first(returned[0]), 0, 0, equal_nan=True):
            raise _refused(BETWEEN)
        if usual.isfinite().all() and not strange.isfinite().all():
            raise _refused(AROUND)


def _first(output: Any) -> torch.Tensor:
    return tree_flatten(output)[0][0]


@contextlib.contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Undo what the block changes in the model's buffers."""
    before = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()  # noqa: SLF001 - a program may replace a buffer
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in before:
            module._buffers[name] = buffer  # noqa: SLF001
            if buffer is not None:
                buffer.copy_(value)


def cut(model: nn.Module, anatomy: Anatomy, grid: Grid, form: str | None, loss: LossFunction) -> list[StagePart]:  # fmt: skip
    """Return this rank's parts of a model, which gives them its modules."""
    runs = divide(anatomy, grid.strategy)
    mine = runs[grid.stage :: grid.strategy.pp]
    found = []
    for run in mine:
        first, last = run is runs[0], run is runs[-1]
        shell = model if len(mine) == 1 else _shell(model, anatomy)
        enter = _trim(shell, anatomy, run, first=first, last=last)
        end = shell.get_submodule(anatomy.blocks[run.stop - 1])
        found.append(StagePart(shell, end, enter, form, loss if last else None))
    return found


def _shell(model: nn.Module, anatomy: Anatomy) -> nn.Module:
    """Return a copy of a model's frame, with the same blocks and other modules in it."""
    shared = [*anatomy.blocks, *anatomy.before, *anatomy.after]
    memo: dict[int, Any] = {id(item): item for item in map(model.get_submodule, shared)}
    return copy.deepcopy(model, memo)


def _trim(model: nn.Module, anatomy: Anatomy, run: range, *, first: bool, last: bool) -> _Enter | None:  # fmt: skip
    blocks = model.get_submodule(anatomy.list_name)
    enter = None if first else _Enter()
    for index in range(len(anatomy.blocks)):
        if index == run.start - 1 and enter is not None:
            blocks[index] = enter
        elif index == run.stop:
            blocks[index] = _Leave()
        elif index not in run:
            blocks[index] = _Skip()
    if not first:
        for name in anatomy.before:
            _stand_in(model, name)
    if not last:
        for name in anatomy.after:
            if any(True for _ in model.get_submodule(name).parameters()):
                model.set_submodule(name, _Absent(name))
    return enter


def _stand_in(model: nn.Module, outer: str) -> None:
    for name, module in list(model.get_submodule(outer).named_modules(prefix=outer)):
        if isinstance(module, nn.Embedding):
            model.set_submodule(name, _Zeros(module.embedding_dim, per_index=True))
        elif isinstance(module, nn.Linear):
            model.set_submodule(name, _Zeros(module.out_features, per_index=False))
        elif any(True for _ in module.parameters(recurse=False)):
            model.set_submodule(name, _Same())


class Pipeline(nn.Module):  # type: ignore[misc]
    """This rank's parts of a model; a call with the data of a step returns a `StepOutput`, on all ranks."""

    def __init__(
        self, parts: Sequence[StagePart], anatomy: Anatomy, grid: Grid, form: str | None, weighting: Weighting
    ) -> None:  # fmt: skip
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.pipeline_stages = grid.strategy.pp
        self._grid, self._form, self._weighting = grid, form, weighting
        self._group = grid.pipeline
        self._shapes: dict[Any, torch.Tensor] = {}
        self._schedules: dict[Any, Any] = {}
        self._tied = self._find_tied(anatomy)
        on_first = grid.stage == 0
        self.repeated_parameters = frozenset(() if on_first else self._tied)
        """Parameters that an earlier part has, too."""
        with torch.no_grad():
            for parameter in self._tied:
                self._swap(parameter, send=on_first, receive=not on_first)

    def forward(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Run a step; ``backward`` of its loss adds the gradients."""
        data = data_of(args, kwargs, self._form)
        if not torch.is_grad_enabled():
            return StepOutput(self._loss_only(data))
        scale = self._weighting.scale()
        return StepOutput(collected(self.parameters(), lambda: self._run(data), scale))

    def _run(self, data: Any) -> torch.Tensor:
        count = self._count(samples(data))
        schedule = self._schedule(data, count)
        try:
            with torch.enable_grad():
                losses = schedule.step(target=torch.zeros(count), data=data)
        except RuntimeError as error:  # PyTorch's, about the one that a part raised
            if isinstance(error.__cause__, ConfigurationError):
                raise error.__cause__ from None
            raise
        for parameter in self._tied:
            if parameter.grad is not None:
                self._swap(parameter.grad, send=True, receive=True)
        return self._of_last(losses)

    def _of_last(self, losses: torch.Tensor | None) -> torch.Tensor:
        """Return the mean of the losses that the rank of the last part has."""
        mean = torch.zeros((), device=self._grid.device) if losses is None else losses.detach().mean()  # fmt: skip
        dist.broadcast(mean, src=self._rank(self.pipeline_stages - 1), group=self._group)
        return mean

    def _rank(self, stage: int) -> int:
        return int(dist.get_global_rank(self._group, stage % self.pipeline_stages))

    # ---- the schedule

    def _count(self, size: int) -> int:
        """Return the number of micro-batches: equal ones, that have at most the strategy's samples if possible."""
        one = self._grid.strategy
        common = math.gcd(size, self._weighting.common or size)
        wanted = -(-size // one.micro_batch)
        divisors = [number for number in range(1, common + 1) if common % number == 0]
        return next((number for number in divisors if number >= wanted), common)

    def _schedule(self, data: Any, count: int) -> Any:
        first = split(data, count)[0][0]
        key = _key(first)
        shape = self._shape(key, first)
        if (key, count) not in self._schedules:
            pipe, total = self.pipeline_stages, self.pipeline_stages * len(self.parts)
            built = []
            for number, part in enumerate(self.parts):
                index = self._grid.stage + number * pipe
                hidden = torch.empty(
                    shape[1:].tolist(), dtype=DTYPES[shape[0]], device="meta", requires_grad=True
                )
                loss = torch.empty(1, device="meta", requires_grad=True)
                built.append(
                    PipelineStage(
                        part, index, total, self._grid.device, group=self._group,
                        input_args=() if index == 0 else (hidden,),
                        output_args=(loss if index == total - 1 else hidden,),
                    )
                )  # fmt: skip
            self._schedules[key, count] = self._make(built, count, data)
        return self._schedules[key, count]

    def _make(self, built: list[PipelineStage], count: int, data: Any) -> Any:
        pipe, wanted = self.pipeline_stages, self._grid.strategy.schedule
        whole = samples(data)
        form = tree_map(lambda leaf: TensorChunkSpec(0) if divisible(leaf, whole) else _Replicate(), data)  # fmt: skip
        options = {
            "n_microbatches": count,
            "loss_fn": self._loss,
            "kwargs_chunk_spec": {"data": form},
        }
        if len(built) > 1:
            even = count % max(1, count // pipe) == 0
            return (ScheduleInterleaved1F1B if even else ScheduleLoopedBFS)(built, **options)
        fills = count >= pipe and wanted != "gpipe"
        return (Schedule1F1B if fills else ScheduleGPipe)(built[0], **options)

    def _loss(self, output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        return output.sum() * self._weighting.factor

    # ---- shapes

    def _shape(self, key: Any, data: Any) -> torch.Tensor:
        """Return the type and the sizes of activations between parts; the first part computes them once. Collective."""
        if self._is_new(key):
            found = torch.zeros(16, dtype=torch.int64, device=self._grid.device)
            devices = [] if self._grid.device.type == "cpu" else [self._grid.device.index]
            with torch.random.fork_rng(devices):
                if self._grid.stage == 0:
                    with torch.no_grad():
                        hidden = self.parts[0](data=data)
                    known = [hidden.dim(), DTYPES.index(hidden.dtype), *hidden.shape]
                    found[: len(known)] = torch.tensor(known)
                dist.broadcast(found, src=self._rank(0), group=self._group)
                shape = found.cpu()[1 : 2 + int(found[0])]
                if not self._shapes:
                    self._check(shape, data)
            self._shapes[key] = shape
        return self._shapes[key]

    def _is_new(self, key: Any) -> bool:
        """Return whether this rank, or another one that has to compute with it, does not know the shapes of its data."""
        one, new = self._grid.strategy, key not in self._shapes
        if one.dp > 1 and (one.dp_shard > 1 or one.ep > 1):
            flag = torch.tensor(int(new), device=self._grid.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            new = bool(flag)
        return new

    def _check(self, shape: torch.Tensor, data: Any) -> None:
        """Check this rank's parts with the first data.

        Raises:
            ConfigurationError: the model is no chain of its blocks.
        """
        for number, part in enumerate(self.parts):
            hidden = torch.linspace(-1, 1, math.prod(shape[1:].tolist()), dtype=DTYPES[shape[0]], device=self._grid.device)  # fmt: skip
            first = self._grid.stage == number == 0
            part.check(*(() if first else (hidden.view(*shape[1:].tolist()),)), data=data)

    # ---- without gradients

    def _loss_only(self, data: Any) -> torch.Tensor:
        shape = self._shape(_key(data), data)
        pipe, total = self.pipeline_stages, self.pipeline_stages * len(self.parts)
        result = None
        for index in range(total):
            if index % pipe != self._grid.stage:
                continue
            received = []
            if index:
                hidden = torch.empty(
                    shape[1:].tolist(), dtype=DTYPES[shape[0]], device=self._grid.device
                )
                dist.recv(hidden, self._rank(index - 1), group=self._group)
                received.append(hidden)
            result = self.parts[index // pipe](*received, data=data)
            if index < total - 1:
                dist.send(result, self._rank(index + 1), group=self._group)
                result = None
        return self._of_last(result)

    # ---- tied parameters

    def _find_tied(self, anatomy: Anatomy) -> list[nn.Parameter]:
        """Return this rank's parameters that both the first and the last part have, in an order common to both."""
        ends = {0, self.pipeline_stages - 1}
        if self._grid.stage not in ends:
            return []
        here: dict[str, nn.Parameter] = {}
        for part in self.parts:
            here |= part.model.named_parameters(remove_duplicate=False)
        groups = [group for group in anatomy.tied if stages_of(group, self._grid.strategy, anatomy) == ends]  # fmt: skip
        return [next(here[name] for name in group if name in here) for group in groups]

    def _swap(self, tensor: torch.Tensor, *, send: bool, receive: bool) -> None:
        """Exchange a tensor between the first and the last rank; add what comes, or take it."""
        mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        peer = self._rank(self.pipeline_stages - 1 if self._grid.stage == 0 else 0)
        other, sent = torch.empty_like(mine), mine.detach().clone()
        operations = [dist.P2POp(dist.isend, sent, peer, self._group)] if send else []
        operations += [dist.P2POp(dist.irecv, other, peer, self._group)] if receive else []
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if receive and send:
            mine.add_(other)
        elif receive:
            mine.copy_(other)


def _key(data: Any) -> Any:
    """Return what the shapes of activations depend on."""
    leaves = tree_flatten(data)[0]
    return tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))
