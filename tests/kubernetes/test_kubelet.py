"""The test's kubelet does to processes what a kubelet does to containers; other tests rest on it."""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.kubelet import Kubelet

StartKubelet = Callable[..., Kubelet]


class Pods:
    """Makes pods in a namespace and waits for what becomes of them."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane = plane
        self.namespace = namespace
        self.path = f"/api/v1/namespaces/{namespace}"

    def make(self, name: str, script: str, container: Any = (), **spec: Any) -> None:
        main = {"name": "main", "image": "any", "command": ["sh", "-c", script]} | dict(container)
        pod = {
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {"containers": [main], "restartPolicy": "Never"} | spec,
        }
        self.plane.call("POST", f"{self.path}/pods", pod)

    def get(self, name: str) -> dict[str, Any]:
        pod: dict[str, Any] = self.plane.call("GET", f"{self.path}/pods/{name}")
        return pod

    def names(self) -> set[str]:
        items = self.plane.call("GET", f"{self.path}/pods")["items"]
        return {item["metadata"]["name"] for item in items}

    def wait(self, condition: Callable[[], Any], timeout: float = 30.0) -> None:
        late = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < late
            time.sleep(0.05)

    def phase(self, name: str, wanted: str) -> dict[str, Any]:
        self.wait(lambda: self.get(name)["status"]["phase"] == wanted)
        return self.get(name)


@pytest.fixture
def pods(control_plane: ControlPlane, namespace: str) -> Pods:
    return Pods(control_plane, namespace)


def test_exit_codes_are_told(pods: Pods, kubelet: StartKubelet) -> None:
    kubelet()
    pods.make("good", "true")
    pods.make("bad", "exit 7")
    pods.phase("good", "Succeeded")
    status = pods.phase("bad", "Failed")["status"]["containerStatuses"][0]
    assert status["state"]["terminated"]["exitCode"] == 7


def test_restart_policies(pods: Pods, kubelet: StartKubelet) -> None:
    kubelet()
    pods.make("once-more", "test -e again || { touch again; exit 1; }", restartPolicy="OnFailure")
    pods.make("always", "sleep 0.3", restartPolicy="Always")
    status = pods.phase("once-more", "Succeeded")["status"]["containerStatuses"][0]
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 1
    pods.wait(lambda: pods.get("always")["status"]["containerStatuses"][0]["restartCount"] >= 2)
    assert pods.get("always")["status"]["phase"] == "Running"


def test_a_deleted_pod_gets_its_time_and_no_more(pods: Pods, kubelet: StartKubelet) -> None:
    here = kubelet()
    polite = "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    deaf = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    pods.make("polite", polite, terminationGracePeriodSeconds=20)
    pods.make("deaf", deaf, terminationGracePeriodSeconds=2)
    for name in ("polite", "deaf"):
        pods.phase(name, "Running")
        pods.wait(lambda name=name: "ready" in here.log(name))  # its shell has set its trap
    began = time.monotonic()
    for name in ("polite", "deaf"):
        pods.plane.call("DELETE", f"{pods.path}/pods/{name}")
    pods.wait(lambda: "polite" not in pods.names())
    assert "bye" in here.log("polite")
    pods.wait(lambda: pods.names() == set())
    assert time.monotonic() - began >= 2.0


def test_a_container_sees_variables_volumes_and_services(pods: Pods, kubelet: StartKubelet) -> None:
    here = kubelet()
    secret = {"metadata": {"name": "s"}, "data": {"token": base64.b64encode(b"secret").decode()}}
    pods.plane.call("POST", f"{pods.path}/secrets", secret)
    spec = {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]}
    pods.plane.call("POST", f"{pods.path}/services", {"metadata": {"name": "web"}, "spec": spec})
    pods.make("server", "exec python -m http.server 8000 --bind $IP", {"env": [
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]})  # fmt: skip
    pods.phase("server", "Running")
    reference = {"secretKeyRef": {"name": "s", "key": "token"}}
    label = {"fieldRef": {"fieldPath": "metadata.labels['app']"}}
    container = {
        "env": [
            {"name": "FROM_SECRET", "valueFrom": reference},
            {"name": "LABEL", "valueFrom": label},
            {"name": "BOTH", "value": "$(FROM_SECRET)/$(LABEL)"},
            {"name": "URL", "value": f"http://web.{pods.namespace}.svc:80/"},
        ],
        "volumeMounts": [{"name": "v", "mountPath": "/etc/keys"}],
    }
    fetch = "import os, urllib.request as r; print(r.urlopen(os.environ['URL']).status)"
    script = f'echo $BOTH; cat /etc/keys/token; echo; python -c "{fetch}"'
    volumes = [{"name": "v", "secret": {"secretName": "s"}}]
    pods.wait(lambda: here.log("server") == "")
    time.sleep(1.0)  # the server begins to listen
    pods.make("client", script, container, volumes=volumes)
    pods.wait(lambda: pods.get("client")["status"]["phase"] in ("Succeeded", "Failed"))
    assert here.log("client").split() == ["secret/client", "secret", "200"]


RUN = """
import pathlib, sys, time
from tests.kubernetes import assets
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.test_kubelet import Pods
folder = pathlib.Path(sys.argv[1])
plane = ControlPlane(assets.find(), folder / "plane")
plane.start()
Kubelet(plane, folder / "kubelet", "default", 1, {}).start()
pods = Pods(plane, "default")
pods.make("pod", "exec sleep 1000", {"env": [{"name": "MARK", "value": sys.argv[1]}]})
pods.phase("pod", "Running")
print("ready", flush=True)
time.sleep(1000)
"""


def test_nothing_is_left_of_a_run_that_is_killed(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    root = Path(__file__).parents[2]
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, tmp_path],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    with run, run.stdout:
        try:
            assert run.stdout.readline() == "ready\n"
            assert len(_of(tmp_path)) >= 6, "the script, five programs, the pod's shell"
        finally:
            run.kill()
    late = time.monotonic() + 30
    while left := _of(tmp_path):
        assert time.monotonic() < late, left
        time.sleep(0.05)


def _of(folder: Path) -> list[str]:
    """The processes that work below a directory, by command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = " ".join(process.info["cmdline"] or ())
        if str(folder) in command or str(process.info["cwd"] or "").startswith(str(folder)):
            found.append(command)
    return found
