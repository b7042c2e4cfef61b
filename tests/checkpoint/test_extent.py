import pytest
import torch
from hypothesis import given, strategies as st

from dlrover.checkpoint.machine import extent
from dlrover.checkpoint.machine.extent import Extent, cover
from dlrover.errors import InfrastructureError

sizes = st.integers(0, 9)


@st.composite
def cuts(draw, size: int) -> list[tuple[int, int]]:
    """A dimension cut into parts: (start, size) of each."""
    ends = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
    starts = [0, *ends]
    return [(a, b - a) for a, b in zip(starts, [*ends, size], strict=True)]


@st.composite
def grids(draw) -> tuple[tuple[int, ...], list[Extent], Extent]:
    """A shape, its cutting into boxes, and a wanted box."""
    whole = tuple(draw(st.lists(sizes, max_size=3)))
    boxes = [Extent(whole, (), ())]
    for size in whole:
        parts = draw(cuts(size))
        boxes = [
            Extent(whole, (*box.at, start), (*box.shape, count))
            for box in boxes
            for start, count in parts
        ]
    at = tuple(draw(st.integers(0, size)) for size in whole)
    shape = tuple(draw(st.integers(0, size - a)) for size, a in zip(whole, at, strict=True))
    return whole, boxes, Extent(whole, at, shape)


def slices(at: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))


@given(grids())
def test_any_box_is_put_together_from_any_grid(grid):
    whole, boxes, wanted = grid
    tensor = torch.randn(whole)
    found = torch.full(wanted.shape, torch.nan)
    parts = [(box, tensor[slices(box.at, box.shape)]) for box in boxes]
    for saved, box in cover("The tensor w", wanted, [*parts, *parts]):
        found[box.target] = saved[box.source]
    assert torch.equal(found, tensor[slices(wanted.at, wanted.shape)])


def test_what_was_not_saved_is_counted():
    part = Extent((4, 2), (0, 0), (3, 2))
    with pytest.raises(InfrastructureError, match="tensor w is incomplete: 6 of its 8 elements"):
        cover("The tensor w", extent.entire((4, 2)), [(part, None)])


def test_boxes_that_overlap_are_not_taken_for_a_whole():
    parts = [(Extent((4,), (rank,), (3,)), None) for rank in range(2)]
    with pytest.raises(InfrastructureError):
        cover("The tensor w", extent.entire((4,)), parts)


@pytest.mark.parametrize(
    ("box", "fits"),
    [
        (Extent((4,), (2,), (2,)), True),
        (Extent((4,), (3,), (2,)), False),
        (Extent((4,), (-1,), (2,)), False),
        (Extent((4,), (0, 0), (2, 1)), False),
        (Extent((), (), ()), True),
    ],
)
def test_a_box_must_lie_in_the_whole(box, fits):
    assert box.fits() is fits
