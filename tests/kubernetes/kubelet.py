"""A kubelet for tests: registers nodes, and runs the containers of their pods as plain processes.

What a process sees instead of a container's file system and network:

* Images are not used: a container needs a command. It runs in a directory of its pod, with the Python
  of the tests first in PATH.
* Volumes (secret, configMap, emptyDir, persistentVolumeClaim, hostPath) are directories. Wherever the
  command, an argument or a variable names the mount path of one, it names that directory instead.
* A pod has an address of its own in 127.0.0.0/8. A Service's cluster address is one, too: connections to
  it reach a running pod that its selector takes. The names ``service.namespace`` and
  ``service.namespace.svc`` in commands and variables become that address.
* The service account is a kubeconfig, named by KUBECONFIG.

A container's first process dies with the process that runs the tests. What it started has to see to its own
end then, as all that ``dlrover-run`` starts does.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
import urllib.error
import urllib.parse
from pathlib import Path
from typing import Any

from tests.kubernetes.containers import Container, Pod, micro, now
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.execs import Execs
from tests.kubernetes.services import Services

logger = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between two looks at the pods."""
LEASE_PERIOD = 2.0
"""Seconds between two signs of life of a node."""
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class Kubelet:
    """Nodes for the pods of one namespace. Its methods may be called from any thread."""

    def __init__(
        self,
        plane: ControlPlane,
        folder: Path,
        namespace: str,
        nodes: int,
        capacity: dict[str, str],
    ) -> None:
        self.namespace = namespace
        self.nodes = [f"{namespace}-{number}" for number in range(nodes)]
        self.folder = folder
        self.pods: dict[str, Pod] = {}
        """Pods that were started here, by name; of several of one name the last one."""
        self._plane = plane
        self._capacity = {"cpu": "64", "memory": "256Gi", "pods": "1000"} | {
            key.replace("gpu", "nvidia.com/gpu"): value for key, value in capacity.items()
        }
        self._services = Services()
        self._execs = Execs(
            plane.directory / "certificates",
            lambda pod, name: {one.name: one for one in self.pods[pod].containers}[name],
        )
        self._numbers = itertools.count(1)
        self._net = secrets.randbelow(100) + 128
        self._subnet = secrets.randbelow(200)
        self._lost: set[str] = set()
        self._renewed = 0.0
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    # ---- what a test may ask for

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        for name in self.nodes:
            self._register(name)
        self._thread.start()

    def stop(self) -> None:
        """End all pods and take the nodes away."""
        self._stopping.set()
        self._thread.join()
        self._services.close()
        self._execs.close()
        for pod in self.pods.values():
            pod.close()
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        self._quietly("DELETE", f"{path}?gracePeriodSeconds=0")
        for name in self.nodes:
            self._quietly("DELETE", f"/api/v1/nodes/{name}")

    def kill(self, pod: str, reason: str = "") -> None:
        """Kill a pod's containers; ``reason``: what the status says, as ``OOMKilled``."""
        with self._lock:
            for container in self.pods[pod].containers:
                container.reason = reason
                container.signal(signal.SIGKILL)

    def evict(self, pod: str) -> None:
        """End a pod as a node does that runs out of something."""
        with self._lock:
            self.pods[pod].close()
            self.pods[pod].failed = "Evicted"

    def lose(self, node: str) -> None:
        """The node goes dark: its processes end, and it says nothing any more."""
        with self._lock:
            self._lost.add(node)
            for pod in self.pods.values():
                if pod.obj["spec"]["nodeName"] == node:
                    for container in pod.containers:
                        container.signal(signal.SIGKILL)

    def log(self, pod: str) -> str:
        """What a pod's containers wrote."""
        files = sorted(self.pods[pod].folder.glob("*.log")) if pod in self.pods else []
        return "\n".join(path.read_text(errors="replace") for path in files)

    # ---- nodes

    def _register(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        self._plane.call("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        self._post_ready(name)
        lease = {
            "metadata": {"name": name, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": name, "leaseDurationSeconds": 8, "renewTime": micro()},
        }
        self._plane.call(
            "POST", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", lease
        )

    def _post_ready(self, name: str) -> None:
        """Say that the node is ready: it is not taken to be, any more, once the API server was away for long."""
        condition = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        times = {"lastHeartbeatTime": now(), "lastTransitionTime": now()}
        status = {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "conditions": [condition | times],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._execs.port}},
        }
        self._plane.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})

    def _renew(self) -> None:
        if time.monotonic() - self._renewed < LEASE_PERIOD:
            return
        for name in self.nodes:
            if name not in self._lost:
                path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}"
                self._plane.call("PATCH", path, {"spec": {"renewTime": micro()}})
                self._post_ready(name)
        self._renewed = time.monotonic()

    # ---- pods

    def _run(self) -> None:
        while not self._stopping.wait(TICK):
            with contextlib.suppress(OSError, http.client.HTTPException):  # the API server is away
                self._tick()

    def _tick(self) -> None:
        self._renew()
        base = f"/api/v1/namespaces/{self.namespace}"
        pods = self._plane.call("GET", f"{base}/pods")["items"]
        self._services.update(self._plane.call("GET", f"{base}/services")["items"], pods)
        with self._lock:
            self._look_at(pods)

    def _look_at(self, objects: list[dict[str, Any]]) -> None:
        seen = set()
        for obj in objects:
            node = obj["spec"].get("nodeName")
            if node not in self.nodes or node in self._lost:
                continue
            name = obj["metadata"]["name"]
            seen.add(name)
            pod = self.pods.get(name)
            if pod is None or pod.uid != obj["metadata"]["uid"]:
                if obj.get("status", {}).get("phase") == "Pending":
                    self._begin(obj)
                elif obj["metadata"].get("deletionTimestamp"):
                    self._remove(obj)
                continue
            pod.obj = obj
            self._follow(pod)
        for name in set(self.pods) - seen:
            pod = self.pods[name]
            if pod.obj["spec"]["nodeName"] not in self._lost and pod.running:  # deleted by force
                for container in pod.containers:
                    container.signal(signal.SIGKILL)
                    container.poll()

    def _begin(self, obj: dict[str, Any]) -> None:
        if obj["metadata"].get("deletionTimestamp"):
            self._remove(obj)
            return
        number = next(self._numbers)
        address = f"127.{self._net}.{self._subnet + number // 250}.{number % 250 + 1}"
        folder = self.folder / f"{obj['metadata']['name']}-{number}"
        folder.mkdir()
        pod = Pod(obj, folder, address)
        try:
            for container in pod.containers:
                self._start(pod, container)
        except urllib.error.HTTPError as error:
            self._fail_to_mount(pod, error)
            return
        if pod.name in self.pods:
            self.pods[pod.name].close()
        self.pods[pod.name] = pod
        self._tell(pod)

    def _fail_to_mount(self, pod: Pod, error: urllib.error.HTTPError) -> None:
        """Say so once, in an Event alone, as a kubelet does; the next look is another attempt."""
        kind, name = urllib.parse.urlsplit(error.url or "").path.split("/")[-2:]
        message = f'MountVolume.SetUp failed for volume "data" : {kind[:-1]} "{name}" not found'
        about = {"kind": "Pod", "name": pod.name, "namespace": self.namespace, "uid": pod.uid}
        event = {
            "metadata": {"name": f"{pod.name}.mount"},
            "involvedObject": about,
            "type": "Warning",
            "reason": "FailedMount",
            "message": message,
            "lastTimestamp": now(),
        }
        self._quietly("POST", f"/api/v1/namespaces/{self.namespace}/events", event)

    def _start(self, pod: Pod, container: Container) -> None:
        paths = self._mounts(pod, container)
        env = self._environment(pod, container)
        words = [*(container.spec.get("command") or []), *(container.spec.get("args") or [])]
        words = [self._localize(_expand(word, env), paths) for word in words]
        own = {key: self._localize(value, paths) for key, value in env.items()}
        base = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HOME": str(pod.folder),
        }
        container.start(words, base | self._account(pod, paths) | own)

    def _follow(self, pod: Pod) -> None:
        for container in pod.containers:
            container.poll()
        self._end(pod)
        for container in pod.containers:
            if pod.to_restart(container):
                container.last, container.restarts = container.ended, container.restarts + 1
                self._start(pod, container)
        self._tell(pod)
        if pod.obj["metadata"].get("deletionTimestamp") and not pod.running:
            self._remove(pod.obj)

    def _end(self, pod: Pod) -> None:
        """Ask a pod to end that is being deleted; kill what has not ended in its time."""
        metadata = pod.obj["metadata"]
        if metadata.get("deletionTimestamp"):
            due = time.monotonic() + metadata.get("deletionGracePeriodSeconds", 30)
            if pod.deadline is None:
                for container in pod.containers:
                    container.signal(signal.SIGTERM)
            pod.deadline = due if pod.deadline is None else min(due, pod.deadline)
        if pod.deadline is not None and time.monotonic() >= pod.deadline:
            for container in pod.containers:
                container.signal(signal.SIGKILL)

    def _tell(self, pod: Pod) -> None:
        status = pod.status()
        if status != pod.said:
            path = f"/api/v1/namespaces/{self.namespace}/pods/{pod.name}/status"
            body = {"metadata": {"uid": pod.uid}, "status": status}
            if self._quietly("PATCH", path, body):
                pod.said = status

    def _remove(self, obj: dict[str, Any]) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{obj['metadata']['name']}"
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": obj["metadata"]["uid"]}}
        self._quietly("DELETE", path, options)

    def _quietly(self, method: str, path: str, body: dict[str, Any] | None = None) -> bool:
        """A call about an object that may be gone already; whether it was carried out."""
        try:
            self._plane.call(method, path, body)
        except urllib.error.HTTPError as error:
            if error.code not in (404, 409):
                logger.exception("%s %s: %r", method, path, error.read())
            return False
        return True

    # ---- what a process sees

    def _mounts(self, pod: Pod, container: Container) -> dict[str, Path]:
        """The directory of each mount path, filled."""
        volumes = {volume["name"]: volume for volume in pod.obj["spec"].get("volumes") or ()}
        paths = {}
        for mount in container.spec.get("volumeMounts") or ():
            paths[mount["mountPath"].rstrip("/")] = self._volume(pod, volumes[mount["name"]])
        return paths

    def _volume(self, pod: Pod, volume: dict[str, Any]) -> Path:
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            folder = self.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
        else:
            folder = pod.folder / "volumes" / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        content: dict[str, bytes] = {}
        source = volume.get("secret") or volume.get("configMap") or {}
        if "secret" in volume or "configMap" in volume:
            plural = "secrets" if "secret" in volume else "configmaps"
            name = source.get("secretName") or source.get("name")
            try:
                content = self._content(plural, name)
            except urllib.error.HTTPError as error:
                if error.code != http.client.NOT_FOUND or not source.get("optional"):
                    raise
        chosen = {item["key"]: item["path"] for item in source.get("items") or ()}
        for name, data in content.items():
            if not chosen or name in chosen:
                (folder / chosen.get(name, name)).write_bytes(data)
        return folder

    def _content(self, plural: str, name: str) -> dict[str, bytes]:
        path = f"/api/v1/namespaces/{self.namespace}/{plural}/{name}"
        data = self._plane.call("GET", path).get("data") or {}
        decode = base64.b64decode if plural == "secrets" else str.encode
        return {key: decode(value) for key, value in data.items()}

    def _account(self, pod: Pod, paths: dict[str, Path]) -> dict[str, str]:
        if ACCOUNT not in paths:
            return {}
        token = (paths[ACCOUNT] / "token").read_text()
        kubeconfig = self._plane.write_kubeconfig(pod.folder / "kubeconfig", token=token)
        return {"KUBECONFIG": str(kubeconfig)}

    def _environment(self, pod: Pod, container: Container) -> dict[str, str]:
        env: dict[str, str] = {}
        for source in container.spec.get("envFrom") or ():
            for key, plural in (("secretRef", "secrets"), ("configMapRef", "configmaps")):
                if key in source:
                    found = self._content(plural, source[key]["name"])
                    env |= {name: value.decode() for name, value in found.items()}
        for variable in container.spec.get("env") or ():
            if "valueFrom" in variable:
                env[variable["name"]] = self._value(pod, variable["valueFrom"])
            else:
                env[variable["name"]] = _expand(variable.get("value", ""), env)
        return env

    def _value(self, pod: Pod, source: dict[str, Any]) -> str:
        for key, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
            if key in source:
                return self._content(plural, source[key]["name"])[source[key]["key"]].decode()
        path = source["fieldRef"]["fieldPath"]
        if path in ("status.podIP", "status.hostIP"):
            return pod.address if path == "status.podIP" else "127.0.0.1"
        keyed = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
        if keyed:
            return str(pod.obj["metadata"].get(keyed[1], {}).get(keyed[2], ""))
        value: Any = pod.obj
        for part in path.split("."):
            value = value.get(part, "")
        return str(value)

    def _localize(self, text: str, paths: dict[str, Path]) -> str:
        if paths:
            mounted = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
            pattern = rf"(?<![\w/.-])({mounted})(?![\w.-])"
            text = re.sub(pattern, lambda found: str(paths[found[1]]), text)
        return self._services.resolve(text, self.namespace)


def _expand(text: str, env: dict[str, str]) -> str:
    """``$(NAME)`` as the kubelet expands it."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), text)
