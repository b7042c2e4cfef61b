"""Where checkpoints lie: a directory of this machine (`local`), or any place that fsspec reaches (`remote`).

Files are named by their path below the checkpoint directory, with ``/``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

from dlrover.checkpoint.saves import SaveId
from dlrover.errors import ConfigurationError, InfrastructureError

MANIFEST = "manifest.json"
BAD = "manifest.json.bad"
"""The manifest of a step that was found to be damaged, where the step cannot be renamed."""
TRACKER = "latest"
IDENTITY = "checkpoint-id"
DCP_METADATA = ".metadata"
"""What ``torch.distributed.checkpoint`` reads first."""
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*:/")


class UnreachableError(OSError):
    """A remote store did not answer, or refused; what it holds is not known."""


class FileInfo(NamedTuple):
    """What a store knows of a file."""

    nbytes: int
    modified: float
    """Seconds since the epoch."""


class Range(NamedTuple):
    """Some of a file's bytes."""

    file: str
    offset: int
    nbytes: int


class Draft(NamedTuple):
    """A save that is being written."""

    save: SaveId
    top: str
    """The folder of its manifest."""
    place: str
    """The folder in it for the other files; empty: they are beside the manifest."""
    marks: str
    """The folder of the marks of those that have given the save up. They are no part of the step."""

    def named(self, file: str) -> str:
        """A file's name, as the manifest knows it."""
        return f"{self.place}/{file}" if self.place else file

    def path(self, file: str) -> str:
        """Where a file is written."""
        return join(self.top, self.named(file))


class Leftover(NamedTuple):
    """A step, or some files of one, that was not finished."""

    step: int
    name: str
    """Has `SaveId.folder` of the save in it, if it was being written."""
    folder: str


class Writer(Protocol):
    """A file that is being written."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append."""


class Reader(Protocol):
    """Reads ranges of the files in one folder."""

    def size(self, file: str) -> int:
        """Bytes of a file."""

    def expect(self, wanted: Iterable[Range]) -> None:
        """Say what will be viewed: a remote store reads it now, many ranges at once."""

    def view(self, wanted: Range) -> memoryview:
        """The bytes, which lie within the file and may be written over."""

    def fill(self, wanted: Range, buffer: memoryview) -> None:
        """Read the bytes into a buffer of that size; any thread may."""


class Store(Protocol):
    """A checkpoint directory. Everything raises OSError when it fails."""

    url: str
    """What it was opened with."""
    location: str
    """The same for people: without a password."""
    poll: float
    """Seconds between two looks for what other savers write."""
    renames: bool
    """Whether a step has its name only when it is whole; else it counts when it has a manifest."""
    is_private: bool
    """Whether no other process sees the same."""

    def where(self, name: str) -> str:
        """A file or folder, for people."""

    def is_there(self) -> bool:
        """Whether there is such a directory."""

    def names(self, folder: str = "") -> list[str]:
        """The files and folders in a folder; none if there is no such folder."""

    def folders(self) -> list[str]:
        """The folders in the directory."""

    def files(self, folder: str) -> dict[str, FileInfo]:
        """All files below a folder."""

    def exists(self, file: str) -> bool:
        """Whether there is such a file."""

    def read(self, file: str) -> bytes:
        """All of a file."""

    def open(self, file: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A file, to be read from its beginning to its end."""

    def reader(self, folder: str) -> Reader:
        """For ranges of files."""

    def create(self, file: str) -> contextlib.AbstractContextManager[Writer]:
        """Write a file, which is durable at the end of the ``with`` block."""

    def write(self, file: str, data: bytes) -> None:
        """Replace a file: a reader sees all of it, old or new."""

    def sync(self, folder: str) -> None:
        """Make the names in a folder durable, where that takes more than writing its files."""

    def write_once(self, file: str, data: bytes) -> None:
        """Make a file, in a new directory too, unless there is one."""

    def delete(self, file: str) -> None:
        """Delete a file; it may be gone already."""

    def remove(self, folder: str) -> None:
        """Delete a folder."""

    def draft(self, save: SaveId) -> Draft:
        """Where to write a save; all savers of a world are told the same."""

    def publish(self, draft: Draft, files: Collection[str]) -> None:
        """Make a step count whose files, with the manifest, are all there.

        Raises:
            FileNotFoundError: one is not there any more: the save was given up.
        """

    def adopt(self) -> None:
        """Make steps count again whose replacement was cut short."""

    def give_up(self, save: SaveId, mark: str) -> None:
        """Leave a mark, then take away what there is of a save, in stores where that can be done at once."""

    def is_given_up(self, draft: Draft) -> bool:
        """Whether somebody has done that, or has published the step."""

    def set_aside(self, step: int) -> str:
        """Make a damaged step not count any more; what it is called now."""

    def remove_step(self, step: int) -> None:
        """Delete a step, which does not count any more from the first moment on."""

    def leftovers(self) -> list[Leftover]:
        """What is being written, or was not finished."""

    def modified(self, folder: str) -> float:
        """When something in it changed last; infinite if that is not to be found out."""


def join(folder: str, name: str) -> str:
    """The name of something in a folder; "" is the checkpoint directory."""
    return f"{folder}/{name}" if folder else name


def step_folder(step: int) -> str:
    """The folder of a step."""
    return f"step-{step}"


def is_url(place: str) -> bool:
    """Whether it is a URL, not a path."""
    return "://" in place


def location_of(place: str) -> str:
    """A path as it is; a URL in its normal form, without a password."""
    if not is_url(place):
        return place
    parts = urlsplit(place)
    path = re.sub("/+", "/", parts.path).rstrip("/")
    return f"{parts.scheme}://{parts.netloc.removeprefix(login(place))}{path}"


def login(url: str) -> str:
    """User and password in a URL, up to the @; empty if there is no password."""
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    return user + at if ":" in user else ""


def open_store(place: str | os.PathLike[str]) -> Store:
    """The checkpoint directory at a path, or at a URL that fsspec knows.

    Raises:
        ConfigurationError: nothing can be kept at such a URL.
        InfrastructureError: what is at the URL does not answer.
    """
    text = os.fspath(place)
    if is_url(text):
        remote: Any = importlib.import_module("dlrover.checkpoint.remote")
        return cast("Store", remote.remote_store(text))
    if _SCHEME.match(text):
        raise ConfigurationError(
            f"{text} looks like a URL with one slash only, as pathlib writes it; give it as a text."
        )
    local: Any = importlib.import_module("dlrover.checkpoint.local")
    return cast("Store", local.local_store(Path(text)))


def open_shared(place: str | os.PathLike[str]) -> Store:
    """The same, where other processes see it too.

    Raises:
        ConfigurationError: they do not, or nothing can be kept there.
        InfrastructureError: what is at the URL does not answer.
    """
    store = open_store(place)
    if store.is_private:
        raise ConfigurationError(
            f"{store.location} is memory of this process only; the saver is another one. Name a place that"
            " both see."
        )
    return store


def is_damage(error: Exception) -> bool:
    """Whether an error shows that what is stored is damaged: a missing file, or content that is wrong.

    Any other error of the system says only that the storage cannot be read now: no memory or no descriptor
    is left, access is denied, the disk or the server fails.
    """
    if isinstance(error, OSError | MemoryError):
        return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return not isinstance(error, StorageAwayError)


def failure(error: Exception, what: str) -> InfrastructureError:
    """The error with a sentence, ``what`` and the reason; `StorageAwayError` unless it shows damage."""
    kind = InfrastructureError if is_damage(error) else StorageAwayError
    return kind(f"{what}: {reason(error)}.")


def reason(error: Exception) -> str:
    """Why, in a few words."""
    if isinstance(error, MemoryError):
        return "Cannot allocate memory"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).rstrip(".")


class StorageAwayError(InfrastructureError):
    """What is stored cannot be read now, on this rank or another; that does not mean that it is damaged."""
