"""The Helm chart and the other files of an installation: of this release, and with the rights of the code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import dlrover
from dlrover.kubernetes import objects
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import DEPLOY, Cluster, kustomize
from tests.kubernetes.kubelet import Kubelet

CHART = DEPLOY / "chart"


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("HELM") or shutil.which("helm")
    if not program:
        pytest.skip("there is no helm on this machine")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def rendered(*arguments: str) -> dict[str, list[dict[str, Any]]]:
    done = helm("template", "release", str(CHART), "--namespace", "here", *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for document in filter(None, yaml.safe_load_all(done.stdout)):
        found.setdefault(document["kind"], []).append(document)
    return found


def test_all_versions_are_the_packages() -> None:
    version = dlrover.__version__
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version
    assert chart["version"] == version.replace(".dev", "-dev")
    for folder in ("cluster", "namespaced"):
        kustomization = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())
        assert kustomization["images"][0]["newTag"] == version
    assert f"-t dlrover:{version} " in (DEPLOY / "containers/Dockerfile").read_text()


def test_the_image_has_no_root_and_a_fixed_base() -> None:
    lines = (DEPLOY / "containers/Dockerfile").read_text().splitlines()
    assert "USER 65532:65532" in lines
    (base,) = [line for line in lines if line.startswith("ARG PYTHON=")]
    assert base.count(".") == 2, "a full version"
    assert "latest" not in base


@pytest.mark.slow
def test_the_chart_is_sound() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_chart_makes_an_operator_for_the_cluster() -> None:
    found = rendered()
    (role,) = found["ClusterRole"]
    assert role["rules"] == objects.operator_rules()
    assert found["Role"][0]["rules"] == objects.lease_rules()
    (deployment,) = found["Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (account,) = found["ServiceAccount"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    (container,) = pod["containers"]
    image = f"dlrover:{dlrover.__version__}"
    assert container["image"] == image
    http = ["--http-port=8080", "--http-host=$(POD_IP)"]
    assert container["args"] == [f"--master-image={image}", *http]
    assert container["ports"] == [{"name": "http", "containerPort": 8080}]
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.slow
def test_the_chart_makes_an_operator_for_one_namespace() -> None:
    found = rendered(
        "--set", "namespaced=true", "--set", "image.tag=v7", "--set", "masterImage=m:1"
    )
    assert "ClusterRole" not in found
    assert {role["metadata"]["namespace"] for role in found["Role"]} == {"here"}
    (container,) = found["Deployment"][0]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "dlrover:v7"
    assert container["args"][::3] == ["--master-image=m:1", "--namespace=here"]


@pytest.mark.slow
def test_a_value_that_nobody_knows_is_an_error() -> None:
    done = helm("template", "release", str(CHART), "--set", "replica=3")
    assert done.returncode != 0
    assert "additional properties 'replica' not allowed" in done.stderr


# ---- with a real API server


def ready(cluster: Cluster) -> int:
    """Operators whose own probe says that they are ready."""
    count = 0
    for pod in cluster.list("pods"):
        (container,) = pod["spec"]["containers"]
        address = pod.get("status", {}).get("podIP")
        if address and "operator" in pod["metadata"]["name"]:
            port = container["ports"][0]["containerPort"]
            path = container["readinessProbe"]["httpGet"]["path"]
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{address}:{port}{path}") as answer,
            ):
                count += answer.status == 200
    return count


def test_what_kustomize_installs_runs_jobs_with_the_rights_that_it_gets(
    control_plane: ControlPlane,
    namespace: str,
    tmp_path: Path,
    kubelet: Callable[..., Kubelet],
) -> None:
    cluster = Cluster(control_plane, namespace, tmp_path)
    kubelet()
    text = yaml.safe_dump_all(kustomize("namespaced")).replace("dlrover-system", namespace)
    control_plane.kubectl("apply", "-f", "-", namespace=namespace, text=text)
    cluster.submit(["true"])
    asyncio.run(cluster.phase("Succeeded"))
    asyncio.run(cluster.until(lambda: ready(cluster) == 2))
    control_plane.kubectl("delete", "deployment", "dlrover-operator", namespace=namespace)
    asyncio.run(
        cluster.until(
            lambda: not [p for p in cluster.list("pods") if "operator" in p["metadata"]["name"]]
        )
    )


def test_helm_installs_the_chart_and_takes_it_away(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    cluster = Cluster(control_plane, namespace, tmp_path)
    access = ("--kubeconfig", str(control_plane.kubeconfig), "--namespace", namespace)
    done = helm("install", "one", str(CHART), *access, "--set", "namespaced=true", "--skip-crds")
    assert done.returncode == 0, done.stderr
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/one-dlrover-operator"
    assert control_plane.call("GET", path)["spec"]["replicas"] == 2
    done = helm("uninstall", "one", *access)
    assert done.returncode == 0, done.stderr
    asyncio.run(cluster.until(lambda: len(cluster.list("serviceaccounts")) == 2))
