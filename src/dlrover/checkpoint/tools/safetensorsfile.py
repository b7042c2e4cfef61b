"""Files in the safetensors format: tensors by dotted names, all other values as JSON in the metadata."""

from __future__ import annotations

import base64
import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrover import extras
from dlrover.checkpoint.engine.tree import DTYPES
from dlrover.checkpoint.machine.layout import ITEM_BYTES, TensorRef, name
from dlrover.checkpoint.tools.content import Content, LazyTensor, content_of
from dlrover.errors import ConfigurationError, InfrastructureError

TREE = "dlrover.tree"
"""Metadata key that holds the whole state as JSON, with tensors by name."""
NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16",
    "uint8": "U8", "bool": "BOOL", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""Tensor types that safetensors can hold, and its names for them."""
_OURS = {theirs: ours for ours, theirs in NAMES.items() if ours in DTYPES}


def read(path: Path) -> Content:
    """Read a file; the state of a file from another tool is a flat dict.

    Raises:
        ConfigurationError: the file holds a type that is not supported, or the package is missing.
        InfrastructureError: the file is damaged.
    """
    library = extras.load("safetensors", f"{path}", "safetensors")
    try:
        file = library.safe_open(path, framework="pt")
        held = {key: _tensor(file, key) for key in file.keys()}  # noqa: SIM118 - no dict
    except library.SafetensorError as error:
        raise InfrastructureError(f"{path} cannot be read: {error}.") from error
    metadata = {k: v for k, v in (file.metadata() or {}).items() if k != "format"}
    if TREE not in metadata:
        return content_of({**held, **({"__metadata__": metadata} if metadata else {})})
    try:
        content = content_of(_untagged(json.loads(metadata[TREE]), held))
    except (KeyError, ValueError, TypeError) as error:
        raise InfrastructureError(f"{path} has a damaged {TREE}: {error!r}.") from error
    lost = held.keys() - {tensor.same for tensor in content.tensors}
    if lost:
        raise InfrastructureError(f"{path} has tensors that its {TREE} does not name: {min(lost)}.")
    return content


def _tensor(file: Any, key: str) -> LazyTensor:
    described = file.get_slice(key)
    dtype = _OURS.get(described.get_dtype())
    if dtype is None:
        raise ConfigurationError(
            f"The tensor {key} has the type {described.get_dtype()}, which is not supported."
        )
    return LazyTensor(
        dtype, tuple(described.get_shape()), key, functools.partial(file.get_tensor, key)
    )


def write(content: Content, path: Path) -> None:
    """Write a file, one tensor after the other. Tied tensors are kept once, under the first one's name.

    Raises:
        ConfigurationError: the format cannot hold something; the message names it.
    """
    names = [name(content.paths[first]) for first in content.same_as]
    order = sorted(
        set(content.same_as), key=lambda i: (-ITEM_BYTES[content.tensors[i].dtype], names[i])
    )  # large elements first, so that all are aligned
    _check(content, names, order)
    tree = json.dumps(_tagged(content.tree, names), separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", TREE: tree}}
    end = 0
    for index in order:
        held = content.tensors[index]
        start, end = end, end + held.nbytes
        header[names[index]] = {
            "dtype": NAMES[held.dtype], "shape": held.shape, "data_offsets": (start, end)
        }  # fmt: skip
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for index in order:
            file.write(content.tensors[index].data())
        file.flush()
        os.fsync(file.fileno())


def _check(content: Content, names: Sequence[str], order: Sequence[int]) -> None:
    seen = {"__metadata__"}
    for index in order:
        dtype = content.tensors[index].dtype
        if dtype not in NAMES:
            raise ConfigurationError(
                f"The tensor {names[index]} has the type {dtype}, which safetensors cannot hold."
            )
        if names[index] in seen:
            raise ConfigurationError(
                f"safetensors cannot hold the tensor {names[index]}: that name is taken."
            )
        seen.add(names[index])


# ---- JSON


def _tagged(tree: Any, tensors: Sequence[str]) -> Any:
    """Convert a tree to JSON values; types that JSON lacks become a dict with one key that begins with ``$``.

    ``tensors`` are the tensors' names, by index.
    """
    if isinstance(tree, TensorRef):
        return {"$tensor": tensors[tree.index]}
    if isinstance(tree, dict):
        items = [(key, _tagged(item, tensors)) for key, item in tree.items()]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in tree)
        tag = "$counter" if isinstance(tree, Counter) else "$dict"
        return dict(items) if plain and tag == "$dict" else {tag: items}
    if isinstance(tree, list | tuple):
        inner = [_tagged(item, tensors) for item in tree]
        return inner if isinstance(tree, list) else {"$tuple": inner}
    if isinstance(tree, bytes):
        return {"$bytes": base64.b64encode(tree).decode()}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"$float": str(tree)}
    return tree


def _untagged(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Convert JSON values back to the tree.

    Raises:
        KeyError: a tensor or a tag is unknown.
    """
    if isinstance(value, list):
        return [_untagged(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _untagged(item, tensors) for key, item in value.items()}
    read: dict[str, Callable[[Any], Any]] = {
        "$tensor": lambda it: tensors[it],
        "$dict": lambda it: {key: _untagged(item, tensors) for key, item in it},
        "$counter": lambda it: Counter({key: _untagged(item, tensors) for key, item in it}),
        "$tuple": lambda it: tuple(_untagged(item, tensors) for item in it),
        "$bytes": base64.b64decode,
        "$float": float,
    }
    return read[tag](value[tag])
