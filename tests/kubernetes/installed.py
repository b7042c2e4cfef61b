"""An operator as it is installed: with its definitions, an account of its own, and no right but its own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover.kubernetes.api.client import Client
from dlrover.kubernetes.operator.leader import Leader
from dlrover.kubernetes.operator.operator import Operator
from dlrover.kubernetes.resources import names
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.manifests import job

DEPLOY = Path(__file__).parents[2] / "deploy"
ACCOUNT = "dlrover-operator"


def kustomize(folder: str) -> list[dict[str, Any]]:
    """What a folder of ``deploy`` makes, by the machine's own kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl on this machine")
    done = subprocess.run(
        ["kubectl", "kustomize", DEPLOY / folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def define(plane: ControlPlane) -> None:
    """Make a control plane know ElasticJobs, once. It is one from before CEL."""
    if plane.knows_jobs:
        return
    plane.kubectl("apply", "-k", str(DEPLOY / "crds"))
    definition = f"crd/elasticjobs.{names.GROUP}"
    plane.kubectl("wait", "--for=condition=Established", definition, "--timeout=20s")
    plane.knows_jobs = True


class Cluster:
    """A namespace in which an operator may work."""

    def __init__(self, plane: ControlPlane, namespace: str, folder: Path) -> None:
        self.plane, self.namespace = plane, namespace
        define(plane)
        self.token = self._install()
        self.kubeconfig = str(plane.write_kubeconfig(folder / "operator", token=self.token))

    def _install(self) -> str:
        """Give the operator its account and rights; its token."""
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}}
        self.plane.make(account, self.namespace)
        for file in ("namespaced/rights.yaml", "operator/lease.yaml"):
            text = (DEPLOY / file).read_text().replace("dlrover-system", self.namespace)
            for manifest in yaml.safe_load_all(text):
                self.plane.make(manifest, self.namespace)
        late = time.monotonic() + 20.0
        while not (account := self.get("serviceaccounts", ACCOUNT)).get("secrets"):
            assert time.monotonic() < late
            time.sleep(0.05)
        secret = self.get("secrets", account["secrets"][0]["name"])
        return base64.b64decode(secret["data"]["token"]).decode()

    # ---- what there is

    def path(self, plural: str, name: str = "") -> str:
        base = f"/apis/{names.API_VERSION}" if plural == "elasticjobs" else "/api/v1"
        return f"{base}/namespaces/{self.namespace}/{plural}/{name}".rstrip("/")

    def get(self, plural: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.plane.call("GET", self.path(plural, name))
        return found

    def list(self, plural: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.plane.call("GET", self.path(plural))["items"]
        return found

    def submit(self, command: list[str], grace: int = 1, **spec: Any) -> str:
        """Create a job whose master runs ``command``; the name of the master's pod."""
        manifest = job(**spec)
        manifest["metadata"] = {"name": "digits"}
        container = {"name": "main", "command": command}
        template = {"spec": {"containers": [container], "terminationGracePeriodSeconds": grace}}
        manifest["spec"]["replicaSpecs"]["dlrover-master"] = {"template": template}
        self.create(manifest)
        return names.master_name("digits")

    def create(self, manifest: dict[str, Any]) -> None:
        self.plane.make(manifest, self.namespace)

    def change(self, **spec: Any) -> None:
        self.plane.call("PATCH", self.path("elasticjobs", "digits"), {"spec": spec})

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("elasticjobs", "digits").get("status", {})
        return status

    @property
    def told(self) -> dict[str, int]:
        """The reasons of the operator's Events, and how often each was told."""
        counted: dict[str, int] = {}
        for event in self.list("events"):
            if event["source"].get("component") == ACCOUNT:
                counted[event["reason"]] = counted.get(event["reason"], 0) + event["count"]
        return counted

    def master_ready(self, starts: int) -> bool:
        """Whether the master's pod number ``starts`` is ready. Events may be counted twice, if a server's answer is lost."""
        status = self.status
        conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
        return conditions.get("MasterReady") == "True" and status["master"]["starts"] == starts

    async def until(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        late = time.monotonic() + timeout
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < late, yaml.safe_dump([self.status, self.told])
            await asyncio.sleep(0.1)

    async def phase(self, wanted: str) -> None:
        await self.until(lambda: self.status.get("phase") == wanted)

    # ---- the operator

    @contextlib.asynccontextmanager
    async def operator(self, leader: bool = False) -> AsyncIterator[asyncio.Task[None]]:
        """A running operator; it has to be running, or cancelled, when the block ends."""
        client = Client.from_config(self.kubeconfig)
        elected = Leader(client, self.namespace, "lease", f"{id(client)}") if leader else None
        serving = Operator(client, self.namespace, "dlrover:1", elected)
        task = asyncio.create_task(serving.run())
        try:
            yield task
        finally:
            if task.done() and not task.cancelled():
                await task  # it ended by itself: the error says why
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await client.close()
