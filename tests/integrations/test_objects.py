"""Any state becomes one that a checkpoint can hold, and comes back equal."""

import argparse
import dataclasses
import enum
from collections import OrderedDict

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.engine import tree
from dlrover.errors import ConfigurationError
from dlrover.integrations import objects

pytestmark = pytest.mark.torch


@dataclasses.dataclass
class Setting:
    rate: float
    names: list[str]


class Colour(enum.Enum):
    RED = 1


ODD = {
    "namespace": argparse.Namespace(a=1, b=[2]),
    "dataclass": Setting(0.5, ["x"]),
    "enum": Colour.RED,
    "numbers": np.float32(1.5),
    "size": torch.Size([2, 3]),
    "ordered": OrderedDict([("b", OrderedDict([(1, 2)])), ("a", {3: "c"})]),
    "set": {1, 2},
    "device": torch.device("cpu"),
    "dtype": torch.bfloat16,
    "keys": {(1, 2): "tuple", 1.5: "float", None: "none", True: "bool"},
    "tagged": {objects.TAG: "mine"},
    "nested": [({"set": {3}}, None), b"bytes"],
    "complex": 1j,
}


def there_and_back(state):
    """Through what a saver keeps: the skeleton in MessagePack."""
    packed = tree.flatten({"state": objects.encode(state)}).packed
    assert msgspec.msgpack.encode(packed)
    return objects.decode(objects.encode(state), trusted=True)


@pytest.mark.parametrize("key", ODD)
def test_a_leaf_comes_back_equal(key):
    back = there_and_back(ODD[key])
    assert back == ODD[key]
    assert type(back) is type(ODD[key])


def test_arrays_and_odd_tensors_come_back_equal():
    state = {
        "array": np.arange(6).reshape(2, 3),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
    }
    back = there_and_back(state)
    assert np.array_equal(back["array"], state["array"])
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))
    assert back["meta"].is_meta


def test_tensors_stay_the_live_ones():
    weight = torch.nn.Parameter(torch.ones(2))
    encoded = objects.encode(OrderedDict(a=[weight]))
    assert tree.flatten({"state": encoded}).tensors[0] is weight


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"), max_size=3)
)
KEYS = st.text(st.characters(codec="utf-8"), max_size=3) | st.integers(-9, 9) | st.none()
LEAVES |= st.frozensets(st.integers(), max_size=2) | st.just(objects.TAG)


@given(
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=2).map(tuple)
            | st.dictionaries(KEYS | st.just(objects.TAG), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_any_tree_comes_back_equal(state):
    assert there_and_back(state) == state


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(ConfigurationError, match=r"a\.0 is a function, which cannot be pickled"):
        objects.encode({"a": [lambda: 0]})


@pytest.mark.slow
def test_an_excerpt_reads_only_its_keys(directory):
    checkpointer = Checkpointer(directory)
    assert objects.read(checkpointer, ("a",), trusted=True) is None
    state = {"a": torch.ones(3), "b": {"c": [torch.ones(2, 5), 7]}, "d": objects.encode({1, 2})}
    checkpointer.save(4, state)
    record, found = objects.read(checkpointer, ("a",), trusted=True)
    checkpointer.close()
    assert (record.step, record.source) == (4, "memory")
    assert torch.equal(found["a"], torch.ones(3))
    hollow, number = found["b"]["c"]
    assert torch.equal(hollow, torch.zeros(2, 5))
    assert hollow.untyped_storage().nbytes() == 4
    assert number == 7
    assert found["d"] == {1, 2}


def test_objects_are_read_only_if_they_are_trusted():
    held = objects.encode({"odd": ODD["dataclass"], "plain": [1, torch.ones(2)]})
    with pytest.raises(ConfigurationError, match=r"pickled objects.*pass trusted=True"):
        objects.decode(held, trusted=False)
    assert objects.decode(held, trusted=True)["odd"] == ODD["dataclass"]
    assert objects.decode({"plain": held["plain"]}, trusted=False)["plain"][0] == 1
    harmless = objects.pickled({"w": torch.ones(2), "step": 3}, ())
    assert objects.unpickled(harmless, trusted=False)["step"] == 3
