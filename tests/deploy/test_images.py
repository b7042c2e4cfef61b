"""The images as they were built: without root, without what they were built from, and able to run.

Runs where ``DLROVER_TEST_IMAGES`` names a folder that ``scripts/build-images`` wrote, as root, with runc.
Images of another architecture are run where this machine runs their programs by an emulator.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

import dlrover
from tests.deploy.images import OWN_ARCHITECTURE, Image, container
from tests.services import free_port, program

VARIABLE = "DLROVER_TEST_IMAGES"
FOLDER = os.environ.get(VARIABLE, "")
SCRIPT = Path(__file__).parents[2] / "scripts" / "build-images"
NAMES = ("dlrover", "dlrover-examples")
LATE = 600
"""When a command in a container is late, in seconds: long enough for an emulated processor."""

built = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * LATE),
    pytest.mark.skipif(not FOLDER, reason=f"{VARIABLE} names no folder of scripts/build-images"),
]
LOOK = """
import os, re
status = open("/proc/self/status").read()
(capabilities,) = re.findall("CapBnd:[^0-9a-f]*([0-9a-f]+)", status)
print(int(capabilities, 16), os.getuid(), os.getgid())
print(bool(os.statvfs("/").f_flag & os.ST_RDONLY))
open("/tmp/file", "w").close()
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """The images that were built, by name."""
    archives = {name: Path(FOLDER) / f"{name}.tar" for name in NAMES}
    return {
        name: Image(archive, tmp_path_factory.mktemp(name))
        for name, archive in archives.items()
        if archive.exists()
    }


def image_of(images: dict[str, Image], name: str) -> Image:
    if name not in images:
        pytest.skip(f"{VARIABLE} has no {name}.tar")
    return images[name]


def runnable(images: dict[str, Image], name: str) -> Image:
    image = image_of(images, name)
    if image.architecture != OWN_ARCHITECTURE and not image.runs():
        pytest.skip(f"this machine does not run programs of {image.architecture}")
    return image


def output(image: Image, folder: Path, *command: str) -> str:
    """What a command prints in a container; it has to succeed."""
    with container(program("runc"), image, folder, command) as run:
        printed, _ = run.communicate(timeout=LATE)
    assert run.returncode == 0, printed
    return printed


# ---- the script


def build(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ if path is None else {"PATH": path}
    return subprocess.run(
        ["/bin/bash", SCRIPT, *arguments], env=env, capture_output=True, text=True, check=False
    )


def test_the_script_says_what_it_takes(tmp_path: Path) -> None:
    done = build()
    assert (done.returncode, done.stderr) == (
        2,
        "usage: scripts/build-images [--arch amd64|arm64] DIRECTORY [NAME...]\n",
    )
    done = build("--arch", "mips", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "build-images: --arch has to be amd64 or arm64, not 'mips'\n"
    done = build(str(tmp_path), "brain")
    assert done.returncode == 2
    assert done.stderr == "build-images: brain is no image: accepted are dlrover dlrover-examples\n"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with the only programs that the script finds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("dirname", "realpath"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    return folder


def test_the_script_says_what_is_missing(tools: Path, tmp_path: Path) -> None:
    done = build(str(tmp_path / "out"), path=str(tools))
    assert done.returncode == 3
    assert done.stderr == "build-images: buildah is missing: apt-get install buildah mmdebstrap\n"
    assert not (tmp_path / "out").exists()


def test_the_script_says_that_it_cannot_run_what_it_would_build(
    tools: Path, tmp_path: Path
) -> None:
    if "ID=debian" not in Path("/etc/os-release").read_text().split():
        pytest.skip("this is not Debian")
    prints = {"buildah": "", "mmdebstrap": "", "id": "0", "dpkg": "amd64"}
    for name, text in prints.items():
        (tools / name).write_text(f"#!/bin/sh\necho {text}\n")
        (tools / name).chmod(0o755)
    done = build("--arch", "arm64", str(tmp_path / "out"), path=str(tools))
    assert done.returncode == 3
    assert done.stderr == (
        "build-images: programs of arm64 do not run here: "
        "apt-get install arch-test binfmt-support qemu-user-static\n"
    )
    assert not (tmp_path / "out").exists()


# ---- what was built


@pytest.mark.parametrize("name", NAMES)
class TestImage:
    pytestmark = built

    def test_it_says_who_runs_what(self, images: dict[str, Image], name: str) -> None:
        image = image_of(images, name)
        assert image.config["User"] == "65532:65532"
        assert f"docker.io/library/{name}:{dlrover.__version__}" in image.tags
        assert "PATH=/opt/dlrover/bin:/usr/local/sbin:" in " ".join(image.config["Env"])

    def test_all_of_it_is_for_the_architecture_it_says(
        self, images: dict[str, Image], name: str
    ) -> None:
        image = image_of(images, name)
        assert list(image.architectures()) == [image.architecture], image.architectures()

    def test_it_keeps_no_address_that_it_was_built_from(
        self, images: dict[str, Image], name: str
    ) -> None:
        image = image_of(images, name)
        assert not re.findall(r"\w+://[^ ]+", str((image.history, image.config)))
        for path in ("etc/pip.conf", "etc/apt/sources.list", "root/.config/pip/pip.conf"):
            file = image.root / path
            assert not file.exists() or not file.read_text()
        assert not list(image.root.glob("etc/apt/*.d/*.sources"))
        assert not list(image.root.glob("opt/dlrover/lib/python*/site-packages/pip/*"))

    def test_it_runs_without_root_capabilities_and_writing(
        self, images: dict[str, Image], name: str, tmp_path: Path
    ) -> None:
        printed = output(runnable(images, name), tmp_path / "c", "python3", "-c", LOOK)
        assert printed == "0 65532 65532\nTrue\n"

    def test_it_has_this_version(self, images: dict[str, Image], name: str, tmp_path: Path) -> None:
        image = runnable(images, name)
        version = f"dlrover {dlrover.__version__}\n"
        assert output(image, tmp_path / "c", "dlrover", "--version") == version


class TestRunning:
    pytestmark = built

    @pytest.mark.parametrize("command", ["operator", "master", "brain serve", "submit"])
    def test_commands_of_the_cluster_are_there(
        self, images: dict[str, Image], tmp_path: Path, command: str
    ) -> None:
        image = runnable(images, "dlrover")
        printed = output(image, tmp_path / "c", "dlrover", *command.split(), "--help")
        assert f"Usage: dlrover {command}" in printed

    def test_a_master_serves_and_ends_when_it_is_told_to(
        self, images: dict[str, Image], tmp_path: Path
    ) -> None:
        port = free_port()
        command = ["dlrover", "master", f"--port={port}", "--job-dir=/tmp/job"]
        image = runnable(images, "dlrover")
        with container(program("runc"), image, tmp_path / "c", command) as run:
            late = time.monotonic() + LATE
            while not listens(port):
                assert run.poll() is None, run.communicate()
                assert time.monotonic() < late
                time.sleep(0.1)
            run.terminate()
            printed, _ = run.communicate(timeout=30)
        assert run.returncode == 143, printed

    def test_an_operator_without_a_cluster_says_so(
        self, images: dict[str, Image], tmp_path: Path
    ) -> None:
        image = runnable(images, "dlrover")
        with container(program("runc"), image, tmp_path / "c", image.config["Cmd"]) as run:
            printed, _ = run.communicate(timeout=LATE)
        assert run.returncode == 2, printed
        assert "kubeconfig" in printed

    def test_a_job_runs_its_workers(self, images: dict[str, Image], tmp_path: Path) -> None:
        image = runnable(images, "dlrover")
        variables = ["env", "DLROVER_STATE_DIR=/tmp/dlrover"]
        job = ["dlrover-run", "--nproc-per-node", "2", "--no-python", "/bin/echo", "trained"]
        assert output(image, tmp_path / "c", *variables, *job).count("trained") == 2

    def test_the_first_example_learns(self, images: dict[str, Image], tmp_path: Path) -> None:
        image = runnable(images, "dlrover-examples")
        training = ["01_digits_ddp/train.py", "--out", "/tmp/out"]
        command = ["dlrover-run", "--nproc-per-node", "2", *training]
        assert "test accuracy" in output(image, tmp_path / "c", *command)


def listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
