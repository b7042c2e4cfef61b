"""Where the programs of the control plane come from: KUBEBUILDER_ASSETS, an earlier build, a build now."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
from pathlib import Path

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
SCRIPT = Path(__file__).parents[2] / "scripts" / "build-kubernetes"
CANNOT = 3
"""Exit code of the script on a machine where it cannot work."""


class UnavailableError(Exception):
    """There is no control plane on this machine, and why."""


def find() -> Path:
    """A directory with the programs.

    Raises:
        UnavailableError: there is none, and none can be built here.
        RuntimeError: the build failed though this machine can build.
    """
    given = os.environ.get("KUBEBUILDER_ASSETS")
    if given:
        missing = [name for name in PROGRAMS if not (Path(given) / name).exists()]
        if missing:
            raise RuntimeError(f"KUBEBUILDER_ASSETS={given} lacks {', '.join(missing)}")
        return Path(given)
    directory = cache()
    if not directory.exists():
        _build(directory)
    return directory


def cache() -> Path:
    """Where a build is kept: another script or another kind of machine is another build."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    content = SCRIPT.read_bytes() + platform.machine().encode()
    return base / "dlrover" / f"kubernetes-{hashlib.sha256(content).hexdigest()[:12]}"


def _build(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build for all workers of a test run
        if directory.exists():
            return
        done = subprocess.run([SCRIPT, directory], capture_output=True, text=True, check=False)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode == CANNOT:
        raise UnavailableError(last)
    if done.returncode:
        raise RuntimeError(f"{SCRIPT.name} failed: {done.stderr[-2000:]}")
