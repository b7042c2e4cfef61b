"""The compiled library: where it lies, and whether it can be used. Needs no package besides the standard library."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

ABI = 3
"""Number of the library's interface, ``dlrover_abi()`` in ``native/pieces.cpp``."""
FILE = Path(__file__).with_name("libdlrover_native.so")
"""The library; ``hatch_build.py`` puts it there."""


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
        library = ctypes.CDLL(str(file))
        abi = library.dlrover_abi()
        variant = library.dlrover_variant
    except (OSError, AttributeError) as error:
        return Loaded(None, f"the compiled library cannot be loaded ({error})")
    if abi != ABI:
        return Loaded(None, f"the compiled library has interface {abi} instead of {ABI}")
    variant.restype = ctypes.c_char_p
    return Loaded(library, f"the compiled library uses {variant().decode()} instructions")


def use(choice: str) -> Loaded:
    """Load the library for a value of ``DLROVER_NATIVE`` (`dlrover.config.native`).

    Raises:
        ImportError: ``choice`` is ``require`` and the compiled library cannot be used.
    """
    loaded = load(choice)
    if choice == "require" and loaded.library is None:
        raise ImportError(f"DLROVER_NATIVE is require, but {loaded.reason}.")
    return loaded
