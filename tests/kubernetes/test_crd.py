"""The definitions: their files are up to date, and a real API server takes them and what they describe."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import dlrover
from dlrover.kubernetes.machine import objects
from dlrover.kubernetes.resources import crd, names, schema
from dlrover.kubernetes.resources.types import ElasticJobSpec
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import DEPLOY, define, kustomize
from tests.kubernetes.manifests import EARLY_SEED, ORIGINAL, SEED, job


def test_the_written_files_are_those_that_the_types_make() -> None:
    for name, content in crd.files().items():
        assert (DEPLOY / name).read_text() == content, (
            "run python -m dlrover.kubernetes.resources.crd"
        )


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for key, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{key}")
    for key in ("additionalProperties", "items"):
        if isinstance(node.get(key), dict):
            yield from nodes(node[key], f"{path}.*")


@pytest.mark.parametrize("content", [schema.elastic_job(), schema.scale_plan()])
def test_a_schema_is_structural(content: dict[str, Any]) -> None:
    for path, node in nodes(content):
        assert not node.keys() & {"$ref", "anyOf", "$defs", "title"}, path
        assert "type" in node or "x-kubernetes-int-or-string" in node, path


def test_only_what_pods_are_made_of_is_kept_as_it_is() -> None:
    kept = [
        path
        for path, node in nodes(schema.elastic_job())
        if node.get("x-kubernetes-preserve-unknown-fields")
    ]
    template = ".spec.replicaSpecs.*.template"
    assert [path for path in kept if not path.startswith(f"{template}.")] == [
        template,
        ".spec.roles.*",
        ".spec.envs.*.valueFrom",
    ]


def test_every_field_of_a_spec_says_what_it_is() -> None:
    for path, node in nodes(schema.elastic_job()):
        others = "x-kubernetes-int-or-string" in node or ".template." in path
        if path.startswith((".spec.", ".status.conditions")) and not others:
            assert node.get("description", "").endswith("."), path


def test_a_default_in_the_schema_is_the_one_in_the_types() -> None:
    spec = schema.elastic_job()["properties"]["spec"]["properties"]
    for field in ("distributionStrategy", "cleanPodPolicy", "suspend", "optimizeMode"):
        attribute = dict(
            zip(
                ElasticJobSpec.__struct_encode_fields__,
                ElasticJobSpec.__struct_fields__,
                strict=True,
            )
        )[field]
        made = ElasticJobSpec(replica_specs={})
        assert spec[field]["default"] == getattr(made, attribute)


def test_rules_name_the_field_and_are_given_to_servers_that_know_cel() -> None:
    rules = [
        rule
        for _, node in nodes(schema.elastic_job())
        for rule in node.get("x-kubernetes-validations", ())
    ]
    assert len(rules) == 15
    for rule in rules:
        assert rule["message"].partition(":")[0].rpartition(".")[2] in (
            "name", "replicaSpecs", "minReplicas", "containers", "envs", "spares"
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("folder", [".", "namespaced"])
def test_kustomize_makes_an_operator_of_this_release_without_rights_beyond_its_own(
    folder: str,
) -> None:
    made = kustomize(folder)
    (deployment,) = [one for one in made if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert container["image"] == env["MASTER_IMAGE"] == f"dlrover:{dlrover.__version__}"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    kind = "ClusterRole" if folder == "." else "Role"
    (rights,) = [
        one for one in made if one["kind"] == kind and one["metadata"]["name"] == "dlrover-operator"
    ]
    assert rights["rules"] == objects.operator_rules()
    crds = [one for one in made if one["kind"] == "CustomResourceDefinition"]
    assert len(crds) == (2 if folder == "." else 0)
    assert ("ClusterRoleBinding" in {one["kind"] for one in made}) == (folder == ".")
    assert any("--namespace" in argument for argument in container["args"]) == (folder != ".")


def test_the_operator_has_every_right_that_it_gives() -> None:
    given = {
        (group, resource, verb)
        for rule in objects.role_rules("any")
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    own = {
        (group, resource, verb)
        for rule in objects.operator_rules()
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert given <= own


# ---- with a real API server


@pytest.fixture
def defined(control_plane: ControlPlane) -> ControlPlane:
    """A control plane that knows ElasticJobs."""
    define(control_plane)
    return control_plane


def rejected(plane: ControlPlane, namespace: str, manifest: dict[str, Any]) -> str:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        plane.kubectl(
            "create", "--validate=false", "-f", "-", namespace=namespace, text=json.dumps(manifest)
        )
    return str(caught.value.stderr)


@pytest.mark.parametrize("text", [SEED, EARLY_SEED, ORIGINAL], ids=["seed", "early", "original"])
def test_manifests_of_the_original_apply_unchanged(
    defined: ControlPlane, namespace: str, text: str
) -> None:
    manifest = yaml.safe_load(text)
    manifest["metadata"].pop("namespace", None)
    defined.kubectl("apply", "-f", "-", namespace=namespace, text=yaml.safe_dump(manifest))
    kept = json.loads(defined.kubectl("get", "ej", "-o", "json", namespace=namespace))["items"][0]
    for role, replica in manifest["spec"]["replicaSpecs"].items():
        assert kept["spec"]["replicaSpecs"][role]["template"] == replica["template"]
        assert kept["spec"]["replicaSpecs"][role]["restartCount"] == 3, "the default"


def test_the_server_rejects_with_the_field_what_the_schema_forbids(
    defined: ControlPlane, namespace: str
) -> None:
    manifest = job(suspend="yes", cleanPodPolicy="Some", ttlSecondsAfterFinished=-1)
    manifest["metadata"] = {"name": "digits"}
    manifest["spec"]["replicaSpecs"]["worker"]["replicas"] = -1
    message = rejected(defined, namespace, manifest)
    for field in ("suspend", "cleanPodPolicy", "ttlSecondsAfterFinished", "worker.replicas"):
        assert f"spec.{'replicaSpecs.' if '.' in field else ''}{field}" in message


def test_a_job_scales_by_kubectl_and_shows_its_state(defined: ControlPlane, namespace: str) -> None:
    manifest = job()
    manifest["metadata"] = {"name": "digits"}
    defined.kubectl("create", "-f", "-", namespace=namespace, text=json.dumps(manifest))
    defined.kubectl("scale", "--replicas=5", "ej/digits", namespace=namespace)
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/elasticjobs/digits"
    training = {"steps": 120, "restarts": 1, "goodput": "97.5%", "eta": "3h12m"}
    defined.call(
        "PATCH",
        f"{path}/status",
        {"status": {"phase": "Running", "workers": "4/5", "training": training}},
    )
    heads, cells = defined.kubectl("get", "ej", namespace=namespace).splitlines()
    shown = ["NAME", "STATE", "WORKERS", "RESTARTS", "STEPS", "ETA", "GOODPUT", "AGE"]
    assert heads.split() == shown
    assert cells.split()[:7] == ["digits", "Running", "4/5", "1", "120", "3h12m", "97.5%"]
    kept = defined.call("GET", path)
    assert kept["spec"]["replicaSpecs"]["worker"]["replicas"] == 5
    assert kept["metadata"]["generation"] == 2, "a status is no new generation"
