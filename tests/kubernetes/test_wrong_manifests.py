"""A wrong manifest gets a sentence that names the field; a right one of any age gets none."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine import nodes
from dlrover.kubernetes.machine.decisions import Observed
from dlrover.kubernetes.machine.reconcile import reconcile
from dlrover.kubernetes.resources import validation
from dlrover.spec.node import LaunchNode
from tests.kubernetes.manifests import CONTAINER, EARLY_SEED, ORIGINAL, SEED, job

WORKER = "spec.replicaSpecs.worker"
NOTHING = object()

WRONG: dict[str, tuple[str, Any, str]] = {
    "no name": ("metadata.name", NOTHING, "metadata.name is empty: accepted is a name."),
    "upper case": ("metadata.name", "Digits", 'metadata.name is "Digits": accepted are lower'),
    "digit first": ("metadata.name", "1digits", 'metadata.name is "1digits": accepted are lower'),
    "long name": ("metadata.name", "d" * 38, "accepted are 37 characters at most"),
    "no spec": ("spec", NOTHING, "spec is missing: accepted is the job's spec"),
    "spec is a list": ("spec", [], "spec is []: accepted is a map of fields."),
    "no roles": ("spec.replicaSpecs", NOTHING, "spec.replicaSpecs is missing: accepted is a map"),
    "empty roles": (
        "spec.replicaSpecs",
        {},
        "spec.replicaSpecs is {}: accepted is a map of 1 to 5",
    ),
    "unknown role": (
        "spec.replicaSpecs.wroker",
        {"template": {"spec": {"containers": [CONTAINER]}}},
        "spec.replicaSpecs is worker, wroker: accepted",
    ),
    "role twice": (
        "spec.replicaSpecs.Worker",
        {"template": {"spec": {"containers": [CONTAINER]}}},
        "spec.replicaSpecs is worker, Worker: accepted is each role once",
    ),
    "master alone": (
        "spec.replicaSpecs",
        {"dlrover-master": {}},
        "spec.replicaSpecs is dlrover-master: accepted is at least one role that trains",
    ),
    "roles beside workers": (
        "spec.roles",
        {"main": {"entry": "main.py"}},
        "spec.replicaSpecs is worker: accepted is dlrover-master alone beside spec.roles, with an image",
    ),
    "a role that is no map": ("spec.roles", {"main": 1}, "spec.roles.main is 1: accepted is"),
    "no pod": (
        f"{WORKER}.replicas",
        0,
        "spec.replicaSpecs is worker with 0 replicas: accepted is at least one pod that trains "
        "(spec.suspend stops a job).",
    ),
    "negative replicas": (
        f"{WORKER}.replicas",
        -1,
        f"{WORKER}.replicas is -1: accepted is a whole number of at least 0 and at most 100000.",
    ),
    "replicas in words": (
        f"{WORKER}.replicas",
        "two",
        f'{WORKER}.replicas is "two": accepted is a',
    ),
    "replicas true": (
        f"{WORKER}.replicas",
        True,
        f"{WORKER}.replicas is true: accepted is a whole",
    ),
    "two numbers of spares": (
        "spec.spares",
        {"auto": True, "replicas": 2},
        "spec.spares is {auto: true, replicas: 2}: accepted is replicas or auto, not both.",
    ),
    "negative spares": (
        "spec.spares",
        {"replicas": -1},
        "spec.spares.replicas is -1: accepted is a whole number of at least 0 and at most 1000.",
    ),
    "too many": (
        f"{WORKER}.minReplicas",
        3,
        f"{WORKER}.minReplicas is 3: accepted is a number of at",
    ),
    "restarts": (f"{WORKER}.restartCount", -3, f"{WORKER}.restartCount is -3: accepted is a whole"),
    "priority": (
        f"{WORKER}.priority",
        "urgent",
        f'{WORKER}.priority is "urgent": accepted is high',
    ),
    "priority number": (f"{WORKER}.priority", 0.5, f"{WORKER}.priority is 0.5: accepted is high"),
    "restart policy": (
        f"{WORKER}.restartPolicy",
        "Sometimes",
        f'{WORKER}.restartPolicy is "Sometimes": accepted is nothing, Always, ExitCode, Never or On',
    ),
    "no template": (f"{WORKER}.template", NOTHING, f"{WORKER}.template.spec.containers is empty"),
    "no containers": (
        f"{WORKER}.template",
        {"spec": {}},
        f"{WORKER}.template.spec.containers is empty: accepted is a pod template with at least one",
    ),
    "containers is a map": (
        f"{WORKER}.template.spec.containers",
        {"name": "main"},
        f'{WORKER}.template.spec.containers is {{"name":"main"}}: accepted is a list of at',
    ),
    "too many containers": (
        f"{WORKER}.template.spec.containers",
        [{**CONTAINER, "name": f"main-{number}"} for number in range(65)],
        "accepted is a list of at most 64 entries.",
    ),
    "labels is a list": (
        f"{WORKER}.template.metadata",
        {"labels": ["a=b"]},
        f'{WORKER}.template.metadata.labels is ["a=b"]: accepted is a map of fields.',
    ),
    "command in one string": (
        f"{WORKER}.template.spec.containers",
        [{**CONTAINER, "command": "dlrover-run train.py"}],
        '[0].command is "dlrover-run train.py": accepted is a list.',
    ),
    "no image": (
        f"{WORKER}.template.spec.containers",
        [{"name": "main"}],
        f'{WORKER}.template.spec.containers is [{{"name":"main"}}]: accepted is containers with an',
    ),
    "same container twice": (
        f"{WORKER}.template.spec.containers",
        [CONTAINER, CONTAINER],
        "accepted is containers with names of their own.",
    ),
    "strategy": (
        "spec.distributionStrategy",
        "AllReduce",
        'spec.distributionStrategy is "AllReduce": accepted is AllreduceStrategy, CustomStrategy, ',
    ),
    "strategy without ps": (
        "spec.distributionStrategy",
        "ParameterServerStrategy",
        "spec.replicaSpecs is worker: accepted is a role ps",
    ),
    "mode": ("spec.optimizeMode", "auto", 'spec.optimizeMode is "auto": accepted is cluster, man'),
    "suspend": ("spec.suspend", "yes", 'spec.suspend is "yes": accepted is true or false.'),
    "ttl": (
        "spec.ttlSecondsAfterFinished",
        -1,
        "spec.ttlSecondsAfterFinished is -1: accepted is a",
    ),
    "clean": (
        "spec.cleanPodPolicy",
        "Some",
        'spec.cleanPodPolicy is "Some": accepted is All, None',
    ),
    "manager": ("spec.managedBy", "x" * 64, "accepted is a string of at most 63 characters."),
    "quantity": (
        "spec.resourceLimits",
        {"memory": "3 GB"},
        'spec.resourceLimits.memory is "3 GB": ',
    ),
    "env": (
        "spec.envs",
        {"a": {"value": "1"}},
        "spec.envs.a.name is missing: accepted is a string",
    ),
    "env twice": (
        "spec.envs",
        {"a": {"name": "A", "value": "1", "valueFrom": {"fieldRef": {}}}},
        "accepted is value or valueFrom, not both.",
    ),
    "env of a container": (
        f"{WORKER}.template.spec.containers",
        [CONTAINER | {"env": [{"name": "A", "value": "1"}, {"value": "1"}]}],
        f"{WORKER}.template.spec.containers[0].env[1].name is missing: accepted is a string that is not empty.",
    ),
    "env of a container without a name": (
        f"{WORKER}.template.spec.containers",
        [CONTAINER | {"env": [{"name": ""}]}],
        f'{WORKER}.template.spec.containers[0].env[0].name is "": accepted is a string that is not empty.',
    ),
    "env that is a number": (
        f"{WORKER}.template.spec.containers",
        [CONTAINER | {"env": [{"name": "EPOCHS", "value": 3}]}],
        f"{WORKER}.template.spec.containers[0].env[0].value is 3: accepted is a string.",
    ),
    "affinity": (
        f"{WORKER}.template.spec.affinity",
        {"podAntiAffinity": []},
        f"{WORKER}.template.spec.affinity.podAntiAffinity is []: accepted is a map of fields.",
    ),
    "containers that come first": (
        f"{WORKER}.template.spec.initContainers",
        [None],
        f"{WORKER}.template.spec.initContainers[0] is empty: accepted is a map of fields.",
    ),
    "claim": (
        "spec.master",
        {"journalClaim": 1},
        "spec.master.journalClaim is 1: accepted is a str",
    ),
}


def changed(path: str, value: Any) -> dict[str, Any]:
    manifest = job()
    *parents, last = path.split(".")
    node = manifest
    for key in parents:
        node = node[key]
    if value is NOTHING:
        del node[last]
    else:
        node[last] = copy.deepcopy(value)
    return manifest


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_manifest_is_rejected_with_the_field_the_value_and_what_is_accepted(
    case: str,
) -> None:
    path, value, sentence = WRONG[case]
    with pytest.raises(ConfigurationError) as caught:
        validation.parse(changed(path, value))
    assert sentence in str(caught.value)
    assert str(caught.value).endswith(".")
    assert len(validation.faults(changed(path, value))) == 1, "one fault, one sentence"


@pytest.mark.parametrize(("levels", "told"), [(80, False), (100, True), (900, True)])
def test_a_manifest_that_is_nested_deeply_gets_a_sentence(levels: int, told: bool) -> None:
    manifest = job()
    template = manifest["spec"]["replicaSpecs"]["worker"]["template"]
    template["spec"]["volumes"] = [json.loads('{"a":' * levels + "1" + "}" * levels)]
    wanted = ["spec is nested more than 100 levels deep: accepted are pod templates."]
    assert validation.faults(manifest) == (wanted if told else [])


def test_several_faults_are_told_at_once() -> None:
    manifest = job(suspend="yes", cleanPodPolicy="Some")
    assert [text.split(" ")[0] for text in validation.faults(manifest)] == [
        "spec.suspend",
        "spec.cleanPodPolicy",
    ]


def test_a_field_that_nobody_knows_is_a_fault_where_the_manifest_is_submitted() -> None:
    manifest = job(ttlSeconds=1)
    assert validation.faults(manifest) == []  # the API server drops it before the operator sees it
    (fault,) = validation.faults(manifest, strict=True)
    assert fault.startswith("spec.ttlSeconds is unknown: accepted are activeDeadlineSeconds, ")


@pytest.mark.parametrize("text", [SEED, EARLY_SEED, ORIGINAL], ids=["seed", "early", "original"])
def test_manifests_of_the_original_are_right_as_they_are(text: str) -> None:
    manifest = yaml.safe_load(text)
    assert validation.faults(manifest, strict=True) == []
    for replica in manifest["spec"]["replicaSpecs"].values():
        replica["replicas"] = (
            replica.get("replicas") or 1
        )  # the original finds the number by itself
    assert "worker" in validation.parse(manifest).spec.replica_specs


def test_a_manifest_needs_no_labels_no_restart_policy_no_resources_and_no_namespace() -> None:
    manifest = job()
    del manifest["metadata"]["namespace"]
    parsed = validation.parse(manifest)
    assert parsed.namespace == "default"
    assert parsed.spec.replica_specs["worker"].restart_count == 3


# ---- whatever is in a manifest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "high", "1Gi"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "image", "spec", "ps"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of a tree with each of its keys."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in list(pairs):
        yield node, key
        if isinstance(child, dict | list):
            yield from places(child)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.sampled_from([SEED, EARLY_SEED, ORIGINAL]), st.integers(0, 200), JSON)
def test_whatever_is_in_a_manifest_it_is_told_or_can_be_made(
    text: str, place: int, value: Any
) -> None:
    manifest = yaml.safe_load(text)
    manifest["metadata"] = {"name": "digits", "namespace": "default", "uid": "1"}
    found = list(places(manifest["spec"]))
    node, key = found[place % len(found)]
    node[key] = value
    decision = reconcile(Observed(manifest), 0.0, "dlrover:latest", "token")
    assert decision.status is not None or manifest["spec"].get("managedBy")
    if decision.start is not None:
        job = validation.parse(manifest)
        for rank in range(nodes.count(job)):
            nodes.pod(job, LaunchNode(rank, rank, ("host",), 2.0), "master:1")
