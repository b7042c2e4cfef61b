"""Build hook: compiles ``native/`` into the library that `dlrover._native` loads.

``DLROVER_NATIVE`` says what to do: ``auto`` (default) builds a package without the library, and says why, where
compiling fails; ``require`` fails instead; ``off`` does not try. ``CXX`` and ``CXXFLAGS`` name the compiler and
further options. A wheel with the library serves all Pythons of one platform.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "dlrover/_native/libdlrover_native.so"
FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wl,--as-needed", "-Wl,-z,defs", "-Wl,-s",
]  # fmt: skip
BASE = {"x86_64": ["-msse4.2", "-mpopcnt", "-mcx16"]}
"""Instructions that every machine is taken to have (x86-64-v2); the library chooses better ones at run time."""
CHOICES = ("auto", "require", "off")


class NotBuiltError(Exception):
    """The library is not built; the message says why."""


class NativeBuildHook(BuildHookInterface):
    """Adds the library to a wheel, or puts it beside the sources for an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library before the wheel is made."""
        self._temporary = tempfile.TemporaryDirectory()
        editable = version == "editable"
        beside = Path(self.root, "src", LIBRARY)
        target = beside if editable else Path(self._temporary.name, beside.name)
        choice = os.environ.get("DLROVER_NATIVE") or "auto"
        try:
            compile_library(Path(self.root), target, choice)
        except (NotBuiltError, OSError) as error:
            if choice == "require":
                raise RuntimeError(f"DLROVER_NATIVE is require, but {error}") from error
            self.app.display_warning(
                f"dlrover is built without its compiled library and will copy memory more slowly: {error}"
            )
            if editable:
                beside.unlink(missing_ok=True)
                _sums(beside).unlink(missing_ok=True)
            return
        if not editable:
            build_data["force_include"][str(target)] = LIBRARY
            build_data["force_include"][str(_sums(target))] = str(_sums(Path(LIBRARY)))
        here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{here}"}

    def finalize(self, version: str, build_data: dict[str, Any], artifact: str) -> None:
        """Remove the library that is now in the wheel."""
        self._temporary.cleanup()


def compile_library(root: Path, target: Path, choice: str) -> None:
    """Compile the library unless the same command has made it from the present sources, here or beside them.

    Raises:
        NotBuiltError: ``DLROVER_NATIVE`` is ``off``, there is no compiler, or it fails.
    """
    if choice not in CHOICES:
        raise ValueError(f"DLROVER_NATIVE={choice}: it takes auto, require or off.")
    if choice == "off":
        raise NotBuiltError("DLROVER_NATIVE is off")
    sources = sorted(str(path) for path in root.glob("native/*.cpp"))
    found = (
        os.environ.get("CXX", "").strip()
        or shutil.which("c++")
        or shutil.which("g++")
        or shutil.which("clang++")
    )
    if not found:
        raise NotBuiltError("no C++ compiler was found (c++, g++ or clang++ on PATH, or CXX)")
    compiler, options = _words("CXX", found), _words("CXXFLAGS", os.environ.get("CXXFLAGS", ""))
    command = [*compiler, *FLAGS, *BASE.get(platform.machine(), []), *options]
    build = hashlib.sha256(os.fsencode(shlex.join(command)))
    for path in sorted(root.glob("native/*")):
        build.update(path.read_bytes())
    mark = f"dlrover-build:{build.hexdigest()}"
    for made in (target, root / "src" / LIBRARY):
        library, sums = _whole(made)
        if mark.encode() in library:
            if made != target:
                target.write_bytes(library)
                _sums(target).write_bytes(sums)
            return
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".native-") as directory:
        made = Path(directory, target.name)
        define = f'-DDLROVER_BUILD="{build.hexdigest()}"'
        try:
            done = subprocess.run(
                [*command, define, *sources, "-o", str(made)],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise NotBuiltError(f"{command[0]} cannot be run ({error.strerror})") from error
        if done.returncode:
            said = "; ".join(done.stderr.strip().splitlines()[:3]) or "it printed no error"
            raise NotBuiltError(f"{command[0]} failed with status {done.returncode} ({said})")
        line = f"{hashlib.sha256(made.read_bytes()).hexdigest()}  {made.name}\n"
        _sums(made).write_text(line)
        # Each at once, since other builds may be under way, and never a library with the sum of another one.
        _sums(target).unlink(missing_ok=True)
        os.replace(made, target)
        os.replace(_sums(made), _sums(target))


def _sums(library: Path) -> Path:
    """Return the file with a library's SHA-256."""
    return library.with_name(f"{library.name}.sha256")


def _whole(library: Path) -> tuple[bytes, bytes]:
    """Return a library and its file of sums, each read once: another build may replace them; empty if they do not fit."""
    try:
        content, sums = library.read_bytes(), _sums(library).read_bytes()
    except FileNotFoundError:
        return b"", b""
    fits = sums[:64] == hashlib.sha256(content).hexdigest().encode()
    return (content, sums) if fits else (b"", b"")


def _words(name: str, value: str) -> list[str]:
    """Return the words of an environment variable."""
    try:
        return shlex.split(value)
    except ValueError as error:
        reason = str(error).lower().rstrip(".")
        raise NotBuiltError(f"{name}={value} cannot be split into words ({reason})") from error
