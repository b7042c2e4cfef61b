"""The compiled library is used if it can be; otherwise one sentence says why not."""

import contextlib
import hashlib
import os
import re
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dlrover import config
from dlrover._native import library
from dlrover.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


def test_what_was_required_when_this_was_installed_is_used():
    """CI sets DLROVER_NATIVE=require, so that no failure to compile passes unseen."""
    loaded = library.load("auto")
    if os.environ.get("DLROVER_NATIVE") == "require":
        assert loaded.library is not None, loaded.reason
    assert loaded.reason


def test_off_does_not_load_it():
    assert library.load("off") == library.Loaded(None, "DLROVER_NATIVE is off")


def test_an_installation_without_it(tmp_path: Path):
    loaded = library.load("auto", tmp_path / "missing.so")
    assert loaded == library.Loaded(None, "this installation was built without a compiled library")


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF" + bytes(100)])
def test_a_file_that_is_no_library(tmp_path: Path, content: bytes):
    (file := tmp_path / "library.so").write_bytes(content)
    loaded = library.load("auto", file)
    assert loaded.library is None
    assert re.fullmatch(r"the compiled library cannot be loaded \(.+\)", loaded.reason)


@pytest.mark.skipif(not library.FILE.exists(), reason="the library is not compiled")
@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.95, 1 - 1e-5])
def test_a_library_that_was_cut_off(tmp_path: Path, share: float):
    """By a full disk, for instance. Loading it would end the process by SIGBUS, at once or later."""
    whole = library.FILE.read_bytes()
    (file := tmp_path / "library.so").write_bytes(whole[: int(len(whole) * share)])
    loaded = library.load("auto", file)
    assert loaded.library is None
    missing = len(whole) - int(len(whole) * share)
    assert loaded.reason == f"the compiled library is cut off: {missing} of its bytes are missing"


@pytest.mark.skipif(not library.FILE.exists(), reason="the library is not compiled")
def test_a_library_with_zeroed_pages(tmp_path: Path):
    """By a crash of the machine, for instance. Its header is whole, and the first call would end the process."""
    whole = library.FILE.read_bytes()
    (file := tmp_path / "library.so").write_bytes(whole)
    sums = tmp_path / "library.so.sha256"
    sums.write_text(f"{hashlib.sha256(whole).hexdigest()}  library.so\n")
    assert library.load("auto", file).library is not None
    library.load.cache_clear()
    file.unlink()  # the loader has mapped it
    file.write_bytes(whole[: 1 << 14] + bytes(len(whole) - (1 << 15)) + whole[-(1 << 14) :])
    reason = "the compiled library is damaged: its SHA-256 is not that in library.so.sha256"
    assert library.load("auto", file) == library.Loaded(None, reason)
    library.load.cache_clear()
    file.write_bytes(whole)
    sums.write_bytes(bytes(80))
    assert library.load("auto", file) == library.Loaded(None, reason)


@given(st.binary(max_size=40), st.integers(0, 63), st.binary(max_size=60))
def test_any_header_is_read(content: bytes, at: int, rest: bytes):
    elf = bytearray(b"\x7fELF\x02\x01" + bytes(58) + rest)
    elf[max(at, 6) :] = content + elf[max(at, 6) + len(content) :]
    with contextlib.suppress(struct.error):  # which `load` reports
        assert library.missing_bytes(bytes(elf)) >= 0


def compiled(directory: Path, program: str) -> Path:
    file = directory / "library.so"
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(file)]
    try:
        subprocess.run(command, input=program.encode(), check=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("no C++ compiler")
    return file


def test_a_library_of_another_version(tmp_path: Path):
    program = 'extern "C" { int dlrover_abi() { return 99; } const char* dlrover_variant() { return ""; } }'
    loaded = library.load("auto", compiled(tmp_path, program))
    reason = f"the compiled library has interface 99 instead of {library.ABI}"
    assert loaded == library.Loaded(None, reason)


def test_a_library_of_another_project(tmp_path: Path):
    loaded = library.load("auto", compiled(tmp_path, 'extern "C" int other() { return 1; }'))
    assert loaded.library is None
    assert "undefined symbol: dlrover_abi" in loaded.reason


def test_the_interface_has_one_number():
    source = (ROOT / "native/pieces.cpp").read_text()
    assert f"dlrover_abi() {{ return {library.ABI}; }}" in source


def test_what_is_required_and_missing_is_an_error(monkeypatch: pytest.MonkeyPatch):
    kernels = pytest.importorskip("dlrover._native.kernels")
    missing = library.Loaded(None, "this installation was built without a compiled library")
    monkeypatch.setattr(library, "load", lambda _choice: missing)
    with pytest.raises(ImportError, match="DLROVER_NATIVE is require, but this installation was"):
        kernels.kernels.__wrapped__("require")
    assert not kernels.kernels.__wrapped__("auto").native


def test_the_variable_takes_three_values():
    assert config.native({}) == config.native({"DLROVER_NATIVE": ""}) == "auto"
    for choice in ("auto", "require", "off"):
        assert config.native({"DLROVER_NATIVE": choice}) == choice
    with pytest.raises(
        ConfigurationError, match="DLROVER_NATIVE=on: it takes auto, require or off"
    ):
        config.native({"DLROVER_NATIVE": "on"})
