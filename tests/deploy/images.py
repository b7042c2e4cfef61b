"""Images as ``scripts/build-images`` writes them: what they say, and containers of them, by runc."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

OWN_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "")
"""The architecture of this machine, as images name it."""

_MACHINES = {62: "amd64", 183: "arm64"}  # numbers of ELF
_CAPABILITIES = ("bounding", "effective", "inheritable", "permitted", "ambient")


class Image:
    """One image, unpacked below ``folder``."""

    def __init__(self, archive: Path, folder: Path) -> None:
        with tarfile.open(archive) as content:
            (manifest,) = json.load(_member(content, "manifest.json"))
            configuration = json.load(_member(content, manifest["Config"]))
        self.tags: list[str] = manifest["RepoTags"]
        self.architecture: str = configuration["architecture"]
        self.config: dict[str, Any] = configuration["config"]
        self.history: list[dict[str, Any]] = configuration["history"]
        self.root = folder / "root"
        self.root.mkdir(parents=True)
        for layer in manifest["Layers"]:
            read = ["tar", "--extract", "--to-stdout", "--file", str(archive), layer]
            with subprocess.Popen(read, stdout=subprocess.PIPE) as reading:
                into = ["tar", "--extract", "--numeric-owner", "--directory", str(self.root)]
                subprocess.run(into, stdin=reading.stdout, check=True)
            assert reading.returncode == 0

    def runs(self) -> bool:
        """Whether this machine runs the image's programs, be it by an emulator."""
        run = ["chroot", str(self.root), "/bin/true"]
        return subprocess.run(run, capture_output=True, check=False).returncode == 0

    def architectures(self) -> dict[str, Path]:
        """The architectures that programs and libraries in the image are for, with a file of each."""
        found: dict[str, Path] = {}
        for folder, _, names in os.walk(self.root):
            for path in (Path(folder) / name for name in names):
                if path.is_file() and not path.is_symlink():
                    with path.open("rb") as file:
                        head = file.read(20)
                    if head.startswith(b"\x7fELF"):
                        machine = int.from_bytes(head[18:20], "little")
                        found.setdefault(_MACHINES.get(machine, str(machine)), path)
        return found


def _member(archive: tarfile.TarFile, name: str) -> Any:
    found = archive.extractfile(name)
    assert found is not None, name
    return found


@contextlib.contextmanager
def container(
    runc: str, image: Image, folder: Path, command: Sequence[str]
) -> Iterator[subprocess.Popen[str]]:
    """A container as the deployments ask for it, with the network of this machine and its own ``/tmp``.

    The image's user, no capability, no way to gain one, and a root file system that is only read. The
    process is runc, which passes signals on. It is ended with the block, and by the end of the test.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_specification(image, command)))
    name = f"dlrover-test-{secrets.token_hex(4)}"
    own = [runc, "--root", str(folder / "state")]
    run = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *own, "run", "--bundle", str(folder), name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield run
    finally:
        subprocess.run([*own, "delete", "--force", name], capture_output=True, check=False)
        run.kill()
        run.communicate()


def _specification(image: Image, command: Sequence[str]) -> dict[str, Any]:
    """The configuration of a container for runc."""
    user, _, group = image.config["User"].partition(":")
    tmpfs = {"type": "tmpfs", "source": "tmpfs"}
    process = {
        "user": {"uid": int(user), "gid": int(group)},
        "args": list(command),
        "env": image.config["Env"],
        "cwd": image.config.get("WorkingDir") or "/",
        "capabilities": {kind: [] for kind in _CAPABILITIES},
        "noNewPrivileges": True,
    }
    return {
        "ociVersion": "1.0.2",
        "process": process,
        "root": {"path": str(image.root), "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", **tmpfs, "options": ["nosuid", "mode=755", "size=65536k"]},
            {"destination": "/dev/shm", **tmpfs, "options": ["nosuid", "nodev", "mode=1777"]},
            {"destination": "/tmp", **tmpfs, "options": ["nosuid", "nodev", "mode=1777"]},
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"],
        },
    }
