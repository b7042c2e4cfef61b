"""What the saver writes for DCP without torch equals what torch writes."""

import io
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import random_trees
import torch
from hypothesis import given, strategies as st
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from dlrover.checkpoint.engine.tree import DTYPE_NAMES, DTYPES
from dlrover.checkpoint.machine.layout import TensorPart, TensorRef
from dlrover.checkpoint.storage import dcp
from dlrover.checkpoint.storage.dcp import Item, Leaf
from dlrover.checkpoint.storage.stored_step import StoredTensor

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

Rank = tuple[Sequence[Leaf], Sequence[StoredTensor]]


def by_torch(ranks: Iterable[Rank], objects: Mapping[str, Item]) -> of_torch.Metadata:
    """The metadata, made of torch's own classes."""
    described: dict[str, Any] = {name: of_torch.BytesStorageMetadata() for name in objects}
    places = {of_torch.MetadataIndex(name): _StorageInfo(*item) for name, item in objects.items()}
    paths: dict[str, Any] = {}
    for number, (items, tensors) in enumerate(ranks):
        for leaf in items:
            if isinstance(leaf.value, TensorRef):
                add_chunk(described, places, leaf.name, tensors[leaf.value.index])
            if number == 0 or leaf.name in described:
                paths.setdefault(leaf.name, leaf.path)
    return of_torch.Metadata(described, paths, places, of_torch.StorageMeta())


def add_chunk(described: dict[str, Any], places: dict, name: str, tensor: StoredTensor) -> None:
    whole, at, shape = map(torch.Size, tensor.extent)
    properties = of_torch.TensorProperties(dtype=DTYPES[tensor.dtype])
    known = described.setdefault(name, of_torch.TensorStorageMetadata(properties, whole, []))
    if not isinstance(known, of_torch.TensorStorageMetadata) or known.size != whole:
        return
    index = of_torch.MetadataIndex(name, offset=at, index=len(known.chunks))
    if index not in places and (tensor.nbytes or not whole.numel()):
        known.chunks.append(of_torch.ChunkStorageMetadata(offsets=at, sizes=shape))
        places[index] = _StorageInfo(tensor.file, *tensor.item)


numbers = st.integers(0, 2) | st.integers(0, 2**62)
names = st.sampled_from(["offset", "größe", "层", "\N{SNOWMAN}", "chunks"]) | st.text(min_size=1)


@st.composite
def ranks(draw) -> list[Rank]:
    """States of several ranks that share names, but not always their meaning."""
    paths = draw(st.lists(st.lists(names | st.integers(0, 300), min_size=1, max_size=4).map(tuple)))
    wholes = st.sampled_from([(), (0,), (4, 2), (2**40,), (3, 0, 300)])
    found = []
    for number in range(draw(st.integers(1, 4))):
        leaves: dict[str, Leaf] = {}
        tensors: list[StoredTensor] = []
        for path in paths:
            name = ".".join(map(str, path))
            if draw(st.booleans()):
                leaves[name] = Leaf(name, path, "plain")
                continue
            whole = draw(wholes)
            at, shape = [tuple(draw(numbers) for _ in whole) for _ in range(2)]
            part = draw(st.none() | st.just(TensorPart(whole, at, 0)))
            leaves[name] = Leaf(name, path, TensorRef(len(tensors)))
            tensors.append(
                StoredTensor(
                    path, draw(st.sampled_from(sorted(DTYPES))), shape if part else whole, part,
                    f"{draw(names)}/__{number}_0.distcp", 0, draw(numbers), 0, (draw(numbers), draw(numbers)),
                )
            )  # fmt: skip
        found.append((list(leaves.values()), tensors))
    return found


@given(ranks(), numbers)
def test_metadata_equal_those_of_torch(ranks, offset):
    objects = {
        leaf.name: Item("__0_1.distcp", offset, 300)
        for leaf in ranks[0][0]
        if leaf.value == "plain"
    }
    ours, theirs = pickle.loads(dcp.metadata(ranks, objects)), by_torch(ranks, objects)
    assert ours == theirs
    for name in ("state_dict_metadata", "planner_data", "storage_data"):
        assert repr(getattr(ours, name)) == repr(
            getattr(theirs, name)
        )  # order, and indices of chunks
    assert pickle.loads(pickle.dumps(ours)) == theirs


def test_metadata_name_every_type_as_torch_does():
    tensors = [StoredTensor((name,), name, (2,), None, "file", 0, 2, 0, (0, 9)) for name in DTYPES]
    leaves = [Leaf(name, (name,), TensorRef(at)) for at, name in enumerate(DTYPES)]
    ours = pickle.loads(dcp.metadata([(leaves, tensors)], {}))
    assert ours == by_torch([(leaves, tensors)], {})
    assert ours.state_dict_metadata["bfloat16"].properties.dtype is torch.bfloat16


plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary(min_size=1)
)
values = st.recursive(
    plain | st.text() | st.just("TensorRef") | random_trees.tensors.map(torch.Tensor.contiguous),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
)


@given(values)
def test_torch_loads_an_object_without_trusting_it(value):
    tensors: list[torch.Tensor] = []

    def referring(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            return TensorRef(len(tensors) - 1)
        if isinstance(item, dict):
            return {key: referring(one) for key, one in item.items()}
        return type(item)(map(referring, item)) if isinstance(item, list | tuple) else item

    def tensor(index: int) -> tuple[str, Sequence[int], memoryview]:
        found = tensors[index]
        return DTYPE_NAMES[found.dtype], found.shape, memoryview(random_trees.bits(found))

    written = io.BytesIO(dcp.object_file(referring(value), tensor))
    random_trees.assert_same(torch.load(written, weights_only=True), value)
    archive = zipfile.ZipFile(written)
    assert archive.testzip() is None
    assert len(archive.namelist()) == 3 + len(tensors)
