"""Checkpoints in an object store, or in any other place that fsspec reaches.

An object store cannot rename directories, so a step counts once it has a manifest::

    step-40/manifest.json              written last, deleted first
    step-40/.metadata                  the file that DCP reads first
    step-40/0123456789abcdef-7/…       the files, in a folder named after the save: session and number
    step-30/manifest.json.bad          the manifest of a damaged step
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, BinaryIO, TypeVar, cast

import msgspec

from dlrover import extras
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import formats
from dlrover.checkpoint.storage.formats import OtherFormatError
from dlrover.checkpoint.storage.ranges import FileRanges, again
from dlrover.checkpoint.storage.stores import (
    BAD,
    DCP_METADATA,
    MANIFEST,
    ByteRange,
    Draft,
    FileInfo,
    Leftover,
    Store,
    StoreWriter,
    UnreachableError,
    join,
    location_of,
    login,
    step_folder,
)  # fmt: skip
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError

POLL = 1.0
"""Seconds between two checks for files of other savers."""
WRITE = 16 << 20
"""Maximum bytes passed to the implementation at a time."""
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
"""Names that the implementations use for the time of the last change."""
_STEP = re.compile(r"step-(\d+)")
_Value = TypeVar("_Value")


class _Place(msgspec.Struct):
    """The part of a manifest that matters here."""

    place: str = ""


def remote_store(url: str) -> Store:
    """Open a checkpoint directory at a URL.

    Raises:
        ConfigurationError: fsspec does not know the kind of URL, or a package is missing.
        InfrastructureError: the service does not answer.
    """
    return _RemoteStore(url)


class _RemoteStore:
    """Checkpoint directory at a URL; any error of the implementation becomes an OSError."""

    poll = POLL
    renames = False

    def __init__(self, url: str) -> None:
        self.url = url
        self.location = location_of(url)
        self._secret = login(url)
        core = extras.load("fsspec.core", self.location, "remote")
        try:
            self._fs, self._root = core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise self._refused(error) from error
        except Exception as error:  # any library's: it opens connections already here
            raise InfrastructureError(
                f"{self.location} cannot be used: {self._said(error)}."
            ) from error
        self._root = self._root.rstrip("/")
        protocols: str | tuple[str, ...] = self._fs.protocol
        self.is_private = protocols == "memory"

    def _refused(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(f"{self.location} cannot be used: {self._said(error)}.")

    # ---- calls and errors of the implementation

    def _said(self, error: Exception) -> str:
        """Return the text of an error, without a password."""
        text = str(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        return (text.replace(self._secret, "") if self._secret else text).rstrip(".")

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Convert any error of the implementation to an OSError."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "there is no such file or bucket") from error
        except (UnreachableError, DLRoverError):
            raise
        except Exception as error:  # noqa: BLE001 - of any library that the implementation uses
            cause = None if self._secret else error
            raise UnreachableError(errno.EIO, self._said(error), self.location) from cause

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._asking():
            self._fs.invalidate_cache()
            return getattr(self._fs, method)(*args, **kwargs)

    def _path(self, name: str) -> str:
        return join(self._root, name) if name else self._root

    def where(self, name: str) -> str:
        return join(self.location, name) if name else self.location

    # ---- files

    def is_there(self) -> bool:
        return bool(self.names())

    def names(self, folder: str = "") -> list[str]:
        return list(self._listed(folder))

    def folders(self) -> list[str]:
        return [name for name, known in self._listed("").items() if known["type"] == "directory"]

    def _listed(self, folder: str) -> dict[str, Mapping[str, Any]]:
        path = self._path(folder).strip("/")
        try:
            found = self._ask("ls", self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        named = {str(known["name"]).strip("/"): known for known in found}
        return {name.rpartition("/")[2]: known for name, known in named.items() if name != path}

    def files(self, folder: str) -> dict[str, FileInfo]:
        path = self._path(folder)
        found: Mapping[str, Mapping[str, Any]] = self._ask("find", path, detail=True)
        start = len(path.strip("/")) + 1
        infos = {name.strip("/")[start:]: known for name, known in found.items()}
        return {
            name: FileInfo(int(known["size"] or 0), _modified(known))
            for name, known in infos.items()
            if name
        }

    def exists(self, file: str) -> bool:
        try:
            self._ask("info", self._path(file))
        except FileNotFoundError:
            return False
        return True

    def read(self, file: str) -> bytes:
        return bytes(again(lambda: self._ask("cat_file", self._path(file))))

    def open(self, file: str) -> contextlib.AbstractContextManager[BinaryIO]:
        return self._open(file)

    @contextlib.contextmanager
    def _open(self, file: str) -> Iterator[BinaryIO]:
        with self._asking(), self._fs.open(self._path(file), "rb") as opened:
            yield opened

    def reader(self, folder: str) -> FileRanges:
        return FileRanges(self, folder)

    def read_range(self, wanted: ByteRange) -> bytes:
        """Read a range of a file; return fewer bytes if the file ends before."""
        path, end = self._path(wanted.file), wanted.offset + wanted.nbytes
        return cast(
            "bytes", again(lambda: self._ask("cat_file", path, start=wanted.offset, end=end))
        )

    def size(self, file: str) -> int:
        """Return the size of a file in bytes."""
        return int(again(lambda: self._ask("info", self._path(file)))["size"])

    @contextlib.contextmanager
    def create(self, file: str) -> Iterator[StoreWriter]:
        opened = self._with_folder(file, lambda path: self._ask("open", path, "wb"))
        try:
            yield _Upload(self, opened)
            with self._asking():
                opened.close()
        except BaseException:
            self._abandon(opened)
            raise

    def _abandon(self, opened: Any) -> None:
        """Close a file without finishing it, if the implementation can."""
        # Of any implementation; the reason for giving up is raised instead.
        with contextlib.suppress(Exception):
            if hasattr(opened, "discard"):
                opened.discard()
                opened.closed = True

    def write(self, file: str, data: bytes) -> None:
        self._with_folder(file, lambda path: self._ask("pipe_file", path, data))

    def sync(self, folder: str) -> None:
        """Do nothing: what is written is durable."""

    def write_once(self, file: str, data: bytes) -> None:
        def put(path: str) -> None:
            with self._asking(), contextlib.suppress(FileExistsError):
                self._fs.pipe_file(path, data, mode="create")

        if not self.exists(file):
            self._with_folder(file, put)

    def _with_folder(self, file: str, put: Callable[[str], _Value]) -> _Value:
        """Write a file; if that fails because its folder is missing, make the folder and retry."""
        path = self._path(file)
        try:
            return put(path)
        except FileNotFoundError:
            self._make_folders(path.rpartition("/")[0])
            return put(path)

    def _make_folders(self, folder: str) -> None:
        """Make a folder, with those above it up to the checkpoint directory, but no bucket."""
        below = folder[len(self._root) :].strip("/").split("/")
        folders = [self._root]
        folders += [join(self._root, "/".join(below[: n + 1])) for n in range(len(below))]
        for path in dict.fromkeys(folders):
            with self._asking(), contextlib.suppress(FileExistsError):
                self._fs.mkdir(path.rstrip("/"), create_parents=False)

    def delete(self, file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask("rm_file", self._path(file))

    def remove(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask("rm", self._path(folder), recursive=True)

    # ---- steps

    def draft(self, save: SaveId, *, publisher: bool = False) -> Draft:
        top = step_folder(save.step)
        return Draft(save, top, save.folder, join(top, save.folder))

    def _place(self, manifest: str) -> str:
        try:
            return formats.decode(self.read(manifest), _Place, self.where(manifest)).place
        except (FileNotFoundError, msgspec.DecodeError):
            return ""

    def publish(self, draft: Draft, files: Collection[str]) -> None:
        """Do nothing: the manifest is written, so the step counts."""

    def adopt(self) -> None:
        """Do nothing: a manifest is replaced at once, so no replacement is cut short."""

    def give_up(self, save: SaveId, mark: str) -> None:
        self.write(join(self.draft(save).marks, mark), b"")

    def is_given_up(self, draft: Draft) -> bool:
        return False

    def quarantine(self, step: int) -> str:
        top = step_folder(step)
        self.write(join(top, BAD), self.read(join(top, MANIFEST)))
        self.delete(join(top, MANIFEST))
        return self.where(join(top, BAD))

    def remove_step(self, step: int) -> None:
        self.delete(join(step_folder(step), MANIFEST))
        self.remove(step_folder(step))

    def leftovers(self) -> list[Leftover]:
        found = []
        for top in self.names():
            match = _STEP.fullmatch(top)
            if match is None:
                continue
            names = self.names(top)
            manifests = [name for name in (MANIFEST, BAD) if name in names]
            others = [name for name in names if name not in manifests]
            if manifests:
                others = [name for name in others if name != DCP_METADATA]
                try:
                    used = {self._place(join(top, name)) for name in manifests}
                except OtherFormatError:  # the place of its files is unknown
                    continue
                others = [name for name in others if "" not in used and name not in used]
            found += [Leftover(int(match[1]), name, join(top, name)) for name in others]
        return found

    def modified(self, folder: str) -> float:
        try:
            return max((known.modified for known in self.files(folder).values()), default=0.0)
        except OSError:
            return math.inf


class _Upload:
    """File that is being written, a bounded number of bytes at a time."""

    def __init__(self, store: _RemoteStore, file: Any) -> None:
        self._store = store
        self._file = file

    def write(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data)
        for start in range(0, len(view), WRITE):
            with self._store._asking():  # noqa: SLF001 - of this module
                self._file.write(view[start : start + WRITE])


def _modified(known: Mapping[str, Any]) -> float:
    """Return when a file changed last; the current time if the implementation does not say."""
    for key in _TIMES:
        value = known.get(key)
        if isinstance(value, dt.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return time.time()
