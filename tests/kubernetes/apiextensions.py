"""The API server for custom resources alone (``apiextensions-apiserver``) of a current Kubernetes.

The control plane of the tests is one from before CEL. This server has it: it keeps its objects in that control
plane's etcd, below a prefix of its own, and asks it who may do what.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
from pathlib import Path
from typing import Any

import yaml

from dlrover.kubernetes.resources import crd, names
from tests.kubernetes.controlplane import Connections, ControlPlane
from tests.services import free_port

VARIABLE = "DLROVER_APIEXTENSIONS_SERVER"
PROGRAM = os.environ.get(VARIABLE, "")
START_TIMEOUT = 30.0
"""Seconds."""
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_ADMISSION = (
    "NamespaceLifecycle,MutatingAdmissionWebhook,ValidatingAdmissionWebhook,"
    "MutatingAdmissionPolicy,ValidatingAdmissionPolicy"
)
"""Plugins that look at resources which the old control plane does not have."""

Answer = tuple[int, dict[str, Any]]


class ApiExtensions:
    """Ends with the process that started it."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self._port = free_port()
        self._connections = Connections(self._port)
        self._log = folder / "apiextensions-apiserver.log"
        kubeconfig = plane.kubeconfig
        command = [
            PROGRAM,
            f"--etcd-servers={plane.etcd}",
            "--etcd-prefix=/current",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={folder}",
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--authentication-skip-lookup",
            "--enable-priority-and-fairness=false",
            f"--disable-admission-plugins={_ADMISSION}",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connections.close()

    def define(self) -> None:
        """Install the definitions, and wait until their resources are served."""
        self._until(lambda: self.call("GET", "/readyz")[0] == 200)
        for definition in (crd.elastic_jobs(), crd.scale_plans()):
            code, said = self.call("POST", f"{_DEFINITIONS}?fieldValidation=Strict", definition)
            assert code == 201, said
        for plural in ("elasticjobs", "scaleplans"):
            self._until(lambda plural=plural: self.call("GET", path(plural))[0] == 200)

    def create(self, manifest: dict[str, Any], **options: str) -> Answer:
        """Create a job or a plan; ``options``: of the query, as ``dryRun="All"``."""
        plural = f"{manifest['kind'].lower()}s"
        query = "&".join(f"{key}={value}" for key, value in options.items())
        return self.call("POST", f"{path(plural)}?{query}", manifest)

    def call(self, method: str, where: str, body: dict[str, Any] | None = None) -> Answer:
        """The status and the object of an answer."""
        try:
            content = self._connections.call(method, where, body)
        except urllib.error.HTTPError as error:
            return error.code, _object(error.read())
        return (201 if method == "POST" else 200), _object(content)

    def _until(self, condition: Any) -> None:
        late = time.monotonic() + START_TIMEOUT
        while True:
            assert self._process.poll() is None, self._log.read_text()[-4000:]
            try:
                if condition():
                    return
            except OSError:  # it does not listen yet
                pass
            assert time.monotonic() < late, self._log.read_text()[-4000:]
            time.sleep(0.1)


def path(plural: str, name: str = "") -> str:
    """Where objects are."""
    return f"/apis/{names.API_VERSION}/namespaces/default/{plural}/{name}".rstrip("/")


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {"message": content.decode(errors="replace")}
    assert isinstance(found, dict)
    return found


def documents(page: Path) -> list[dict[str, Any]]:
    """The jobs and plans in the YAML of a page or of a file of manifests."""
    text = page.read_text()
    blocks = [text]
    if page.suffix == ".md":
        blocks = [part.partition("```")[0] for part in text.split("```yaml\n")[1:]]
    found = [one for block in blocks for one in yaml.safe_load_all(block)]
    kinds = ("ElasticJob", "ScalePlan")
    return [one for one in found if isinstance(one, dict) and one.get("kind") in kinds]
