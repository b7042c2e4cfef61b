"""Checkpoints from one format to another, without a training."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import xxhash

from dlrover.checkpoint import layout as layouts, persist, safetensorsfile, sources, storage, tools
from dlrover.checkpoint.content import Content
from dlrover.checkpoint.layout import Layout, TensorEntry, TensorRef, TensorSpec
from dlrover.checkpoint.local import sync_directory
from dlrover.checkpoint.saves import SaveId
from dlrover.checkpoint.stores import (
    DCP_METADATA,
    MANIFEST,
    is_url,
    join,
    location_of,
    open_store,
    step_folder,
)
from dlrover.checkpoint.tools import Place
from dlrover.errors import ConfigurationError, InfrastructureError

COPY = 1 << 24
"""Bytes that are uploaded at a time."""
_LAST = (MANIFEST, DCP_METADATA)

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


def convert(
    source: Place, destination: Place, to: Format, step: int | None = None, *, trusted: bool = False
) -> Conversion:
    """Read ``source``, of any format, and write ``destination``, which appears when it is whole.

    Args:
        source: a checkpoint directory, one of its steps, or a DCP directory, also at a URL; or a file of
            safetensors or ``torch.save``.
        destination: a file, or a directory for ``dcp`` and ``flash``. ``flash`` is a checkpoint
            directory with one step of one rank, which any number of ranks can load. What is to be at a
            URL is written to this machine's temporary files first.
        to: the format of the destination.
        step: which one of a checkpoint directory; for sources without steps the number of the new one.
        trusted: whether the metadata of a DCP directory may be read, a pickle, which runs whatever it says.

    Raises:
        ConfigurationError: an argument is wrong, or something cannot be kept; the message names it.
        InfrastructureError: the source is damaged, or the destination cannot be written.
    """
    text = os.fspath(destination)
    target = _Remote(text) if is_url(text) else _Local(Path(text))
    target.check()
    content = sources.read(source, step, trusted=trusted)
    number = _step(content, step, to)
    try:
        with target.published() as temporary:
            _WRITERS[to](content, temporary, number or 0)
    except OSError as error:
        raise InfrastructureError(f"{location_of(text)} cannot be written: {error}.") from error
    return Conversion(
        destination=location_of(text),
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
            store=open_store(temporary),
            save=SaveId(0, 1, step, secrets.randbits(63)),
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
        written = flash / step_folder(step)
        (written / MANIFEST).unlink()
        (written / storage.index_file(0)).unlink()
        sync_directory(written)
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


# ---- places


class _Local:
    """A file or directory of this machine: it appears when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self) -> None:
        if os.path.lexists(self._path):
            raise ConfigurationError(f"{self._path} exists already; name one that does not.")
        if not self._path.absolute().parent.is_dir():
            raise ConfigurationError(f"{self._path.parent} is no directory.")

    @contextlib.contextmanager
    def published(self) -> Iterator[Path]:
        """A name to write to; what is there at the end of the block becomes the destination."""
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            yield temporary
            self.check()
            temporary.rename(self._path)
            sync_directory(self._path.absolute().parent)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink(missing_ok=True)


class _Remote:
    """A file or directory at a URL: what says that a directory is whole is written last."""

    def __init__(self, url: str) -> None:
        parent, _, self._name = url.rstrip("/").rpartition("/")
        self._parent = open_store(parent)

    def check(self) -> None:
        where = self._parent.where(self._name)
        with tools.told(where):
            if self._parent.names(self._name) or self._parent.exists(self._name):
                raise ConfigurationError(f"{where} exists already; name one that does not.")

    @contextlib.contextmanager
    def published(self) -> Iterator[Path]:
        """A name to write to; what is there at the end of the block becomes the destination."""
        with tempfile.TemporaryDirectory(prefix="dlrover-convert-") as folder:
            temporary = Path(folder) / self._name
            yield temporary
            self.check()
            if temporary.is_file():
                self._upload(temporary, self._name)
                return
            found = [path for path in temporary.rglob("*") if path.is_file()]
            for path in sorted(found, key=lambda path: (path.name in _LAST, path)):
                self._upload(path, join(self._name, str(path.relative_to(temporary))))

    def _upload(self, path: Path, name: str) -> None:
        with path.open("rb") as source, self._parent.create(name) as target:
            while data := source.read(COPY):
                target.write(data)
