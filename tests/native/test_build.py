"""Wheels with and without the compiled library, and what lies beside the sources of an editable installation."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIBRARY = "dlrover/_native/libdlrover_native.so"
SUMS = f"{LIBRARY}.sha256"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
BUILD = """
import sys
from hatchling import build
print(getattr(build, sys.argv[1])(sys.argv[2]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a build reads, without the rest of the package."""
    root = tmp_path / "tree"
    package = root / "src/dlrover"
    package.mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, root)
    shutil.copy(ROOT / "src/dlrover/__init__.py", package)
    shutil.copytree(ROOT / "native", root / "native")
    shutil.copytree(
        ROOT / "src/dlrover/_native", package / "_native", ignore=shutil.ignore_patterns("*.so*")
    )
    return root


def build(tree: Path, kind: str = "build_wheel", **env: str) -> "subprocess.CompletedProcess[str]":
    """Build; the name of the result is the last line of the output."""
    given = {
        key: value for key, value in os.environ.items() if key not in ("DLROVER_NATIVE", "CXX")
    }
    given["CXXFLAGS"] = "-O0"  # it compiles in a third of the time
    command = [sys.executable, "-c", BUILD, kind, str(tree.parent)]
    return subprocess.run(
        command,
        cwd=tree,
        env=given | env,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=50,
        check=False,
    )


def wheel(tree: Path, done: "subprocess.CompletedProcess[str]") -> "tuple[str, set[str]]":
    """The tags of a wheel, and its files."""
    assert not done.returncode, done.stderr
    name = done.stdout.split()[-1]
    with zipfile.ZipFile(tree.parent / name) as archive:
        return name.removesuffix(".whl").split("-", 2)[2], set(archive.namelist())


def beside(tree: Path) -> Path:
    return tree / "src" / LIBRARY


def small(tree: Path) -> Path:
    """The only source of a library that compiles at once."""
    for source in (tree / "native").glob("*.cpp"):
        source.unlink()
    made = tree / "native/small.cpp"
    made.write_text(
        'extern "C" __attribute__((visibility("default"))) const char* small() {'
        ' return "dlrover-build:" DLROVER_BUILD; }\n'
    )
    return made


@needs_compiler
def test_a_wheel_with_the_library_serves_all_pythons(tree: Path):
    small(tree)  # CI builds one of all sources
    tags, files = wheel(tree, build(tree, DLROVER_NATIVE="require"))
    assert tags.startswith("py3-none-linux_")
    assert {LIBRARY, SUMS} <= files
    assert not beside(tree).exists()


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"DLROVER_NATIVE": "off"}, "DLROVER_NATIVE is off"),
        ({"PATH": ""}, "no C++ compiler was found"),
        ({"CXX": "/missing/c++"}, "/missing/c++ cannot be run (No such file or directory)"),
        ({"CXX": "sh -c 'echo broken: 1 >&2; exit 3'"}, "sh failed with status 3 (broken: 1)"),
        ({"CXX": "c++ '-O3"}, "CXX=c++ '-O3 cannot be split into words (no closing quotation)"),
        ({"CXXFLAGS": "-O3\\"}, "CXXFLAGS=-O3\\ cannot be split into words (no escaped character)"),
        ({"CXX": os.fsdecode(b"/caf\xe9/c++")}, "c++ cannot be run (No such file or directory)"),
        ({"CXX": "sh -c 'printf \"\\351\" >&2; exit 3'"}, "sh failed with status 3 (\ufffd)"),
        ({"CXX": "false"}, "false failed with status 1 (it printed no error)"),
    ],
)
def test_without_the_library_the_wheel_is_pure_and_the_reason_is_shown(
    tree: Path, env: "dict[str, str]", reason: str
):
    done = build(tree, **env)
    tags, files = wheel(tree, done)
    assert tags == "py3-none-any"
    assert LIBRARY not in files
    said = done.stdout + done.stderr
    assert (
        "dlrover is built without its compiled library and will copy memory more slowly: " in said
    )
    assert reason in said


def test_a_library_that_is_required_and_fails_ends_the_build(tree: Path):
    small(tree).write_text("#error broken\n")
    for env in ({}, {"PATH": ""}):
        done = build(tree, DLROVER_NATIVE="require", **env)
        assert done.returncode
        assert "DLROVER_NATIVE is require, but " in done.stderr


def test_other_values_are_refused(tree: Path):
    assert (
        "DLROVER_NATIVE=on: it takes auto, require or off."
        in build(tree, DLROVER_NATIVE="on").stderr
    )


@needs_compiler
def test_an_editable_installation_and_its_wheels_compile_only_what_changed(tree: Path):
    source = small(tree)
    done = build(tree, "build_editable")
    assert LIBRARY not in wheel(tree, done)[1]
    first = beside(tree).stat().st_mtime_ns
    build(tree, "build_editable")
    assert beside(tree).stat().st_mtime_ns == first
    with beside(tree).open("ab") as file:
        file.write(b"this very one")
    line = f"{hashlib.sha256(beside(tree).read_bytes()).hexdigest()}  {beside(tree).name}\n"
    sums = tree / "src" / SUMS
    assert len(sums.read_text()) == len(line)
    sums.write_text(line)
    name = build(tree).stdout.split()[-1]
    with zipfile.ZipFile(tree.parent / name) as archive:
        assert archive.read(LIBRARY).endswith(b"this very one"), "a wheel takes it as it is"
        assert archive.read(SUMS).decode() == line
    with source.open("a") as file:
        file.write("// changed\n")
    build(tree, "build_editable")
    changed = beside(tree).stat().st_mtime_ns
    assert changed != first
    build(tree, "build_editable", CXXFLAGS="-O0 -g0")
    assert beside(tree).stat().st_mtime_ns != changed
    build(tree, "build_editable", PATH="")
    assert not beside(tree).exists()  # it would be older than the sources one day
    assert not sums.exists()


@needs_compiler
def test_a_damaged_library_is_compiled_again(tree: Path):
    small(tree)
    build(tree, "build_editable")
    whole = beside(tree).read_bytes()
    beside(tree).write_bytes(whole[:-1] + b"!")
    build(tree, "build_editable")
    assert beside(tree).read_bytes() == whole


BUILDS = """
import os, sys, time
from pathlib import Path
import hatch_build
root, target, alone = Path("."), Path(sys.argv[1]), sys.argv[2] == "alone"
until = time.monotonic() + 4.0
while time.monotonic() < until:
    if alone:
        hatch_build._sums(target).unlink(missing_ok=True)  # so that it compiles again
    else:
        target.unlink(missing_ok=True)
    hatch_build.compile_library(root, target, "require")
    assert alone or target.read_bytes().startswith(b"dlrover-build:")
"""


def test_builds_at_the_same_time_do_not_disturb_each_other(tree: Path) -> None:
    compiler = tree / "compiler"
    compiler.write_text(
        "#!/bin/sh\nfor last; do case $last in -DDLROVER*) build=${last#*=};; esac; done\n"
        'echo "dlrover-build:$build" | tr -d \\" > $last\n'
    )
    compiler.chmod(0o755)
    places = [(beside(tree), "alone"), (beside(tree), "alone")]
    for name in ("one", "two"):
        (tree / name).mkdir()
        places.append((tree / name / beside(tree).name, "copied"))
    builds = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDS, place, how],
            cwd=tree,
            env=os.environ | {"CXX": str(compiler)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for place, how in places
    ]
    assert [one.communicate(timeout=50)[1] for one in builds] == [""] * len(builds)


def test_the_source_distribution_has_all_that_a_build_needs(tree: Path):
    (beside(tree)).write_bytes(b"compiled here")
    done = build(tree, "build_sdist")
    with tarfile.open(tree.parent / done.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hatch_build.py", "native/pieces.cpp", "native/xxh3.cpp", "native/xxh3.h"} <= names
    assert f"src/{LIBRARY}" not in names
