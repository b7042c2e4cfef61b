"""Random states, for property tests."""

import math

import torch
from hypothesis import strategies as st

from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.machine import layout as layouts

FORMS = ("plain", "transposed", "strided", "expanded", "conjugate")


def make(dtype: str, shape: tuple[int, ...], form: str, seed: int) -> torch.Tensor:
    """A tensor with random bits, laid out in some way."""
    generator = torch.Generator().manual_seed(seed)
    wide = (*shape, 2)
    count = math.prod(wide) * layouts.ITEM_BYTES[dtype]
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), generator=generator)
    tensor = raw.to(torch.uint8).view(tree.DTYPES[dtype]).view(wide)
    if form == "strided":
        return tensor[..., 0]
    if form == "transposed":
        return tensor.permute(*reversed(range(tensor.dim())))
    if form == "expanded":
        return tensor[..., :1].expand(*shape, 3)
    if form == "conjugate" and tensor.is_complex() and dtype != "complex32":
        return tensor.conj()
    return tensor.contiguous()


tensors = st.builds(
    make,
    st.sampled_from(sorted(tree.DTYPES)),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from(FORMS),
    st.integers(0, 99),
)
leaves = tensors | st.none() | st.integers() | st.text(max_size=5)
trees = st.dictionaries(
    st.text(min_size=1, max_size=3),
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
    return dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert bits(one) == bits(other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            assert_same(mine, its)
    else:
        assert one == other


def blank(value):
    """The same tree, with other content, in dense tensors."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(blank, value))
    return "other"
