"""Checkpoints in a directory: their names, what they must contain, and which of them can be used.

::

    <directory>/
    ├── checkpoint-id          names the directory; a new one gets a new name
    ├── latest                 the newest step that was stored (JSON)
    ├── step-40/               one checkpoint: what DCP reads, and
    │   ├── manifest.json      a `Manifest`; written last
    │   └── rank-0.index       a `RankIndex`: where each tensor of a rank lies, with its checksum
    ├── step-30.bad/           was found to be damaged
    └── .step-50.<session>/    is being written
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from dlrover._util import files
from dlrover.checkpoint import faults, layout as layouts
from dlrover.checkpoint.extent import Extent
from dlrover.checkpoint.layout import Layout, TensorEntry, name
from dlrover.checkpoint.policies import Policy, StepInfo
from dlrover.errors import InfrastructureError

if TYPE_CHECKING:
    from typing_extensions import Self


logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
TRACKER = "latest"
IDENTITY = "checkpoint-id"
_STEP = re.compile(r"step-(\d+)")


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    nbytes: int
    xxh3_64: str
    """Of the whole file, in hexadecimal."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint consists of."""

    format: int
    step: int
    world_size: int
    replicated: bool
    """Whether all ranks hold the same tensors: then any number of ranks can load it."""
    files: dict[str, FileRecord]
    metrics: dict[str, float] = {}
    """What the training measured at this step."""


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor's bytes lie."""

    path: layouts.Path
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    xxh3: int
    item: tuple[int, int]
    """Offset and length of the ``torch.save`` file around it."""
    part: layouts.Part | None = None

    @property
    def extent(self) -> Extent:
        """Where it lies in the whole tensor."""
        return layouts.extent_of(self.shape, self.part)


class RankIndex(msgspec.Struct, frozen=True):
    """One rank's state."""

    rank: int
    step: int
    skeleton: bytes
    tensors: tuple[StoredTensor, ...]
    files: dict[str, FileRecord]
    """Those that this rank wrote."""


class Tracker(msgspec.Struct, frozen=True):
    """The newest step that was stored."""

    step: int


# ---- names


def step_directory(directory: Path, step: int) -> Path:
    """Where a step lies once it is whole."""
    return directory / f"step-{step}"


def unfinished(directory: Path, step: int, session: int) -> Path:
    """Where a step is written; all savers of a world find the same place."""
    return directory / f".step-{step}.{session:016x}"


def index_file(rank: int) -> str:
    """The name of a rank's `RankIndex`."""
    return f"rank-{rank}.index"


def identity(directory: Path) -> str:
    """The name of this directory, made at its first use; the same for all who ask.

    Raises:
        InfrastructureError: it cannot be read or written.
    """
    path = directory / IDENTITY
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _name_directory(path)
        return path.read_text().strip()
    except OSError as error:
        raise InfrastructureError(
            f"The checkpoint directory {directory} cannot be used: {error.strerror}."
        ) from error


def _name_directory(path: Path) -> None:
    temporary = path.with_name(f".{IDENTITY}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(secrets.token_hex(16))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_identity(directory: Path, expected: str) -> None:
    """Refuse a directory that is not the one it was: its disk is not mounted any more.

    Raises:
        OSError: it is another one, or none.
    """
    path = directory / IDENTITY
    if not path.exists() or path.read_text().strip() != expected:
        raise OSError(errno.ESTALE, "it is not the directory any more that it was", str(directory))


# ---- what is there


def steps(directory: Path) -> list[int]:
    """The steps that look whole, newest first."""
    found = []
    for entry in directory.iterdir() if directory.is_dir() else ():
        match = _STEP.fullmatch(entry.name)
        if match and (entry / MANIFEST).is_file():
            found.append(int(match[1]))
    return sorted(found, reverse=True)


def tracked(directory: Path) -> int | None:
    """The newest step that was ever stored; None if none was, -1 if the tracker is damaged."""
    try:
        return msgspec.json.decode((directory / TRACKER).read_bytes(), type=Tracker).step
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        return -1


def track(directory: Path, step: int) -> None:
    """Say that ``step`` is the newest one."""
    files.write_atomically(directory / TRACKER, msgspec.json.encode(Tracker(step)))
    sync_directory(directory)


def quarantine(directory: Path, step: int) -> Path:
    """Put a damaged step out of the way; its new name, or the old one where nothing can be renamed."""
    bad = directory / f"step-{step}.bad"
    number = 1
    while bad.exists():
        number += 1
        bad = directory / f"step-{step}.bad{number}"
    try:
        return step_directory(directory, step).rename(bad)
    except OSError as error:
        logger.warning("Step %d stays in its place: %s", step, error)
        return step_directory(directory, step)


def prune(directory: Path, policy: Policy) -> None:
    """Delete the steps that the policy does not keep."""
    stored = steps(directory)
    kept = policy.kept([_info(directory, step, policy) for step in stored])
    for step in stored:
        if step in kept:
            continue
        faults.point("prune.begun")
        doomed = directory / f".step-{step}.{secrets.token_hex(8)}"
        step_directory(directory, step).rename(doomed)
        shutil.rmtree(doomed)


def _info(directory: Path, step: int, policy: Policy) -> StepInfo:
    if not policy.uses_metrics:
        return StepInfo(step)
    try:
        return StepInfo(step, read_manifest(step_directory(directory, step)).metrics)
    except InfrastructureError:
        return StepInfo(step)  # damaged: its metrics are not known


def remove_unfinished(directory: Path, session: int, idle: float = 0.0) -> None:
    """Delete what worlds other than ``session`` did not finish; nobody may be writing that.

    Only what has not changed for ``idle`` seconds; what cannot be deleted stays.
    """
    for path in directory.glob(".step-*.*"):
        if f"{session:016x}" not in path.name and _is_idle(path, idle):
            shutil.rmtree(path, ignore_errors=True)


def _is_idle(path: Path, seconds: float) -> bool:
    try:
        newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:
        return False  # somebody is at it
    return time.time() - newest >= seconds


def remove_given_up(directory: Path, step: int, session: int) -> None:
    """Delete what this world did not finish before ``step``: steps are stored one after the other.

    What cannot be deleted stays.
    """
    for path in directory.glob(f".step-*.{session:016x}*"):
        number = path.name.split(".")[1].removeprefix("step-")
        if number.isdecimal() and int(number) < step:
            shutil.rmtree(path, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- read


class StoredStep:
    """A checkpoint, its files mapped as they are needed. Use it in a ``with`` block.

    Raises:
        InfrastructureError: its manifest is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.manifest = read_manifest(directory)
        self._directory = directory
        self._indices: dict[int, RankIndex] = {}
        self._maps: dict[str, memoryview] = {}
        self._verified: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._maps.clear()  # a mapping ends with its last view

    def index(self, rank: int) -> RankIndex:
        """What a rank saved.

        Raises:
            InfrastructureError: its index is missing or damaged.
        """
        found = self._indices.get(rank)
        if found is None:
            found = self._indices[rank] = read_index(self._directory, rank, self.manifest)
            _check(found)
        return found

    def verified(self, tensor: StoredTensor) -> memoryview:
        """The bytes of a tensor, compared with its checksum.

        Raises:
            InfrastructureError: they are missing or damaged.
        """
        if tensor.file not in self._maps:
            self._maps[tensor.file] = _mapped(self._directory / tensor.file, self.manifest)
        whole = self._maps[tensor.file]
        if tensor.offset < 0 or tensor.offset + tensor.nbytes > len(whole):
            raise InfrastructureError(f"{name(tensor.path)} lies outside of {tensor.file}.")
        data = whole[tensor.offset : tensor.offset + tensor.nbytes]
        if (tensor.file, tensor.offset) not in self._verified:
            if xxhash.xxh3_64_intdigest(data) != tensor.xxh3:
                raise InfrastructureError(
                    f"The tensor {name(tensor.path)} in {self._directory / tensor.file} is damaged."
                )
            self._verified.add((tensor.file, tensor.offset))
        return data


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        InfrastructureError: it is missing or damaged.
    """
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise InfrastructureError(f"{directory / MANIFEST} cannot be read: {error}.") from error
    if manifest.format != FORMAT:
        raise InfrastructureError(
            f"{directory} has format {manifest.format}; this version reads format {FORMAT}."
        )
    return manifest


def read_index(directory: Path, rank: int, manifest: Manifest) -> RankIndex:
    """A rank's index, compared with the manifest.

    Raises:
        InfrastructureError: it is missing or damaged.
    """
    path = directory / index_file(rank)
    record = manifest.files.get(path.name)
    try:
        data = path.read_bytes()
        if record is None or record != record_of(data):
            raise InfrastructureError(f"{path} differs from what the manifest says.")
        return msgspec.msgpack.decode(data, type=RankIndex)
    except (OSError, msgspec.DecodeError) as error:
        raise InfrastructureError(f"{path} cannot be read: {error}.") from error


def record_of(data: bytes) -> FileRecord:
    """The record of a file with this content."""
    return FileRecord(len(data), xxhash.xxh3_64_hexdigest(data))


def _check(index: RankIndex) -> None:
    """Refuse sizes and types that cannot be."""
    entries = []
    end = 0
    for tensor in index.tensors:
        item = layouts.ITEM_BYTES.get(tensor.dtype, 1)
        offset = -(-end // item) * item
        entries.append(
            TensorEntry(tensor.path, tensor.dtype, tensor.shape, offset, tensor.nbytes, tensor.part)
        )
        end = offset + tensor.nbytes
    layouts.check(Layout(tuple(entries), index.skeleton, 0), end)


def _mapped(path: Path, manifest: Manifest) -> memoryview:
    record = manifest.files.get(path.name)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if record is None or size != record.nbytes:
                expected = record.nbytes if record is not None else "no"
                raise InfrastructureError(f"{path} has {size} bytes, not {expected}.")
            # Private, not read-only: torch warns of tensors that must not be written.
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b"")
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be read: {error.strerror}.") from error
