"""Context parallelism: ranks share each sequence, and attention sees all of it.

``all_gather``: keys and values are gathered, and each rank attends for its own queries. Positions are dealt so that
causal attention is equal work: of 2n runs, rank r has run r and run 2n - 1 - r (as in Llama 3). ``ulysses``: before
attention, ranks exchange positions for heads (Jacobs et al., 2023).

Attention is what calls ``scaled_dot_product_attention``. All ranks have the same whole sequences before the first
block and after the last one, so positions and masks are computed as ever, and the program sees whole outputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dlrover.accelerate.modes import collectives
from dlrover.accelerate.modes.collectives import Parts, exchange
from dlrover.errors import ConfigurationError

SEQUENCE = 1
"""Dimension of positions in activations."""
POSITIONS = 2
"""Dimension of positions in queries, keys and values."""


class Context:
    """The ranks that share sequences, and the division of the sequence that is computed now."""

    def __init__(self, group: Any, method: str) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.method = method
        self.length = 0
        self.parts: Parts | None = None
        self._attended = False
        self.runs: list[_Run] = []
        """This rank's queries, for causal attention."""

    def begin(self, whole: torch.Tensor) -> torch.Tensor:
        """Take this rank's positions of what enters the first block.

        All ranks compute the whole sequence before and after the blocks, and their gradients are averaged, so
        those in between count once for each rank.
        """
        if self.parts is None or whole.shape[SEQUENCE] != self.length:
            self.length = whole.shape[SEQUENCE]
            self.parts = self._parts(whole.device)
            self.runs = _Run.of(self.parts.mine)
        self._attended = False
        gather, ranks = self.parts.gather, self.ranks
        return collectives.through(whole, self.parts.take, lambda gradient: gather(gradient) / ranks)  # fmt: skip

    def end(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole of what leaves the last block.

        Raises:
            ConfigurationError: no block has called the attention that is shared.
        """
        if not self._attended:
            raise ConfigurationError(
                f"Strategy: cp is {self.ranks}; accepted is 1, because no block called scaled_dot_product_attention."
            )
        parts, ranks = self.known, self.ranks
        return collectives.through(part, parts.gather, lambda gradient: parts.take(gradient) * ranks)  # fmt: skip

    def other(self, value: Any) -> Any:
        """Take this rank's positions of the other arguments of a block: rotations, positions, rows of a mask."""

        def one(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            if item.dim() >= 4 and item.shape[-2] == self.length:
                return item.index_select(-2, self.known.mine)
            if item.dim() in (2, 3) and item.shape[SEQUENCE] == self.length:
                return item.index_select(SEQUENCE, self.known.mine)
            return item

        return tree_map(one, value)

    def watch(self, block: nn.Module) -> None:
        """Give a block this rank's part of its other arguments."""

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return (args[:1] + self.other(args[1:]) if args else args), self.other(kwargs)

        block.register_forward_pre_hook(hook, with_kwargs=True)

    @property
    def known(self) -> Parts:
        """The division of the sequence."""
        assert self.parts is not None, "the first block divides the sequence"
        return self.parts

    def _parts(self, device: torch.device) -> Parts:
        if self.method == "ulysses":
            return Parts.equal(self.length, self.group, SEQUENCE, device)
        runs = torch.arange(self.length, device=device).tensor_split(2 * self.ranks)
        both = tuple(torch.cat([runs[rank], runs[-1 - rank]]) for rank in range(self.ranks))
        return Parts(self.group, SEQUENCE, both)

    def attend(  # noqa: PLR0913 - the arguments of PyTorch's function
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attend with this rank's queries to the keys of all ranks; shapes ``[batch, heads, positions, width]``."""
        self._attended = True
        if key.shape[POSITIONS] != query.shape[POSITIONS]:
            raise ConfigurationError(
                f"Strategy: cp is {self.ranks}, and attention has {query.shape[POSITIONS]} queries and"
                f" {key.shape[POSITIONS]} keys; accepted is attention of a sequence to itself."
            )
        if enable_gqa:
            each = query.shape[1] // key.shape[1]
            key, value = (item.repeat_interleave(each, 1) for item in (key, value))
        options = {"dropout_p": dropout_p, "scale": scale}
        if self.method == "ulysses":
            return self._by_heads(query, key, value, attn_mask, is_causal, options)
        parts = Parts(self.group, POSITIONS, self.known.indices)
        keys, values = collectives.gather(key, parts), collectives.gather(value, parts)
        if is_causal:
            sizes = [run.size for run in self.runs]
            mixed = [
                functional.scaled_dot_product_attention(
                    some, keys[:, :, : run.last], values[:, :, : run.last], run.mask, **options
                )
                for run, some in zip(self.runs, query.split(sizes, POSITIONS), strict=True)
            ]
            return torch.cat(mixed, POSITIONS)
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask, **options)

    def _by_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        options: dict[str, Any],
    ) -> torch.Tensor:
        if query.shape[1] % self.ranks:
            raise ConfigurationError(
                f"Strategy: context is 'ulysses' with cp {self.ranks}; cp must then divide the {query.shape[1]} heads."
            )
        if key.shape[1] % self.ranks:
            each = query.shape[1] // key.shape[1]
            key, value = (item.repeat_interleave(each, 1) for item in (key, value))
        if mask is not None and mask.shape[-2] > 1:
            rows = mask.transpose(-2, 1).contiguous()
            mask = Parts(self.group, 1, self.known.indices).gather(rows).transpose(-2, 1)
            if mask.shape[1] > 1:
                mask = mask.chunk(self.ranks, 1)[dist.get_rank(self.group)]
        query, key, value = (self._to_heads(item) for item in (query, key, value))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, **options
        )
        return self._to_positions(mixed)

    def _to_heads(self, item: torch.Tensor) -> torch.Tensor:
        """All heads of some positions to some heads of all positions."""
        heads = item.shape[1] // self.ranks
        rows = item.permute(1, 2, 0, 3)  # heads, positions, batch, width
        mine = rows.shape[1]
        sizes = [len(index) for index in self.known.indices]
        flat = rows.reshape(-1, *rows.shape[2:])
        found = exchange(flat, [heads * mine] * self.ranks, [heads * size for size in sizes], self.group)  # fmt: skip
        pieces = [
            piece.unflatten(0, (heads, -1)) for piece in found.split([heads * n for n in sizes])
        ]
        return torch.cat(pieces, 1).permute(2, 0, 1, 3)

    def _to_positions(self, item: torch.Tensor) -> torch.Tensor:
        """Some heads of all positions to all heads of some positions."""
        rows = item.permute(1, 2, 0, 3)
        heads = rows.shape[0]
        sizes = [len(index) for index in self.known.indices]
        mine = sizes[dist.get_rank(self.group)]
        flat = torch.cat([piece.flatten(0, 1) for piece in rows.split(sizes, 1)])
        found = exchange(flat, [heads * size for size in sizes], [heads * mine] * self.ranks, self.group)  # fmt: skip
        return found.unflatten(0, (heads * self.ranks, mine)).permute(2, 0, 1, 3)


@dataclass(frozen=True)
class _Run:
    """Some queries that follow each other."""

    size: int
    last: int
    """Keys that the last one sees."""
    mask: Any

    @classmethod
    def of(cls, positions: torch.Tensor) -> list[_Run]:
        """Return the runs of some positions.

        Where PyTorch has kernels for it, a mask is one without memory; it cannot be made while selective recomputation
        watches, so it is made before the first block.
        """
        breaks = (positions.diff() != 1).nonzero().flatten() + 1
        found = []
        for run in positions.tensor_split(breaks.cpu()):
            if len(run):
                size, last = len(run), int(run[-1]) + 1
                on_cpu = run.device.type == "cpu"
                mask = torch.arange(last) <= run[:, None] if on_cpu else causal_lower_right(size, last)  # fmt: skip
                found.append(cls(size, last, mask))
        return found


class _Attention(TorchFunctionMode):  # type: ignore[misc]
    """Attention over the positions of all ranks, while a block computes."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is functional.scaled_dot_product_attention:
            return self._context.attend(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def share_attention(block: nn.Module, context: Context) -> None:
    """Let a block's attention see the positions of all ranks."""
    inner = block.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Attention(context):
            return inner(*args, **kwargs)

    block.forward = forward
