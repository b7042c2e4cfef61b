"""Parquet files: one sample per row."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from dlrover import extras
from dlrover.data.sources import waiting
from dlrover.data.sources.blocks import BlockRecords
from dlrover.data.sources.files import Paths, error_text, is_away, opened, scrubbed, shown
from dlrover.errors import ConfigurationError, InfrastructureError

KEPT = 2
"""Row groups that a process keeps."""
TRIES = 5
"""Attempts to read a row group of a file that can be opened each time; a failure of the line has passed by then."""
_SUFFIX = ".parquet"
MARK = "_stream.json"
"""File in a folder that a pipeline fills: `dlrover.data.sources.parts`."""
_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
"""Numbers of what clients raise without one."""
_NO_CREDENTIALS = "NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"
"""Classes of botocore and google-auth."""


class Parquet(BlockRecords[Any, "dict[str, Any]"]):
    """Rows of Parquet files as dicts of their columns.

    A row group is read at once, so it should have 1,000 to 100,000 rows. This starts no threads, since a
    process that forks the readers of a loader must have none.

    Args:
        paths: files, directories (all ``*.parquet`` below, except names that begin with ``_`` or ``.``) or
            patterns such as ``part-*.parquet``; each may be a URL of fsspec, ``s3://bucket/folder``.
        columns: the columns to read; by default all.
        kept: row groups that each process keeps in memory.

    Raises:
        ConfigurationError: there is no file, one is no Parquet file or lacks a column, or a package
            is missing: ``dlrover[parquet]``, and ``dlrover[remote]`` for URLs.
        InfrastructureError: the disk or file server fails, or a path stays away from a worker that starts again.
    """

    def __init__(
        self, paths: Paths, *, columns: Sequence[str] | None = None, kept: int = KEPT
    ) -> None:
        alone = [paths] if isinstance(paths, str | os.PathLike) else paths
        self.paths: list[str] = []
        for path in [os.fspath(path) for path in alone]:
            self.paths += opened(path, partial(_files, path))
        self.columns = None if columns is None else list(columns)
        self._groups: list[tuple[int, int]] = []
        self._opened: tuple[int, int, Any] | None = None
        self._damaged: set[int] = set()
        """Row groups that could not be read though their file can."""
        blocks: list[int] = []
        for number in range(len(self.paths)):
            metadata = self._checked(number).metadata
            for group in range(metadata.num_row_groups):
                rows = metadata.row_group(group).num_rows
                if rows:
                    self._groups.append((number, group))
                    blocks.append(rows)
        super().__init__(blocks, max(1, kept))

    def _read(self, number: int) -> Any:
        file, group = self._groups[number]
        name = shown(self.paths[file])
        left = 1 if number in self._damaged else TRIES

        def read() -> Any:
            nonlocal left
            try:
                parquet = self._file(file)  # which reads the file's end
            except ValueError as error:  # pyarrow raises it for invalid files
                raise InfrastructureError(
                    f"{name} is no Parquet file any more; the file must not change."
                ) from error
            try:
                return parquet.read_row_group(group, columns=self.columns, use_threads=False)
            except OSError as error:
                self._opened = None
                left -= not is_away(error)
                raise

        try:
            table = waiting.insist(
                read,
                name,
                lambda error: isinstance(error, OSError) and left > 0,
                error_text,
            )
        except OSError:
            self._damaged.add(number)
            raise
        self._damaged.discard(number)
        if table.num_rows != self.blocks[number]:
            raise InfrastructureError(
                f"Row group {group} of {name} has {table.num_rows} rows, and had"
                f" {self.blocks[number]}; the file must not change."
            )
        return table

    def _record(self, block: Any, at: int) -> dict[str, Any]:
        return {
            name: column[at].as_py()
            for name, column in zip(block.column_names, block.columns, strict=True)
        }

    def _checked(self, number: int) -> Any:
        """Return a file after checking that it has the columns."""
        path = self.paths[number]
        try:
            file = opened(path, lambda: self._file(number))
        except ValueError as error:  # pyarrow raises it for invalid files
            raise ConfigurationError(f"{shown(path)} is no Parquet file: {error}") from error
        names = file.schema_arrow.names
        missing = [name for name in self.columns or () if name not in names]
        if missing:
            raise ConfigurationError(
                f"{shown(path)} has no column {missing[0]}; it has {', '.join(names)}."
            )
        return file

    def _file(self, number: int) -> Any:
        """Return an open file of this process; the last one stays open."""
        if self._opened is not None and self._opened[:2] == (os.getpid(), number):
            return self._opened[2]
        parquet = extras.load("pyarrow.parquet", "Parquet", "parquet")
        path = self.paths[number]
        if "://" in path:
            system, inner = _remote(path)
            with _as_os_errors():
                remote = system.open(inner, "rb")
            file = parquet.ParquetFile(_RemoteFile(remote))
        else:
            file = parquet.ParquetFile(path)
        self._opened = os.getpid(), number, file
        return file

    def close(self) -> None:
        """Release the open file and the row groups; reading opens the file again."""
        self._opened = None
        self._read_last.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opened": None}


def _files(path: str) -> list[str]:
    """Return the files that a path stands for, in order."""
    found = _remote_files(path) if "://" in path else _local_files(path)
    if not found:
        raise FileNotFoundError(errno.ENOENT, "it names no Parquet file")
    return found


def _local_files(path: str) -> list[str]:
    if os.path.isdir(path):
        _check_complete(path)
        below = glob.glob(os.path.join(glob.escape(path), "**", f"*{_SUFFIX}"), recursive=True)
        return _visible(path, below)
    if glob.has_magic(path) and not os.path.exists(path):
        return sorted(glob.glob(path, recursive=True))
    os.stat(path)
    return [path]


def _check_complete(folder: str) -> None:
    """Refuse a folder whose pipeline has not ended."""
    try:
        with open(os.path.join(folder, MARK), encoding="utf-8") as file:
            complete = json.load(file)["complete"]
    except FileNotFoundError:
        return
    if not complete:
        raise ConfigurationError(
            f"The pipeline that fills {folder} has not ended; until then its rows can be read as"
            f" Stream('parquet://{os.path.abspath(folder)}')."
        )


def _remote_files(url: str) -> list[str]:
    system, path = _remote(url)
    with _as_os_errors():
        is_http = "://" in path  # there a ? begins a query, and [ the address of a host
        if glob.has_magic(urlsplit(path).path if is_http else path):
            found = sorted(system.glob(path))
        elif system.isdir(path):
            found = _visible(path, (file for file in system.find(path) if file.endswith(_SUFFIX)))
        else:
            return [url]
    return [system.unstrip_protocol(file) for file in found]


def _visible(folder: str, files: Iterable[str]) -> list[str]:
    """Return the files without those that writers of datasets keep for themselves."""
    return sorted(
        file
        for file in files
        if not any(part[:1] in "_." for part in os.path.relpath(file, folder).split("/"))
    )


def _remote(url: str) -> tuple[Any, str]:
    core = extras.load("fsspec.core", "Parquet", "remote")
    with _as_os_errors():  # some connect at once
        try:
            system, path = core.url_to_fs(url)
        except ImportError as error:
            wrong = f"needs another package: {error}"
        except ValueError as error:
            wrong = f"is no URL that fsspec knows: {scrubbed(str(error))}"
        else:
            return system, path
    raise ConfigurationError(f"{shown(url)} {wrong}.")


class _RemoteFile:
    """A file of fsspec that is whole, or away: what pyarrow raises itself is then damage."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes, or all that follow; fewer at the end of the file."""
        with _as_os_errors():
            data: bytes = self._file.read(size)
            whole = getattr(self._file, "size", None) or 0  # not every implementation knows it
            if len(data) < size and self._file.tell() < whole:
                raise ConnectionError(errno.ECONNABORTED, "its server sends less than it has")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise as an `OSError` with a number what a client of a remote file system raises: each has classes of its own.

    The client's error is not kept beside it: it may have the password of a URL.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever a client raises
        why: BaseException = error
        if isinstance(error, FileNotFoundError) and error.__cause__ and "://" in str(error):
            why = error.__cause__  # for HTTP, each file whose size is not answered is not found
        raise OSError(_number(why), _text(why)) from None


def _number(error: BaseException) -> int:
    """Return the number of a client's error; what names no reason is of its server."""
    known = error.errno if isinstance(error, OSError) else None
    # EIO: of a server, not of one place on a disk. The numbers of TLS are others, and so are their classes.
    if known not in (None, errno.EIO) and isinstance(error, type(OSError(known, ""))):
        return known
    if getattr(error, "status", None) == HTTPStatus.NOT_FOUND:
        return errno.ENOENT
    if type(error).__name__ in _NO_CREDENTIALS:
        return errno.EACCES
    kinds = [number for kind, number in _NUMBERS.items() if isinstance(error, kind)]
    return kinds[0] if kinds else errno.ECONNABORTED


def _text(error: BaseException) -> str:
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return scrubbed(text)
