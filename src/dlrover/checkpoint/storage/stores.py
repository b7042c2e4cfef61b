"""Checkpoint stores: a directory of this machine (`local`), or any place that fsspec reaches (`remote`).

A file's name is its path below the checkpoint directory, with ``/``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

from dlrover.checkpoint.machine.saves import SaveId
from dlrover.errors import ConfigurationError, InfrastructureError

MANIFEST = "manifest.json"
BAD = "manifest.json.bad"
"""Manifest of a damaged step, in stores that cannot rename the step."""
TRACKER = "latest"
IDENTITY = "checkpoint-id"
DCP_METADATA = ".metadata"
"""File that ``torch.distributed.checkpoint`` reads first."""
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*:/")


class UnreachableError(OSError):
    """Raised when a remote store does not answer, or refuses; its content is unknown."""


class FileInfo(NamedTuple):
    """Size and modification time of a file."""

    nbytes: int
    modified: float
    """Time of the last change, in seconds since the epoch."""


class ByteRange(NamedTuple):
    """Range of bytes in a file."""

    file: str
    offset: int
    nbytes: int


class Draft(NamedTuple):
    """Save that is being written."""

    save: SaveId
    top: str
    """Folder of the manifest."""
    place: str
    """Folder in ``top`` for the other files; empty if they are beside the manifest."""
    marks: str
    """Folder for the marks of writers that gave the save up. The marks are not part of the step."""

    def named(self, file: str) -> str:
        """Return a file's name as in the manifest."""
        return f"{self.place}/{file}" if self.place else file

    def path(self, file: str) -> str:
        """Return the path at which a file is written."""
        return join(self.top, self.named(file))


class Leftover(NamedTuple):
    """Unfinished step, or files of one."""

    step: int
    name: str
    """Name of the leftover; it contains `SaveId.folder` of the save if the save was being written."""
    folder: str


class StoreWriter(Protocol):
    """File that is being written."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append data, which may change after the call."""


class RangeReader(Protocol):
    """Reader of ranges of the files in one folder."""

    def size(self, file: str) -> int:
        """Return the size of a file in bytes."""

    def expect(self, wanted: Iterable[ByteRange]) -> None:
        """Announce the ranges to view; a remote store reads them now, many at once."""

    def view(self, wanted: ByteRange) -> memoryview:
        """Return the bytes of a range within the file; the caller may overwrite them."""

    def fill(self, wanted: ByteRange, buffer: memoryview) -> None:
        """Read the bytes into a buffer of the same size; any thread may call this."""


class Store(Protocol):
    """A checkpoint directory. All methods raise OSError on failure."""

    url: str
    """Path or URL that the store was opened with."""
    location: str
    """Path or URL for display, without a password."""
    poll: float
    """Seconds between two checks for files of other savers."""
    renames: bool
    """True if a step gets its name only when complete; else a step counts once it has a manifest."""
    is_private: bool
    """True if no other process sees the content."""

    def where(self, name: str) -> str:
        """Return the path of a file or folder for display."""

    def is_there(self) -> bool:
        """Return True if the directory exists."""

    def names(self, folder: str = "") -> list[str]:
        """Return the files and folders in a folder; none if there is no such folder."""

    def folders(self) -> list[str]:
        """Return the folders in the directory."""

    def files(self, folder: str) -> dict[str, FileInfo]:
        """Return all files below a folder."""

    def exists(self, file: str) -> bool:
        """Return True if the file exists."""

    def read(self, file: str) -> bytes:
        """Return the content of a file."""

    def open(self, file: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a file for reading from start to end."""

    def reader(self, folder: str) -> RangeReader:
        """Return a reader for ranges of the files in a folder."""

    def create(self, file: str) -> contextlib.AbstractContextManager[StoreWriter]:
        """Open a file for writing; it is durable at the end of the ``with`` block."""

    def write(self, file: str, data: bytes) -> None:
        """Replace a file atomically: a reader sees either the old or the new content."""

    def sync(self, folder: str) -> None:
        """Make the names in a folder durable, if writing the files does not suffice."""

    def write_once(self, file: str, data: bytes) -> None:
        """Make a file, and its directory if needed, unless the file exists."""

    def delete(self, file: str) -> None:
        """Delete a file if it exists."""

    def remove(self, folder: str) -> None:
        """Delete a folder."""

    def draft(self, save: SaveId, *, publisher: bool = False) -> Draft:
        """Return the draft for a save; all savers of a world get the same one.

        The ``publisher`` takes up an attempt of its own that failed while it gave the step its name: other savers do not
        write their parts again.
        """

    def publish(self, draft: Draft, files: Collection[str]) -> None:
        """Publish a step, whose files and manifest are all written.

        Raises:
            FileNotFoundError: a file is gone, because the save was given up.
        """

    def adopt(self) -> None:
        """Restore steps whose replacement was cut short."""

    def give_up(self, save: SaveId, mark: str) -> None:
        """Remove the save's files, in stores that can do so atomically, and leave a mark."""

    def is_given_up(self, draft: Draft) -> bool:
        """Return True if the save was given up, or the step was published."""

    def quarantine(self, step: int) -> str:
        """Withdraw a damaged step so that it no longer counts; return its new name."""

    def remove_step(self, step: int) -> None:
        """Delete a step; it stops counting before its first file goes."""

    def leftovers(self) -> list[Leftover]:
        """Return the saves that are being written or were not finished."""

    def modified(self, folder: str) -> float:
        """Return when a folder's content changed last; infinity if that cannot be determined."""


def join(folder: str, name: str) -> str:
    """Return the name of an item in a folder; "" is the checkpoint directory."""
    return f"{folder}/{name}" if folder else name


def step_folder(step: int) -> str:
    """Return the folder of a step."""
    return f"step-{step}"


def is_url(place: str) -> bool:
    """Return True if the place is a URL, not a path."""
    return "://" in place


def location_of(place: str) -> str:
    """Return a path unchanged, or a URL in its normal form, without a password."""
    if not is_url(place):
        return place
    parts = urlsplit(place)
    path = re.sub("/+", "/", parts.path).rstrip("/")
    return f"{parts.scheme}://{parts.netloc.removeprefix(login(place))}{path}"


def login(url: str) -> str:
    """Return user and password of a URL, up to the @; empty if there is no password."""
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    return user + at if ":" in user else ""


def open_store(place: str | os.PathLike[str]) -> Store:
    """Open the checkpoint directory at a path, or at a URL that fsspec knows.

    Raises:
        ConfigurationError: checkpoints cannot be kept at such a URL.
        InfrastructureError: the service at the URL does not answer.
    """
    text = os.fspath(place)
    if is_url(text):
        remote: Any = importlib.import_module("dlrover.checkpoint.storage.remote")
        return cast("Store", remote.remote_store(text))
    if _SCHEME.match(text):
        raise ConfigurationError(
            f"{text} looks like a URL with one slash only, as pathlib writes it; give it as a text."
        )
    local: Any = importlib.import_module("dlrover.checkpoint.storage.local")
    return cast("Store", local.local_store(Path(text)))


def open_shared(place: object) -> Store:
    """Open a checkpoint directory that other processes see too.

    Raises:
        ConfigurationError: other processes do not see it, or checkpoints cannot be kept there.
        InfrastructureError: the service at the URL does not answer.
    """
    if not isinstance(place, str | os.PathLike) or not os.fspath(place):
        raise ConfigurationError(f"path is {place!r}; it must name a directory or a URL.")
    if not _is_text(os.fspath(place)):
        raise ConfigurationError(f"path is {place!r}; its bytes must be UTF-8.")
    store = open_store(place)
    if store.is_private:
        raise ConfigurationError(
            f"{store.location} is memory of this process only; the saver is another one. Name a place that"
            " both see."
        )
    return store


def shown(name: str) -> str:
    """Return the name of a file as text; bytes of it that are not UTF-8 become escape sequences."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_damage(error: Exception) -> bool:
    """Return True if an error shows that the stored data is damaged: a missing file, or wrong content.

    Any other error of the system only means that the storage cannot be read now: memory or descriptors have
    run out, access is denied, or the disk or the server fails.
    """
    if isinstance(error, OSError | MemoryError):
        return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return not isinstance(error, StorageAwayError)


def failure(error: Exception, what: str) -> InfrastructureError:
    """Return an error that says ``what`` and the reason; a `StorageAwayError` unless it shows damage."""
    kind = InfrastructureError if is_damage(error) else StorageAwayError
    return kind(f"{what}: {reason(error)}.")


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert a failure of the system in the block to an error that says ``what`` and the reason.

    Raises:
        InfrastructureError: the system reported an error.
    """
    try:
        yield
    except (OSError, MemoryError) as error:
        raise failure(error, what) from error


def reason(error: Exception) -> str:
    """Return the reason for an error in a few words."""
    if isinstance(error, MemoryError):
        return "Cannot allocate memory"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).rstrip(".")


class StorageAwayError(InfrastructureError):
    """Raised when storage cannot be read now, on this rank or another; the data need not be damaged."""
