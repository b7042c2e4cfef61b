"""Checkpoints in a directory on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import math
import mmap
import os
import re
import secrets
import shutil
import stat
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from dlrover._util import files
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage.stores import (
    MANIFEST,
    ByteRange,
    Draft,
    FileInfo,
    Leftover,
    RangeReader,
    Store,
    StoreWriter,
    step_folder,
)
from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)

BUFFER = 1 << 20
"""Bytes of small writes that are buffered."""
POLL = 0.02
"""Seconds between checks for files of other savers."""

EAGER = 8 << 20
"""Bytes after which the disk starts to write, while more data follows."""

_SYNC_FILE_RANGE_WRITE = 2
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_REPLACED = ".replaced"
"""Suffix of a step that a newer copy has replaced."""
_TAKEN = ".taken"
"""Suffix of a save that is being published: no other process writes to it or removes it."""
_libc = ctypes.CDLL(None, use_errno=True)
_UNFINISHED = re.compile(r"\.step-(\d+)\.(.*)")


def local_store(root: Path) -> Store:
    """Return the store of a directory on this machine."""
    return _LocalStore(root)


class _LocalStore:
    """A directory store: a step is written under another name, synced and renamed; reads are on demand."""

    poll = POLL
    renames = True
    is_private = False

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.url = self.location = str(self._root)

    def where(self, name: str) -> str:
        return str(self._root / name)

    def is_there(self) -> bool:
        return stat.S_ISDIR(_mode(self._root))

    def names(self, folder: str = "") -> list[str]:
        try:
            return os.listdir(self._root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folders(self) -> list[str]:
        return [name for name in os.listdir(self._root) if stat.S_ISDIR(_mode(self._root / name))]

    def files(self, folder: str) -> dict[str, FileInfo]:
        top = self._root / folder
        found = {}
        for folder_path, _, names in os.walk(top, onerror=_raise):
            for name in names:
                path = Path(folder_path, name)
                known = path.stat()
                found[str(path.relative_to(top))] = FileInfo(known.st_size, known.st_mtime)
        return found

    def exists(self, file: str) -> bool:
        return stat.S_ISREG(_mode(self._root / file))

    def read(self, file: str) -> bytes:
        return (self._root / file).read_bytes()

    def open(self, file: str) -> contextlib.AbstractContextManager[BinaryIO]:
        return (self._root / file).open("rb")

    def reader(self, folder: str) -> RangeReader:
        return _Files(self._root / folder)

    @contextlib.contextmanager
    def create(self, file: str) -> Iterator[StoreWriter]:
        with (self._root / file).open("wb", buffering=BUFFER) as opened:
            yield _Eager(opened)
            opened.flush()
            os.fsync(opened.fileno())

    def write(self, file: str, data: bytes) -> None:
        path = self._root / file
        # Recreate neither the directory, whose disk may be unmounted, nor a save that was given up.
        if path.parent != self._root and not _UNFINISHED.fullmatch(path.parent.name):
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
                if not _link(temporary, path):
                    with path.open("xb") as opened:
                        opened.write(data)
        finally:
            temporary.unlink(missing_ok=True)

    def delete(self, file: str) -> None:
        (self._root / file).unlink(missing_ok=True)

    def remove(self, folder: str) -> None:
        shutil.rmtree(self._root / folder)

    # ---- steps

    def draft(self, save: SaveId, *, publisher: bool = False) -> Draft:
        draft = Draft(save, _unfinished(save), "", f"{_unfinished(save)}.marks")
        top, taken = self._root / draft.top, self._root / f"{draft.top}{_TAKEN}"
        if publisher and _mode(taken) and not _mode(top):
            taken.rename(top)
        top.mkdir(exist_ok=True)
        return draft

    def publish(self, draft: Draft, files: Collection[str]) -> None:
        """Give the finished directory its name; replace a step of that name.

        A first rename keeps other processes from giving the save up. Then the new and the old step exchange
        names. Where the file system cannot do that, the old step is renamed for a moment; if the process
        dies then, `adopt` gives the name to one of the two.
        """
        target = self._root / f"{draft.top}{_TAKEN}"
        final = self._root / step_folder(draft.save.step)
        old = self._root / f"{target.name}{_REPLACED}"
        if _mode(target):  # an earlier attempt failed
            shutil.rmtree(target)
        (self._root / draft.top).rename(target)
        missing = set(files) - set(os.listdir(target))
        if missing:  # it was given up, and a late rank began it again
            shutil.rmtree(target)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(min(missing)))
        sync_directory(target)
        if _mode(final) and not _mode(final / MANIFEST):
            logger.warning(
                "%s is no step of DLRover, and is now %s", final, self.quarantine(draft.save.step)
            )
        if not _mode(final):
            target.rename(final)
            sync_directory(self._root)
            return
        if _exchange(target, final):
            target.rename(old)
        else:
            final.rename(old)
            target.rename(final)
        sync_directory(self._root)
        doomed = self._root / f"{target.name}.doomed.{secrets.token_hex(4)}"
        old.rename(doomed)  # else `adopt` would take its remains for the step
        shutil.rmtree(doomed)

    def adopt(self) -> None:
        for left in self.leftovers():
            final = self._root / step_folder(left.step)
            if not left.name.endswith(_REPLACED) or _mode(final):
                continue
            new = self._root / left.folder.removesuffix(_REPLACED)
            chosen = new if _mode(new / MANIFEST) else self._root / left.folder
            if not _mode(chosen / MANIFEST):
                continue  # it was being deleted
            chosen.rename(final)
            logger.warning("%s is %s again: a saver died while it replaced it", chosen, final.name)

    def give_up(self, save: SaveId, mark: str) -> None:
        """Rename the save and delete it, so that no process can publish it."""
        name = _unfinished(save)
        doomed = self._root / f"{name}.given-up.{secrets.token_hex(4)}"
        marks = self._root / f"{name}.marks"
        try:  # a full disk may have room for the mark only afterwards
            with contextlib.suppress(FileNotFoundError):
                (self._root / name).rename(doomed)
                shutil.rmtree(doomed)
        finally:
            marks.mkdir(exist_ok=True)
            files.write_atomically(marks / mark, b"")

    def is_given_up(self, draft: Draft) -> bool:
        places = draft.top, f"{draft.top}{_TAKEN}", draft.top  # the publisher may rename it back
        return not any(_mode(self._root / place) for place in places)

    def quarantine(self, step: int) -> str:
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
            return math.inf  # another process is changing it


def _link(path: Path, other: Path) -> bool:
    """Give a file another name; return False on a file system without links, such as SMB."""
    try:
        os.link(path, other)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if kernel, C library or file system cannot."""
    if not hasattr(_libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _unfinished(save: SaveId) -> str:
    """Return the folder of a save that is being written."""
    return f".step-{save.step}.{save.folder}"


class _Eager:
    """A file whose data the kernel starts to write to disk before the file is complete."""

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
            # Only a hint, whose result does not matter: `create` syncs the file at its end.
            _libc.sync_file_range(self._file.fileno(), begun, more, _SYNC_FILE_RANGE_WRITE)
            self._begun = self._size


class _Files:
    """The files of a folder, read on demand.

    They are not mapped: if a mapped file becomes unreadable, for example deleted on NFS or on a bad sector,
    SIGBUS ends the process, while a failed read is an error that can be handled.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._current: dict[str, int] = {}
        self._opened: list[FileIO] = []
        weakref.finalize(self, _close, self._opened)

    def size(self, file: str) -> int:
        return self._asked(file, lambda fd: os.fstat(fd).st_size)

    def expect(self, wanted: Iterable[ByteRange]) -> None:
        pass

    def view(self, wanted: ByteRange) -> memoryview:
        # New memory from the kernel is already zero; a bytearray has to be filled with zeros.
        size = wanted.nbytes
        buffer = memoryview(mmap.mmap(-1, size) if size >= BUFFER else bytearray(size))
        self.fill(wanted, buffer)
        return buffer

    def fill(self, wanted: ByteRange, buffer: memoryview) -> None:
        done = 0
        while done < wanted.nbytes:
            at = wanted.offset + done
            rest = buffer[done : wanted.nbytes]
            got = self._asked(wanted.file, lambda fd, rest=rest, at=at: os.preadv(fd, [rest], at))  # type: ignore[misc]
            if not got:
                where = self._folder / wanted.file
                raise InfrastructureError(f"{where} ends at {at} bytes, within a tensor.")
            done += got

    def _asked(self, file: str, ask: Callable[[int], int]) -> int:
        """Ask the kernel about a file; reopen the file if another machine has replaced it."""
        try:
            try:
                return ask(self._fd(file))
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                return ask(self._fd(file, again=True))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._folder / file)) from error

    def _fd(self, file: str, *, again: bool = False) -> int:
        with self._lock:
            if again or file not in self._current:
                opened = (self._folder / file).open("rb", buffering=0)
                self._opened.append(opened)  # another thread may still read the previous one
                self._current[file] = opened.fileno()
            return self._current[file]


def _close(opened: list[FileIO]) -> None:
    for file in opened:
        file.close()


def _mode(path: Path) -> int:
    """Return the type and mode of a path, 0 if it does not exist; `Path.exists` may hide errors.

    Raises:
        OSError: the path cannot be examined.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _raise(error: OSError) -> None:
    raise error


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, if its file system can."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)
