"""Checkpoints in a directory of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from dlrover._util import files
from dlrover.checkpoint.stores import (
    Draft,
    FileInfo,
    Leftover,
    Range,
    Reader,
    Store,
    Writer,
    step_folder,
)

BUFFER = 1 << 20
"""Bytes of small writes that are collected."""
POLL = 0.02
"""Seconds between two looks for what other savers write."""

EAGER = 8 << 20
"""Bytes after which the disk is given something to do, while more comes."""

_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None)
_UNFINISHED = re.compile(r"\.step-(\d+)\.(.*)")


def local_store(root: Path) -> Store:
    """A directory of this machine."""
    return _LocalStore(root)


class _LocalStore:
    """A directory: a step is written under another name, synced and renamed; tensors are mapped."""

    poll = POLL
    renames = True
    is_private = False

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.url = self.location = str(self._root)

    def where(self, name: str) -> str:
        return str(self._root / name)

    def is_there(self) -> bool:
        return self._root.is_dir()

    def names(self, folder: str = "") -> list[str]:
        path = self._root / folder
        return [entry.name for entry in path.iterdir()] if path.is_dir() else []

    def folders(self) -> list[str]:
        return [entry.name for entry in self._root.iterdir() if entry.is_dir()]

    def files(self, folder: str) -> dict[str, FileInfo]:
        top = self._root / folder
        found = {}
        for path in top.rglob("*"):
            if path.is_file():
                known = path.stat()
                found[str(path.relative_to(top))] = FileInfo(known.st_size, known.st_mtime)
        return found

    def exists(self, file: str) -> bool:
        return (self._root / file).is_file()

    def read(self, file: str) -> bytes:
        return (self._root / file).read_bytes()

    def open(self, file: str) -> contextlib.AbstractContextManager[BinaryIO]:
        return (self._root / file).open("rb")

    def reader(self, folder: str) -> Reader:
        return _Maps(self._root / folder)

    @contextlib.contextmanager
    def create(self, file: str) -> Iterator[Writer]:
        with (self._root / file).open("wb", buffering=BUFFER) as opened:
            yield _Eager(opened)
            opened.flush()
            os.fsync(opened.fileno())

    def write(self, file: str, data: bytes) -> None:
        path = self._root / file
        if path.parent != self._root:  # which is not made again: its disk may not be mounted
            path.parent.mkdir(exist_ok=True)
        files.write_atomically(path, data)

    def sync(self, folder: str) -> None:
        sync_directory(self._root / folder)

    def write_once(self, file: str, data: bytes) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._root / file
        if path.exists():
            return
        temporary = path.with_name(f".{file}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(data)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def delete(self, file: str) -> None:
        (self._root / file).unlink(missing_ok=True)

    def remove(self, folder: str) -> None:
        shutil.rmtree(self._root / folder)

    # ---- steps

    def draft(self, step: int, session: int) -> Draft:
        draft = Draft(step, _unfinished(step, session), "")
        (self._root / draft.top).mkdir(exist_ok=True)
        return draft

    def publish(self, draft: Draft) -> None:
        """Give the finished directory its name; a step of that name is replaced."""
        target, final = self._root / draft.top, self._root / step_folder(draft.step)
        sync_directory(target)
        old = None
        if final.exists():
            old = target.with_name(target.name + ".replaced")
            final.rename(old)
        target.rename(final)
        sync_directory(self._root)
        if old is not None:
            shutil.rmtree(old)

    def is_published(self, draft: Draft) -> bool:
        return (
            not (self._root / draft.top).exists()
            and (self._root / step_folder(draft.step)).exists()
        )

    def give_up(self, step: int, session: int) -> None:
        """Take its name away first: nobody can publish it any more."""
        name = _unfinished(step, session)
        doomed = self._root / f"{name}.given-up.{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):
            (self._root / name).rename(doomed)
            shutil.rmtree(doomed)

    def is_given_up(self, draft: Draft) -> bool:
        return not (self._root / draft.top).exists()

    def set_aside(self, step: int) -> str:
        bad = self._root / f"step-{step}.bad"
        number = 1
        while bad.exists():
            number += 1
            bad = self._root / f"step-{step}.bad{number}"
        return str((self._root / step_folder(step)).rename(bad))

    def remove_step(self, step: int) -> None:
        doomed = self._root / f".step-{step}.{secrets.token_hex(8)}"
        (self._root / step_folder(step)).rename(doomed)
        shutil.rmtree(doomed)

    def leftovers(self) -> list[Leftover]:
        matches = [_UNFINISHED.fullmatch(name) for name in self.names()]
        return [Leftover(int(match[1]), match[2], match[0]) for match in matches if match]

    def modified(self, folder: str) -> float:
        path = self._root / folder
        try:
            return max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
        except OSError:
            return math.inf  # somebody is at it


def _unfinished(step: int, session: int) -> str:
    """The folder of a step that is being written."""
    return f".step-{step}.{session:016x}"


class _Eager:
    """A file that the kernel begins to write to the disk before it is complete."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = 0
        self._begun = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._size += len(data)
        if self._size - self._begun >= EAGER:
            self._file.flush()
            begun, more = ctypes.c_int64(self._begun), ctypes.c_int64(self._size - self._begun)
            # A hint: whatever comes of it, the end of the file is synced.
            _libc.sync_file_range(self._file.fileno(), begun, more, _SYNC_FILE_RANGE_WRITE)
            self._begun = self._size


class _Maps:
    """The files of a folder, mapped as they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, memoryview] = {}

    def size(self, file: str) -> int:
        return len(self._mapped(file))

    def expect(self, wanted: Iterable[Range]) -> None:
        pass

    def view(self, wanted: Range) -> memoryview:
        return self._mapped(wanted.file)[wanted.offset : wanted.offset + wanted.nbytes]

    def _mapped(self, file: str) -> memoryview:
        found = self._maps.get(file)
        if found is None:
            with (self._folder / file).open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                # Private, not read-only: torch warns of tensors that must not be written.
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
            found = self._maps[file] = memoryview(mapped)
        return found


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
