from collections import Counter

import msgspec
import pytest
from hypothesis import given, strategies as st

from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import Layout, TensorEntry, TensorRef, TensorSpec
from dlrover.errors import ConfigurationError, InfrastructureError

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
keys = st.text() | st.integers(-(2**63), 2**63 - 1)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(Counter)
    ),
    max_leaves=20,
)


def packed(value):
    return layouts.encode(layouts.pack(value, (), lambda leaf, path: leaf))


@given(trees)
def test_plain_values_come_back_equal_and_of_the_same_type(value):
    back = layouts.decode(packed(value))
    assert back == value
    assert repr(back) == repr(value)


def test_tensors_are_kept_as_references():
    def leaf(value, path):
        return layouts.pack_ref(value.imag)

    tree = layouts.pack({"a": [1, (Leaf(7),)]}, (), leaf)
    assert layouts.decode(layouts.encode(tree)) == {"a": [1, (TensorRef(7),)]}


class Leaf:
    def __init__(self, imag):
        self.imag = imag


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"b": [object()]}}, "a.b.0 is a builtins.object"),
        ({"a": {(1, 2): 3}}, r"a has the key \(1, 2\)"),
        ({"a": {1.5: 3}}, "a has the key 1.5"),
        ({"a": {True: 3}}, "a has the key True"),
        ({"a": 1j}, "a is a builtins.complex"),
        ({"a": "\ud800"}, "not Unicode"),
        ({"a": msgspec.msgpack.Ext(5, b"x")}, "a is a msgspec.*Ext"),  # could not be read again
    ],
)
def test_what_cannot_be_kept_is_named(value, words):
    with pytest.raises(ConfigurationError, match=words):
        packed(value)


def test_a_tree_that_contains_itself_is_refused():
    tree: list = []
    tree.append(tree)
    with pytest.raises(ConfigurationError, match="contains itself"):
        packed(tree)


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_skeleton_or_an_error(data):
    try:
        layouts.decode(data)
    except InfrastructureError:
        return


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(layouts.ITEM_BYTES)),
            st.lists(st.integers(0, 300), max_size=3).map(tuple),
        )
    )
)
def test_places_do_not_overlap_and_are_aligned(specs):
    named = [TensorSpec((str(i),), dtype, shape, None) for i, (dtype, shape) in enumerate(specs)]
    entries = layouts.place(named, list(range(len(named))))
    end = 0
    for entry in entries:
        assert entry.offset >= end
        assert entry.offset % layouts.ITEM_BYTES[entry.dtype] == 0
        end = max(end, entry.end)
    layouts.check(Layout(entries, b"", 0), end)


def test_tied_tensors_have_one_place():
    spec = ("float32", (4,))
    entries = layouts.place([TensorSpec((key,), *spec, None) for key in "abc"], [0, 0, 2])
    assert entries[0].offset == entries[1].offset != entries[2].offset


@pytest.mark.parametrize(
    "entry",
    [
        TensorEntry(("a",), "float32", (4,), None, 0, 8),
        TensorEntry(("a",), "float32", (4,), None, 100, 16),
        TensorEntry(("a",), "float32", (4,), None, -16, 16),
        TensorEntry(("a",), "float32", (4,), None, 2, 16),
        TensorEntry(("a",), "float32", (-1,), None, 0, -4),
        TensorEntry(("a",), "object", (1,), None, 0, 8),
    ],
)
def test_impossible_entries_are_refused(entry):
    with pytest.raises(InfrastructureError, match="The tensor a"):
        layouts.check(Layout((entry,), b"", 0), 64)
