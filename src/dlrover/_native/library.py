"""The compiled library: where it lies, whether it can be used, and its functions.

Needs no package besides the standard library.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ABI = 7
"""Number of the library's interface, ``dlrover_abi()`` in ``native/pieces.cpp``."""
_HEADER = struct.Struct("<32xQQ6xHHHH2x")
"""Of an ELF file: offsets of segments and sections; then the size and number of each one's headers."""
_SEGMENT = struct.Struct("<8xQ16xQ16x")
"""Of a segment's header: offset and size in the file."""
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE
FILE = Path(__file__).with_name("libdlrover_native.so")
"""The library; ``hatch_build.py`` puts it there, and beside it a file with its SHA-256, as ``sha256sum`` writes it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The library if it is to be used and can be, and why it is used or not."""

    library: ctypes.CDLL | None
    reason: str
    """Half a sentence: ``the compiled library uses avx512``, ``DLROVER_NATIVE is off``."""


@functools.cache
def load(choice: str, file: Path = FILE) -> Loaded:
    """Load the library unless ``choice`` is ``off``; this fails with a reason, without an exception."""
    if choice == "off":
        return Loaded(None, "DLROVER_NATIVE is off")
    if not file.exists():
        return Loaded(None, "this installation was built without a compiled library")
    try:
        damage = _damage(file)
        if damage:
            return Loaded(None, f"the compiled library is {damage}")
        library = ctypes.CDLL(str(file))
        abi = library.dlrover_abi()
        variant = library.dlrover_variant
    except (OSError, AttributeError, struct.error) as error:
        return Loaded(None, f"the compiled library cannot be loaded ({error})")
    if abi != ABI:
        return Loaded(None, f"the compiled library has interface {abi} instead of {ABI}")
    variant.restype = ctypes.c_char_p
    return Loaded(library, f"the compiled library uses {variant().decode()} instructions")


def functions(
    loaded: ctypes.CDLL, prefix: str, forms: Mapping[str, tuple[Any, tuple[Any, ...]]]
) -> dict[str, Callable[..., Any]]:
    """Return functions of the library by their names without ``prefix``; ``forms`` has result and arguments of each."""
    made: dict[str, Callable[..., Any]] = {}
    for name, (result, arguments) in forms.items():
        function = loaded[prefix + name]
        function.restype, function.argtypes = result, arguments
        made[name] = function
    return made


def memory(address: int, size: int, *, writable: bool = False) -> memoryview:
    """Return the bytes at an address, which stay the caller's."""
    view: memoryview = _memory_view(address, size, _WRITE if writable else _READ)
    return view


def at(array: Any) -> ctypes.c_void_p:
    """Return the address of a numpy array."""
    return ctypes.c_void_p(array.ctypes.data)


def _damage(file: Path) -> str:
    content = file.read_bytes()
    missing = missing_bytes(content)
    if missing:
        return f"cut off: {missing} of its bytes are missing"
    sums = file.with_name(f"{file.name}.sha256")
    try:
        expected = sums.read_bytes()[:64]
    except FileNotFoundError:  # a build makes it last
        return ""
    # Code that is damaged ends the process where it is called.
    if expected == hashlib.sha256(content).hexdigest().encode():
        return ""
    if file.read_bytes() != content:  # a build has replaced it meanwhile
        return _damage(file)
    return f"damaged: its SHA-256 is not that in {sums.name}"


def missing_bytes(elf: bytes) -> int:
    """Return by how much a 64-bit ELF file, or one that is none, ends before what its header names.

    The loader maps a file that was cut off, and the process ends by SIGBUS where it reads beyond the end.
    """
    if len(elf) < _HEADER.size or not elf.startswith(b"\x7fELF\x02\x01"):
        return 0  # the loader refuses it with a reason
    segments, sections, size, count, section_size, section_count = _HEADER.unpack_from(elf)
    ends: list[int] = [sections + section_size * section_count, segments + size * count]
    if ends[1] <= len(elf):
        ends += map(sum, _SEGMENT.iter_unpack(elf[segments : ends[1]]))
    return max(0, max(ends) - len(elf))


def use(choice: str) -> Loaded:
    """Load the library for a value of ``DLROVER_NATIVE`` (`dlrover.config.native`).

    Raises:
        ImportError: ``choice`` is ``require`` and the compiled library cannot be used.
    """
    loaded = load(choice)
    if choice == "require" and loaded.library is None:
        raise ImportError(f"DLROVER_NATIVE is require, but {loaded.reason}.")
    return loaded
