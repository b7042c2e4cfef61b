"""The Helm chart and the other files of an installation: of this release, and with the rights of the code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import dlrover
from dlrover.kubernetes.machine import objects
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import DEPLOY, Cluster, kustomize
from tests.kubernetes.kubelet import Kubelet
from tests.services import program

CHART = DEPLOY / "chart"


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [os.environ.get("HELM") or program("helm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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
    role, edit, view = found["ClusterRole"]
    assert role["rules"] == objects.operator_rules()
    for kind, given in (("edit", edit), ("view", view)):
        (own,) = (
            one for one in kustomize("crds/cel") if one["metadata"]["name"] == f"dlrover-{kind}"
        )
        assert given["rules"] == own["rules"] == objects.aggregated_rules()[kind]
        assert own["metadata"]["labels"].items() <= given["metadata"]["labels"].items()
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


WRONG = {
    "replicas=two": "at '/replicas': got string, want integer",
    "replicas=-1": "at '/replicas': minimum: got -1, want 0",
    "namespaced=yes": "at '/namespaced': got string, want boolean",
    "image.pullPolicy=Sometimes": "at '/image/pullPolicy': value must be one of 'Always',",
    "image.repository=": "at '/image/repository': '' does not match pattern",
    "image.repository=registry.example.com/dlrover:1": "at '/image/repository': ",
    "image.tag=latest": "at '/image/tag': 'not' failed",
    "image.version=1": "at '/image': additional properties 'version' not allowed",
    "masterImage=registry.example.com/dlrover": "at '/masterImage': ",
    "imagePullSecrets[0]=mine": "at '/imagePullSecrets/0': got string, want object",
    "imagePullSecrets[0].named=mine": "at '/imagePullSecrets/0': missing property 'name'",
    "resources.request.cpu=1": "at '/resources': additional properties 'request' not allowed",
    "resources.limits.memory=1GB": "at '/resources/limits/memory': '1GB' does not match",
    "nodeSelector.zone=3": "at '/nodeSelector/zone': got number, want string",
    "tolerations[0].effect=Never": "at '/tolerations/0/effect': value must be one of",
}


@pytest.mark.slow
@pytest.mark.parametrize("value", WRONG)
def test_a_wrong_value_gets_a_sentence_that_names_it(value: str) -> None:
    done = helm("template", "release", str(CHART), "--set", value)
    assert done.returncode != 0
    assert WRONG[value] in done.stderr


@pytest.mark.slow
def test_values_reach_the_operator_as_they_are() -> None:
    found = rendered(
        *("--set", "image.repository=registry.example.com:5000/team/dlrover"),
        *("--set", "image.pullPolicy=Always", "--set", "replicas=3"),
        *("--set", "imagePullSecrets[0].name=mine", "--set", "nodeSelector.zone=b"),
        *("--set", "tolerations[0].key=gpu", "--set", "tolerations[0].operator=Exists"),
        *("--set", "resources.limits.memory=2Gi", "--set", "resources.requests.cpu=500m"),
    )
    (deployment,) = found["Deployment"]
    assert deployment["spec"]["replicas"] == 3
    pod = deployment["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "mine"}]
    assert pod["nodeSelector"] == {"zone": "b"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    (container,) = pod["containers"]
    assert container["image"] == f"registry.example.com:5000/team/dlrover:{dlrover.__version__}"
    assert container["imagePullPolicy"] == "Always"
    assert container["resources"]["limits"] == {"memory": "2Gi"}
    assert container["resources"]["requests"] == {"cpu": "500m", "memory": "128Mi"}


@pytest.mark.slow
def test_the_chart_and_kustomize_secure_the_operator_alike() -> None:
    (chart,) = rendered()["Deployment"]
    (plain,) = (made for made in kustomize("cluster") if made["kind"] == "Deployment")
    pods = [made["spec"]["template"]["spec"] for made in (chart, plain)]
    assert pods[0]["securityContext"] == pods[1]["securityContext"]
    contexts = [pod["containers"][0]["securityContext"] for pod in pods]
    assert contexts[0] == contexts[1]
    assert contexts[0]["capabilities"] == {"drop": ["ALL"]}
    assert pods[0]["containers"][0]["resources"] == pods[1]["containers"][0]["resources"]


@pytest.mark.slow
def test_the_chart_keeps_an_operator_there_and_others_out() -> None:
    found = rendered()
    (deployment,) = found["Deployment"]
    pods = deployment["spec"]["selector"]["matchLabels"]
    (budget,) = found["PodDisruptionBudget"]
    assert budget["apiVersion"] == "policy/v1"
    assert budget["spec"] == {"maxUnavailable": 1, "selector": {"matchLabels": pods}}
    (policy,) = found["NetworkPolicy"]
    assert policy["spec"] == {
        "podSelector": {"matchLabels": pods},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": 8080}]}],
    }
    (spread,) = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == pods
    old = rendered("--kube-version", "1.20.2", "--set", "replicas=3")
    assert old["PodDisruptionBudget"][0]["apiVersion"] == "policy/v1beta1"
    spare = rendered(
        *("--set", "podDisruptionBudget=false,networkPolicy=false,aggregatedRoles=false"),
        *(
            "--set",
            "affinity.podAntiAffinity.any=1",
            "--set",
            "topologySpreadConstraints[0].maxSkew=2",
        ),
        *("--set", "topologySpreadConstraints[0].topologyKey=zone"),
        *("--set", "topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule"),
    )
    assert not spare.keys() & {"PodDisruptionBudget", "NetworkPolicy"}
    assert len(spare["ClusterRole"]) == 1
    pod = spare["Deployment"][0]["spec"]["template"]["spec"]
    assert pod["affinity"] == {"podAntiAffinity": {"any": 1}}
    assert [one["maxSkew"] for one in pod["topologySpreadConstraints"]] == [2]
    assert "PodDisruptionBudget" not in rendered("--set", "replicas=1")


@pytest.mark.slow
def test_the_chart_and_the_folder_have_the_same_alerts_about_the_operator() -> None:
    assert not rendered().keys() & {"PodMonitor", "PrometheusRule"}
    found = rendered(
        *("--set", "monitoring.podMonitor=true,monitoring.alerts=true"),
        *("--set", "monitoring.labels.release=prometheus"),
    )
    alerts = yaml.safe_load((DEPLOY / "monitoring/operator-alerts.yaml").read_text())
    (rule,) = found["PrometheusRule"]
    (plain,) = (
        one
        for one in yaml.safe_load_all((DEPLOY / "monitoring/operator.yaml").read_text())
        if one["kind"] == "PrometheusRule"
    )
    assert rule["spec"] == plain["spec"] == alerts
    (monitor,) = found["PodMonitor"]
    (deployment,) = found["Deployment"]
    pods = deployment["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pods.items()
    for one in (rule, monitor):
        assert one["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.slow
def test_the_longest_name_of_a_release_gives_names_that_kubernetes_takes() -> None:
    done = helm("template", "r" * 53, str(CHART), "--namespace", "here")
    made = [one for one in yaml.safe_load_all(done.stdout) if one]
    names = [o["metadata"]["name"] for o in made if o["kind"] in ("Deployment", "ServiceAccount")]
    assert len(names) == 2
    assert all(len(name) <= 63 for name in names)


@pytest.mark.slow
def test_the_chart_refuses_a_cluster_that_is_too_old() -> None:
    done = helm("template", "release", str(CHART), "--kube-version", "1.19.0")
    assert done.returncode != 0
    assert "chart requires kubeVersion: >=1.20.0-0" in done.stderr


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


def test_the_documented_command_installs_on_a_cluster_before_cel(
    control_plane: ControlPlane,
) -> None:
    """With the machine's kubectl, as a user's; helm sends definitions as server-side apply does."""
    command = ["kubectl", f"--kubeconfig={control_plane.kubeconfig}"]
    done = subprocess.run(
        [*command, "apply", "-k", DEPLOY], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "deployment.apps/dlrover-operator created" in done.stdout
    path = "/apis/rbac.authorization.k8s.io/v1/clusterroles/edit"

    def editors_may() -> bool:
        rules = control_plane.call("GET", path)["rules"]
        return any("elasticjobs" in rule.get("resources", ()) for rule in rules)

    late = time.monotonic() + 30.0
    while not editors_may():
        assert time.monotonic() < late, "the controller of roles aggregates them"
        time.sleep(0.1)
    control_plane.kubectl("delete", "namespace", "dlrover-system", "--wait=false")
    helms = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f"]
    control_plane.kubectl(*helms, str(CHART / "crds"))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        control_plane.kubectl(
            *helms, str(DEPLOY / "crds/cel/elasticjobs.elastic.iml.github.io.yaml")
        )
    assert "x-kubernetes-validations" in caught.value.stderr


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
