"""The definitions on a current API server, which knows CEL: it says what the operator would say.

Runs where ``DLROVER_APIEXTENSIONS_SERVER`` names an apiextensions-apiserver.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from dlrover.kubernetes.resources import names, schema, validation
from dlrover.kubernetes.resources.types import ElasticJobSpec, ReplicaSpec
from tests.kubernetes.apiextensions import PROGRAM, VARIABLE, ApiExtensions, documents, path
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.manifests import CONTAINER, EARLY_SEED, ORIGINAL, SEED, job
from tests.kubernetes.test_crd import nodes
from tests.kubernetes.test_wrong_manifests import JSON, WORKER, WRONG, changed, places

pytestmark = pytest.mark.skipif(not PROGRAM, reason=f"{VARIABLE} names no apiextensions-apiserver")

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.yaml"), ROOT / "README.md"]
RULES = [
    rule["message"].partition(": ")[2]
    for _, node in nodes(schema.elastic_job())
    for rule in node.get("x-kubernetes-validations", ())
]
UNBOUND = {"upper case": "a lowercase RFC 1123 subdomain"}
"""What the server itself says before any rule of ours is asked."""


@pytest.fixture(scope="module")
def server(
    control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiExtensions]:
    """A server that knows jobs and plans."""
    one = ApiExtensions(control_plane, tmp_path_factory.mktemp("apiextensions"))
    try:
        one.define()
        yield one
    finally:
        one.stop()


@pytest.fixture
def kept(server: ApiExtensions) -> Iterator[dict[str, Any]]:
    """A job as the server keeps it."""
    manifest = job()
    manifest["spec"]["replicaSpecs"]["worker"]["minReplicas"] = 2
    code, made = server.create(manifest, fieldValidation="Strict")
    assert code == 201, made
    yield made
    server.call("DELETE", path("elasticjobs", "digits"))


def fresh(manifest: dict[str, Any]) -> dict[str, Any]:
    """As a user gives it."""
    manifest = copy.deepcopy(manifest)
    if manifest["metadata"].pop("namespace", None):
        manifest["metadata"] = {"namespace": "default", **manifest["metadata"]}
    for field in ("uid", "generation"):
        manifest["metadata"].pop(field, None)
    return manifest


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_manifest_is_rejected_for_the_reason_that_the_operator_gives(
    server: ApiExtensions, case: str
) -> None:
    wrong = changed(*WRONG[case][:2])
    (fault,) = validation.faults(wrong)
    field, accepted = fault.split(" ")[0], fault.partition(": ")[2]
    by_rule = [rule for rule in RULES if accepted.startswith(rule)]
    code, answer = server.create(fresh(wrong), dryRun="All")
    assert code == 422, answer
    assert UNBOUND.get(case, (by_rule or [field])[0]) in answer["message"]


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("spec.replicaSpecs.WORKER", {"template": {"spec": {"containers": [CONTAINER]}}}, "once"),
        (f"{WORKER}.template.spec.containers", [{**CONTAINER, "image": ""}], "with an image each"),
        (f"{WORKER}.template.spec.containers", [{"image": "a"}, {"image": "a"}], "of their own"),
        ("metadata.name", "digits.a", "lower case letters, digits and '-'"),
    ],
)
def test_a_rule_has_no_hole(server: ApiExtensions, path: str, value: Any, rule: str) -> None:
    wrong = changed(path, value)
    assert validation.faults(wrong)
    code, answer = server.create(fresh(wrong), dryRun="All")
    assert code == 422, answer
    assert rule in answer["message"]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([SEED, EARLY_SEED, ORIGINAL]),
    st.integers(0, 200),
    JSON.filter(lambda value: "null" not in json.dumps(value)),
)
def test_the_server_and_the_operator_agree_on_every_manifest(
    server: ApiExtensions, text: str, place: int, value: Any
) -> None:
    """But for ``null``, which the server takes for a field that is left out."""
    manifest = yaml.safe_load(text)
    manifest["metadata"] = {"name": "digits", "namespace": "default"}
    found = list(places(manifest["spec"]))
    node, key = found[place % len(found)]
    node[key] = value
    code, answer = server.create(manifest, dryRun="All")
    assert (code == 201) == (validation.faults(manifest) == []), answer


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "spec.ownerJob: Required value"),
        ({"ownerJob": ""}, "spec.ownerJob"),
        ({"ownerJob": "digits", "reason": "x" * 401}, "spec.reason: Too long"),
        (
            {"ownerJob": "digits", "replicaResourceSpecs": {"worker": {"replicas": -1}}},
            "spec.replicaResourceSpecs.worker.replicas",
        ),
    ],
)
def test_a_wrong_plan_is_rejected_with_the_field(
    server: ApiExtensions, spec: dict[str, Any], said: str
) -> None:
    plan = {"apiVersion": names.API_VERSION, "kind": "ScalePlan", "spec": spec}
    plan["metadata"] = {"name": "plan"}
    code, answer = server.create(plan, dryRun="All")
    assert code == 422, answer
    assert said in answer["message"]


def right() -> Iterator[Any]:
    for name, text in (("seed", SEED), ("early", EARLY_SEED), ("original", ORIGINAL)):
        yield pytest.param(yaml.safe_load(text), id=name)
    for page in PAGES:
        for number, manifest in enumerate(documents(page)):
            yield pytest.param(manifest, id=f"{page.name}-{number}")


@pytest.mark.parametrize("manifest", list(right()))
def test_a_right_manifest_is_accepted_as_it_is(
    server: ApiExtensions, manifest: dict[str, Any]
) -> None:
    manifest = copy.deepcopy(manifest)
    manifest["metadata"].pop("namespace", None)
    code, made = server.create(manifest, dryRun="All", fieldValidation="Strict")
    assert code == 201, made
    for role, replica in manifest["spec"].get("replicaSpecs", {}).items():
        assert made["spec"]["replicaSpecs"][role].get("template") == replica.get("template")


def test_a_field_that_nobody_knows_is_told_where_the_client_asks_for_it(
    server: ApiExtensions,
) -> None:
    manifest = fresh(job(ttlSeconds=1))
    code, answer = server.create(manifest, dryRun="All", fieldValidation="Strict")
    assert code == 400
    assert 'unknown field "spec.ttlSeconds"' in answer["message"]
    assert server.create(manifest, dryRun="All", fieldValidation="Ignore")[0] == 201


def test_what_is_left_out_gets_the_default_of_the_types(kept: dict[str, Any]) -> None:
    for owner, content in (
        (ElasticJobSpec(replica_specs={}), kept["spec"]),
        (ReplicaSpec(), kept["spec"]["replicaSpecs"]["worker"]),
    ):
        fields = zip(owner.__struct_encode_fields__, owner.__struct_fields__, strict=True)
        defaults = {field: getattr(owner, attribute) for field, attribute in fields}
        filled = content.keys() - {"replicaSpecs", "replicas", "minReplicas", "template"}
        assert filled, "the server fills in defaults"
        assert {field: content[field] for field in filled} == {
            field: defaults[field] for field in filled
        }


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"suspend": True}, ""),
        ({"replicaSpecs": {"worker": {"replicas": 3}}}, ""),
        ({"replicaSpecs": {"worker": {"replicas": 1}}}, "minReplicas: accepted is a number of at"),
        ({"replicaSpecs": {"worker": None}}, "accepted is at least one role that trains"),
        (
            {"distributionStrategy": "ParameterServerStrategy"},
            "replicaSpecs: accepted is a role ps",
        ),
    ],
)
def test_a_change_is_held_to_the_rules(
    server: ApiExtensions, change: dict[str, Any], rule: str
) -> None:
    if "worker" in change.get("replicaSpecs", {}) and not change["replicaSpecs"]["worker"]:
        change = {"replicaSpecs": {"worker": None, "dlrover-master": {}}}
    code, answer = server.call("PATCH", path("elasticjobs", "digits"), {"spec": change})
    assert code == (422 if rule else 200), answer
    assert rule in answer.get("message", "")


@pytest.mark.usefixtures("kept")
def test_a_job_is_not_scaled_below_its_minimum(server: ApiExtensions) -> None:
    scale = path("elasticjobs", "digits/scale")
    code, answer = server.call("PATCH", scale, {"spec": {"replicas": 1}})
    assert code == 422, answer
    assert "minReplicas: accepted is a number of at most replicas" in answer["message"]
    assert server.call("PATCH", scale, {"spec": {"replicas": 4}})[0] == 200


@pytest.mark.usefixtures("kept")
def test_a_status_is_taken_as_the_operator_writes_it(server: ApiExtensions) -> None:
    condition = {
        "type": "Placed",
        "status": "True",
        "reason": "Placed",
        "message": "All pods run.",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }
    status = {"phase": "Running", "replicas": 2, "conditions": [condition]}
    code, answer = server.call("PATCH", path("elasticjobs", "digits/status"), {"status": status})
    assert code == 200, answer
    assert answer["status"] == status
