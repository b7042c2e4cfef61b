"""Checkpoints from one format to another, without a training."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import xxhash

from dlrover.checkpoint import layout as layouts, persist, safetensorsfile, sources, storage
from dlrover.checkpoint.content import Content
from dlrover.checkpoint.layout import Layout, TensorEntry, TensorRef, TensorSpec
from dlrover.errors import ConfigurationError, InfrastructureError

Format = Literal["dcp", "safetensors", "torch", "flash"]


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    destination: str
    format: Format
    step: int | None
    """The source's, or that of the new checkpoint directory; None: neither has one."""
    tensors: int
    nbytes: int
    """Of the tensors; tied ones count once."""
    differing: list[str]
    """What several ranks had saved, each its own: the lowest rank's was taken."""


def convert(source: Path, destination: Path, to: Format, step: int | None = None) -> Conversion:
    """Read ``source``, of any format, and write ``destination``, which appears when it is whole.

    Args:
        source: a checkpoint directory, one of its steps, a DCP directory, or a file of safetensors or
            ``torch.save``.
        destination: a file, or a directory for ``dcp`` and ``flash``. ``flash`` is a checkpoint
            directory with one step of one rank, which any number of ranks can load.
        to: the format of the destination.
        step: which one of a checkpoint directory; for sources without steps the number of the new one.

    Raises:
        ConfigurationError: an argument is wrong, or something cannot be kept; the message names it.
        InfrastructureError: the source is damaged, or the destination cannot be written.
    """
    _check_destination(destination)
    content = sources.read(source, step)
    number = _step(content, step, to)
    try:
        with _published(destination) as temporary:
            _WRITERS[to](content, temporary, number or 0)
    except OSError as error:
        raise InfrastructureError(f"{destination} cannot be written: {error}.") from error
    return Conversion(
        destination=str(destination),
        format=to,
        step=number,
        tensors=len(content.tensors),
        nbytes=sum(content.tensors[index].nbytes for index in set(content.same_as)),
        differing=list(content.differing),
    )


def _step(content: Content, wanted: int | None, to: Format) -> int | None:
    """The number of the step that is written, or was read."""
    if content.step is not None:
        if wanted not in (None, content.step):
            raise ConfigurationError(f"--step is {wanted}; the source is step {content.step}.")
        return content.step
    if to != "flash":
        if wanted is not None:
            raise ConfigurationError(
                f"--step is {wanted}; neither source nor destination has steps."
            )
        return None
    said = content.tree.get("step")
    default = said if type(said) is int and said >= 0 else 0
    number = default if wanted is None else wanted
    if number < 0:
        raise ConfigurationError(f"--step is {number}; it must be 0 or more.")
    return number


# ---- destinations


def _write_flash(content: Content, temporary: Path, step: int) -> None:
    """A checkpoint directory; sources are read twice: checksums come before the data."""
    same = content.same_as
    held = list(zip(content.paths, content.tensors, strict=True))
    specs = [TensorSpec(path, tensor.dtype, tensor.shape) for path, tensor in held]
    entries = layouts.place(specs, same)
    sums: list[int] = []
    for index, first in enumerate(same):
        known = first < index
        sums.append(
            sums[first] if known else xxhash.xxh3_64_intdigest(content.tensors[index].data())
        )
    layout = Layout(entries, content.skeleton, layouts.layout_hash(entries))
    source = persist.Source(_OneByOne(content), layout, sums)
    temporary.mkdir()
    persist.persist(
        persist.Job(
            directory=temporary,
            step=step,
            session=secrets.randbits(63),
            world_size=1,
            sources={0: source},
            pause=lambda _: None,
            patience=0.0,
            metrics=content.metrics,
        )
    )


class _OneByOne:
    """Has the tensors' bytes as a generation has them, but none of them in memory."""

    def __init__(self, content: Content) -> None:
        self._by_path = dict(zip(content.paths, content.tensors, strict=True))

    def tensor_bytes(self, entry: TensorEntry) -> memoryview:
        """The bytes of one tensor."""
        return self._by_path[entry.path].data()


def _write_dcp(content: Content, temporary: Path, step: int) -> None:
    """A step of ours is a DCP directory; what only we read is left out."""
    flash = temporary.with_name(f"{temporary.name}.flash")
    try:
        _write_flash(content, flash, step)
        written = storage.step_directory(flash, step)
        (written / storage.MANIFEST).unlink()
        (written / storage.index_file(0)).unlink()
        storage.sync_directory(written)
        written.rename(temporary)
    finally:
        shutil.rmtree(flash, ignore_errors=True)


def _write_safetensors(content: Content, temporary: Path, _: int) -> None:
    safetensorsfile.write(content, temporary)


def _write_torch(content: Content, temporary: Path, _: int) -> None:
    """All tensors at once: the format wants their descriptions before the data of the first one."""
    tensors: list[torch.Tensor] = []
    for index, first in enumerate(content.same_as):
        tensors.append(tensors[first] if first < index else _alone(content.tensors[index].read()))

    def filled(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return tensors[value.index]
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(filled, value))
        return value

    with temporary.open("wb") as file:
        torch.save(filled(content.tree), file)
        file.flush()
        os.fsync(file.fileno())


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the rest of a larger one that it is a view of; all of that would be written."""
    if not tensor.numel():
        return torch.empty_like(tensor)  # torch refuses one that begins where another one does
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


_WRITERS: dict[Format, Callable[[Content, Path, int], None]] = {
    "dcp": _write_dcp,
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "flash": _write_flash,
}


# ---- names


def _check_destination(destination: Path) -> None:
    if os.path.lexists(destination):
        raise ConfigurationError(f"{destination} exists already; name one that does not.")
    if not destination.absolute().parent.is_dir():
        raise ConfigurationError(f"{destination.parent} is no directory.")


@contextlib.contextmanager
def _published(destination: Path) -> Iterator[Path]:
    """A name to write to; what is there at the end of the block becomes the destination."""
    temporary = destination.with_name(f".{destination.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        _check_destination(destination)
        temporary.rename(destination)
        storage.sync_directory(destination.absolute().parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)
