"""Conversion of checkpoints between formats, without a training."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import torch
import xxhash

from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import Layout, TensorSpec
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import persist
from dlrover.checkpoint.storage.local import sync_directory
from dlrover.checkpoint.storage.stored_step import index_file
from dlrover.checkpoint.storage.stores import (
    DCP_METADATA,
    MANIFEST,
    explained,
    is_url,
    join,
    location_of,
    open_store,
    step_folder,
)
from dlrover.checkpoint.tools import safetensorsfile, sources
from dlrover.checkpoint.tools.content import Content
from dlrover.checkpoint.tools.tools import Place
from dlrover.errors import ConfigurationError, InfrastructureError

COPY = 1 << 24
"""Bytes per read of an upload."""
_LAST = (MANIFEST, DCP_METADATA)

Format = Literal["dcp", "safetensors", "torch", "flash"]


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a conversion."""

    destination: str
    format: Format
    step: int | None
    """The step of the source or of the new checkpoint directory; None if neither has one."""
    tensors: int
    nbytes: int
    """Bytes of the tensors; tied ones count once."""
    differing: list[str]
    """Paths whose values differed between ranks; the lowest rank's value was taken."""


def convert(
    source: Place, destination: Place, to: Format, step: int | None = None, *, trusted: bool = False
) -> Conversion:
    """Read ``source``, of any format, and write ``destination``, which appears only when it is complete.

    Args:
        source: a checkpoint directory, one of its steps, or a DCP directory, also at a URL; or a file of
            safetensors or ``torch.save``.
        destination: a file, or a directory for ``dcp`` and ``flash``. ``flash`` is a checkpoint
            directory with one step of one rank, which any number of ranks can load. For a URL, the
            output is written to this machine's temporary files first.
        to: the format of the destination.
        step: the step to read from a checkpoint directory; for sources without steps, the new step's number.
        trusted: allow reading the metadata of a DCP directory, a pickle, which can run any code.

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
            match to:
                case "flash":
                    _write_flash(content, temporary, number or 0)
                case "dcp":
                    _write_dcp(content, temporary, number or 0)
                case "safetensors":
                    safetensorsfile.write(content, temporary)
                case "torch":
                    _write_torch(content, temporary)
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
    """Return the number of the step that is written, or was read."""
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
    """Write a checkpoint directory; read sources twice, as checksums come before the data."""
    same = content.same_as
    held = list(zip(content.paths, content.tensors, strict=True))
    specs = [TensorSpec(path, tensor.dtype, tensor.shape, None) for path, tensor in held]
    entries = layouts.place(specs, same)
    sums: list[int] = []
    for index, first in enumerate(same):
        known = first < index
        sums.append(
            sums[first] if known else xxhash.xxh3_64_intdigest(content.tensors[index].data())
        )
    layout = Layout(
        entries, content.skeleton, layouts.layout_hash(msgspec.Raw(msgspec.msgpack.encode(entries)))
    )
    by_path = dict(held)
    source = persist.RankPart(lambda entry: by_path[entry.path].data(), layout, sums)
    temporary.mkdir()
    persist.persist(
        persist.PersistJob(
            store=open_store(temporary),
            save=SaveId(0, 1, step, secrets.randbits(63)),
            world_size=1,
            sources={0: source},
            pause=lambda _: None,
            patience=0.0,
            metrics=content.metrics,
        )
    )


def _write_dcp(content: Content, temporary: Path, step: int) -> None:
    """Write a stored step, which is a DCP directory, without the files that only DLRover reads."""
    flash = temporary.with_name(f"{temporary.name}.flash")
    try:
        _write_flash(content, flash, step)
        written = flash / step_folder(step)
        (written / MANIFEST).unlink()
        (written / index_file(0)).unlink()
        sync_directory(written)
        written.rename(temporary)
    finally:
        shutil.rmtree(flash, ignore_errors=True)


def _write_torch(content: Content, temporary: Path) -> None:
    """Write all tensors at once: the format wants all descriptions before the first tensor's data."""
    tensors: list[torch.Tensor] = []
    for index, first in enumerate(content.same_as):
        tensors.append(tensors[first] if first < index else _alone(content.tensors[index].read()))

    state = layouts.replace_refs(content.tree, lambda ref, _: tensors[ref.index])
    with temporary.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's own, while it handles the file's
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without the rest of a larger one that it views; torch would write all of that."""
    if not tensor.numel():
        return torch.empty_like(tensor)  # torch refuses one that begins where another begins
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


# ---- places


class _Local:
    """A file or directory on this machine, which appears only when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self) -> None:
        if os.path.lexists(self._path):
            raise ConfigurationError(f"{self._path} exists already; name one that does not.")
        if not self._path.absolute().parent.is_dir():
            raise ConfigurationError(f"{self._path.parent} is no directory.")

    @contextlib.contextmanager
    def published(self) -> Iterator[Path]:
        """Yield a path to write to; its content becomes the destination at the end of the block."""
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
    """A file or directory at a URL; files that mark a directory as complete are uploaded last."""

    def __init__(self, url: str) -> None:
        parent, _, self._name = url.rstrip("/").rpartition("/")
        self._parent = open_store(parent)

    def check(self) -> None:
        where = self._parent.where(self._name)
        with explained(f"{where} cannot be used"):
            if self._parent.names(self._name) or self._parent.exists(self._name):
                raise ConfigurationError(f"{where} exists already; name one that does not.")

    @contextlib.contextmanager
    def published(self) -> Iterator[Path]:
        """Yield a path to write to; its content becomes the destination at the end of the block."""
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
