"""A node by the real kubelet: containerd and runc run a pod's containers, in namespaces of the node's own.

All of the node is in one PID, one mount and one network namespace, and ends with the process that started it:
its bridges, mounts and processes go with the namespaces. What stays is an empty tree of control groups, which
`RealKubelet.stop` removes, or the next start. Pods have the node's network, whose way out is the API server.
Their containers see the programs and the Python of this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrover.kubernetes.resources import names
from tests.kubernetes.controlplane import ControlPlane

VARIABLE = "DLROVER_REAL_KUBELET"
PROGRAMS = (
    "kubelet",
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "runc",
    "catatonit",
    "loopback",
)
NODE = "real"
ADDRESS = "10.245.0.1"
IMAGE = "localhost/empty:1"
START_TIMEOUT = 60.0
"""Seconds."""
_GROUPS = Path("/sys/fs/cgroup")
_GROUP = "dlrover-test"
_SCRIPT = """
set -u
mount --make-rprivate /
mount -t proc proc /proc
mount --bind {folder}/hosts /etc/hosts
mkdir -p /var/log
mount -t tmpfs logs /var/log
umount /sys/fs/cgroup/unified 2>/dev/null
ip link set lo up
ip link add node type bridge
ip address add {address}/24 dev node
ip link set node up
ip route add default dev node
socat TCP-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr UNIX-CONNECT:{folder}/api.sock 2>/dev/null &
containerd --config {folder}/containerd.toml &
until [ -S {folder}/containerd.sock ]; do sleep 0.1; done
for archive in {archives}; do
    ctr --address {folder}/containerd.sock --namespace k8s.io images import $archive
done
exec kubelet --kubeconfig={folder}/kubeconfig --config={folder}/kubelet.json --container-runtime=remote \
    --container-runtime-endpoint=unix://{folder}/containerd.sock --root-dir={folder}/kubelet \
    --hostname-override={node} --node-ip={address} --cert-dir={folder}/pki \
    --feature-gates=LocalStorageCapacityIsolation=false
"""
_CONTAINERD = """
version = 2
root = "{folder}/images"
state = "{folder}/run"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  tolerate_missing_hugetlb_controller = true
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{programs}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""
_NETWORK = {"cniVersion": "0.3.1", "name": "node", "plugins": [{"type": "loopback"}]}
_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "cgroupRoot": f"/{_GROUP}",
    "enforceNodeAllocatable": [],
    "failSwapOn": False,
    "evictionHard": dict.fromkeys(
        ("memory.available", "nodefs.available", "imagefs.available", "nodefs.inodesFree"), "0%"
    ),
    "imageGCHighThresholdPercent": 100,
    "address": ADDRESS,
    "readOnlyPort": 0,
    "syncFrequency": "2s",
    "nodeStatusUpdateFrequency": "2s",
    "resolvConf": "/dev/null",
    "makeIPTablesUtilChains": False,
    "oomScoreAdj": 0,
}


class RealKubelet:
    """One node. ``hosts``: names that its pods find at its own address; ``images``: archives that it has."""

    def __init__(
        self,
        plane: ControlPlane,
        folder: Path,
        programs: Path,
        hosts: list[str],
        images: Sequence[Path] = (),
    ) -> None:
        self._archives = [folder / "pause.tar", folder / "empty.tar", *images]
        self._plane = plane
        self._folder = folder
        self._programs = programs
        self._hosts = hosts
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        missing = [name for name in PROGRAMS if not (self._programs / name).exists()]
        assert not missing, f"{VARIABLE}={self._programs} lacks {', '.join(missing)}"
        folder = self._folder
        (folder / "cni").mkdir(parents=True)
        (folder / "cni" / "node.conflist").write_text(json.dumps(_NETWORK))
        (folder / "kubelet.json").write_text(
            json.dumps(_KUBELET | {"volumePluginDir": f"{folder}/plugins"})
        )
        values = {"folder": folder, "programs": self._programs, "address": ADDRESS, "node": NODE}
        (folder / "containerd.toml").write_text(_CONTAINERD.format(**values))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {' '.join(self._hosts)}\n")
        _image(folder / "pause.tar", "localhost/pause:1", self._programs / "catatonit")
        _image(folder / "empty.tar", IMAGE)
        self._plane.write_kubeconfig(folder / "kubeconfig")
        _remove_groups()
        for controller in _controllers():
            (controller / _GROUP).mkdir()
            if controller.name == "cpuset":
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (controller / _GROUP / file).write_text((controller / file).read_text())
        port = self._plane.port
        self._run("socat", f"UNIX-LISTEN:{folder}/api.sock,fork", f"TCP:127.0.0.1:{port}")
        archives = " ".join(map(str, self._archives))
        script = _SCRIPT.format(port=port, archives=archives, **values)
        flags = ("--mount", "--net", "--pid", "--fork", "--kill-child")
        self._run("unshare", *flags, "bash", "-c", script)
        self._wait_until_ready()

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        with contextlib.suppress(urllib.error.HTTPError):
            self._plane.call("DELETE", f"/api/v1/nodes/{NODE}")
        _remove_groups()

    def log(self) -> str:
        """The end of what kubelet and containerd wrote."""
        return (self._folder / "node.log").read_text(errors="replace")[-6000:]

    def _run(self, *command: str) -> None:
        env = {"PATH": f"{self._programs}:{os.environ['PATH']}:/usr/sbin:/sbin"}
        with (self._folder / "node.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *command],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _wait_until_ready(self) -> None:
        late = time.monotonic() + START_TIMEOUT
        while not self._ready():
            ended = any(process.poll() is not None for process in self._processes)
            if ended or time.monotonic() > late:
                raise RuntimeError(f"The node does not come up:\n{self.log()}")
            time.sleep(0.2)

    def _ready(self) -> bool:
        try:
            status = self._plane.call("GET", f"/api/v1/nodes/{NODE}")["status"]
        except urllib.error.HTTPError:
            return False
        kinds = {one["type"]: one["status"] for one in status.get("conditions", ())}
        return kinds.get("Ready") == "True"


def api_server(plane: ControlPlane) -> dict[str, str]:
    """The variables by which a pod of this node finds the API server."""
    return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(plane.port)}


def template(plane: ControlPlane, folder: Path, **container: Any) -> dict[str, Any]:
    """A pod template with this machine's programs, this Python and ``folder``, writable."""
    places = {"usr": "/usr", "lib": "/usr/lib", "lib64": "/usr/lib64", "bin": "/usr/bin"}
    mounts = [{"name": name, "mountPath": f"/{name}", "readOnly": True} for name in places]
    own = {sys.prefix, sys.base_prefix, str(Path(names.__file__).parents[2]), str(folder)}
    for number, path in enumerate(sorted(own)):
        places[f"own-{number}"] = path
        mounts.append({"name": f"own-{number}", "mountPath": path, "readOnly": path != str(folder)})
    env = {
        "PATH": f"{sys.prefix}/bin:/usr/bin",
        "PYTHONPATH": str(Path(names.__file__).parents[2]),
        **api_server(plane),
    }
    main = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "volumeMounts": mounts,
        "env": [{"name": name, "value": value} for name, value in env.items()],
        **container,
    }
    spec = {
        "hostNetwork": True,
        "dnsPolicy": "Default",
        "terminationGracePeriodSeconds": 2,
        "securityContext": {"runAsUser": 0},
        "containers": [main],
        "volumes": [{"name": name, "hostPath": {"path": path}} for name, path in places.items()],
    }
    return {"spec": spec}


def _image(file: Path, name: str, program: Path | None = None) -> None:
    """Write an image as an archive: nothing but folders, and what it runs if it is given."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as layer:
        for folder in ("dev", "etc", "proc", "sys", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            layer.addfile(entry)
        if program is not None:
            layer.add(program, "program")
    layers = [f"sha256:{hashlib.sha256(content.getvalue()).hexdigest()}"]
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/program", "-P"]} if program else {},
        "rootfs": {"type": "layers", "diff_ids": layers},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(file, "w") as archive:
        for part, data in (
            ("layer.tar", content.getvalue()),
            ("config.json", json.dumps(configuration).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(part)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def _controllers() -> list[Path]:
    return [
        path
        for path in _GROUPS.iterdir()
        if (path / "cgroup.procs").exists() and path.name != "unified"
    ]


def _remove_groups() -> None:
    """Remove the groups of a node, which are empty when its processes have ended."""
    late = time.monotonic() + 10.0
    for controller in _controllers():
        for folder, _, _ in os.walk(controller / _GROUP, topdown=False):
            while True:
                try:
                    os.rmdir(folder)
                    break
                except OSError:
                    if time.monotonic() > late:
                        raise
                    time.sleep(0.05)
