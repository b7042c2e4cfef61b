"""TLS between a job's nodes and its master, with certificates that the operator makes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from dlrover.errors import InfrastructureError, ProtocolError
from dlrover.kubernetes.machine import nodes, objects, tls
from dlrover.kubernetes.operator import certificates
from dlrover.kubernetes.resources import names, validation
from dlrover.rpc.client import MasterClient
from dlrover.rpc.server import Server
from dlrover.spec.jobdir import TlsFiles
from dlrover.spec.node import LaunchNode
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.manifests import job
from tests.kubernetes.world import World

MASTER = names.master_name("digits")


def verify(authority: str, certificate: str, host: str) -> None:
    store = Store([x509.load_pem_x509_certificate(authority.encode())])
    verifier = PolicyBuilder().store(store).build_server_verifier(x509.DNSName(host))
    verifier.verify(x509.load_pem_x509_certificate(certificate.encode()), [])


def test_a_certificate_holds_for_its_names_and_under_its_own_authority_only() -> None:
    hosts = tls.hosts(validation.parse(job()))
    one, other = certificates.make(hosts), certificates.make(hosts)
    for host in (MASTER, f"{MASTER}.default.svc", "localhost"):
        verify(one[tls.AUTHORITY], one[tls.CERTIFICATE], host)
    with pytest.raises(VerificationError):
        verify(one[tls.AUTHORITY], one[tls.CERTIFICATE], "elsewhere")
    with pytest.raises(VerificationError):
        verify(other[tls.AUTHORITY], one[tls.CERTIFICATE], MASTER)


@pytest.mark.slow
def test_a_server_with_it_serves_who_expects_its_name_at_whatever_address(tmp_path: Path) -> None:
    for name, content in certificates.make([MASTER]).items():
        (tmp_path / name).write_text(content)
    files = {"cert": tls.CERTIFICATE, "key": tls.KEY, "ca": tls.AUTHORITY}
    paths = {field: str(tmp_path / name) for field, name in files.items()}

    async def ask(port: int, name: str) -> None:
        given = TlsFiles(ca=paths["ca"], server_name=name)
        async with MasterClient(f"127.0.0.1:{port}", "token", given, timeout=2.0) as client:
            await client.status()

    async def story() -> None:
        server = Server("token", TlsFiles(paths["cert"], paths["key"]))
        port = await server.start("127.0.0.1", 0)
        try:
            with pytest.raises(ProtocolError):  # it hears the call, which it does not know
                await ask(port, MASTER)
            with pytest.raises(InfrastructureError, match="cannot be reached"):
                await ask(port, "")
        finally:
            await server.stop(0.0)

    asyncio.run(story())


def test_without_tls_no_pod_has_anything_of_it() -> None:
    world = World()
    world.settle()
    assert "dlrover-tls" not in str(world.objects)
    launched = nodes.pod(validation.parse(job()), LaunchNode(0, 0), "m:1")
    assert "TLS" not in str(launched)


def test_only_the_master_gets_the_key() -> None:
    parsed = validation.parse(job(master={"tls": True}))
    master = objects.master_pod(parsed, "i")
    node = nodes.pod(parsed, LaunchNode(0, 0), "m:1")

    def keys(pod: dict[str, Any]) -> set[str]:
        (volume,) = [v for v in pod["spec"]["volumes"] if v["name"] == "dlrover-tls"]
        assert volume["secret"]["secretName"] == tls.secret_name(parsed)
        return {item["key"] for item in volume["secret"]["items"]}

    assert keys(master) == {"ca.crt", "tls.crt", "tls.key"}
    assert keys(node) == {"ca.crt"}


def test_a_master_that_comes_back_keeps_the_certificate() -> None:
    world = World(job(master={"tls": True}))
    world.settle()
    (name,) = [name for kind, name in world.objects if kind == "Secret" and name.endswith("-tls")]
    world.objects["Secret", name]["stringData"] = {"tls.crt": "first"}
    assert world.master is not None
    world.end(world.master, 137)
    world.now += 100.0
    world.settle()
    assert world.decision.delete == ()
    assert world.objects["Secret", name]["stringData"] == {"tls.crt": "first"}


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_job_trains_by_tls_and_its_master_comes_back(
    control_plane: ControlPlane,
    namespace: str,
    tmp_path: Path,
    kubelet: Callable[..., Kubelet],
) -> None:
    cluster = Cluster(control_plane, namespace, tmp_path)
    kubelet()
    program, out = tmp_path / "train.py", tmp_path / "out"
    out.mkdir()
    program.write_text(
        "import os, pathlib, time\n"
        f"out = pathlib.Path({str(out)!r})\n"
        "(out / os.environ['RANK']).touch()\n"
        "while not (out / 'go').exists():\n"
        "    time.sleep(0.1)\n"
    )

    async def scenario() -> None:
        async with cluster.operator():
            manifest = job(master={"tls": True})
            manifest["metadata"] = {"name": "digits"}
            worker = manifest["spec"]["replicaSpecs"]["worker"]
            (main,) = worker["template"]["spec"]["containers"]
            main["command"] = ["dlrover-run", "--nnodes=2", str(program)]
            cluster.create(manifest)
            await cluster.until(lambda: (out / "1").exists() and (out / "0").exists(), 90.0)
            uid = cluster.get("elasticjobs", "digits")["metadata"]["uid"]
            secret = cluster.get("secrets", f"{names.own_name('digits', uid)}-tls")
            authority = base64.b64decode(secret["data"]["ca.crt"]).decode()
            verify(authority, base64.b64decode(secret["data"]["tls.crt"]).decode(), MASTER)
            address = cluster.get("pods", MASTER)["status"]["podIP"]
            plain = MasterClient(f"{address}:{names.MASTER_PORT}", "token", timeout=2.0)
            with pytest.raises(InfrastructureError):
                await plain.status()
            await plain.close()
            cluster.plane.kubectl("delete", "pod", MASTER, namespace=namespace)
            await cluster.until(lambda: cluster.told.get("MasterReady") == 2, 60.0)
            (out / "go").touch()
            await cluster.until(lambda: cluster.status["phase"] == "Succeeded", 60.0)

    asyncio.run(scenario())
