"""The index of rows on disk: the compiled library and its twin know the same after the same operations."""

from __future__ import annotations

import numpy as np
import pytest

from dlrover._native import library
from dlrover._native.cold import Headers, NativeIndex, TwinIndex, index_bytes
from dlrover._native.tables import SLOTS, slots_of

loaded = library.load("auto").library
pytestmark = pytest.mark.skipif(loaded is None, reason="the compiled library is not there")
NAMES = np.random.default_rng(0).permutation(1 << 16).astype(np.uint64)


def headers(keys: np.ndarray, chance: np.random.Generator) -> Headers:
    count = len(keys)
    last, places = (chance.integers(0, 1 << 30, count).astype(np.uint32) for _ in range(2))
    return Headers(keys, last, chance.integers(0, 4, count).astype(np.uint16), places)


def same(one: Headers, other: Headers) -> None:
    orders = [np.argsort(each.keys) for each in (one, other)]
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a[orders[0]], b[orders[1]])


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 30, SLOTS])
def test_an_index_grows_and_shrinks_with_its_keys(slots: int) -> None:
    """All keys may be of few slots, as on a server; its bytes follow their number."""
    chance = np.random.default_rng(slots)
    names = NAMES[slots_of(NAMES) < slots]
    native, twin = NativeIndex(loaded), TwinIndex()
    assert native.nbytes() == 0
    for share in (0.1, 0.5, 1.0, 0.4, 0.7, 0.05, 0.0):
        some = names[chance.random(len(names)) < share]
        for each in (native, twin):
            each.remove(np.setdiff1d(names, some))
        given = headers(some[: len(some) // 2], chance)
        rest = headers(some[len(some) // 2 :], chance)
        for each in (native, twin):
            each.put(given)
            each.put(rest)
            each.move(given.keys, rest.places[: len(given.keys)])
            each.unflag(int(slots_of(names)[0]), 1)
        np.testing.assert_array_equal(native.find(names), twin.find(names))
        same(native.headers(some), twin.headers(some))
        np.testing.assert_array_equal(native.used(), twin.used())
        for slot in np.unique(slots_of(names))[:5].tolist():
            same(native.list(slot), twin.list(slot))
            same(native.list(slot, 2), twin.list(slot, 2))
        assert 16 * len(some) <= native.nbytes() <= index_bytes(len(some))
    assert native.nbytes() == 0
