"""The manifests of a job's nodes, what pods say, and the job as its master reads it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dlrover.cli.run.arguments import parse
from dlrover.config import Settings
from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine import nodes, objects
from dlrover.kubernetes.platform import job as jobs
from dlrover.kubernetes.resources import names, quantities as resources, validation
from dlrover.kubernetes.resources.types import ElasticJob
from dlrover.master.compose import master_config
from dlrover.spec.job import JobSpec
from dlrover.spec.node import LaunchNode

COMMAND = ["dlrover-run", "train.py"]


def elastic_job(worker: dict[str, Any] | None = None, **spec: Any) -> ElasticJob:
    container = {"name": "main", "image": "training:1", "command": COMMAND}
    given = {"replicas": 4, "template": {"spec": {"containers": [container]}}} | (worker or {})
    roles = {"worker": given} | spec.pop("roles", {})
    return validation.parse(
        {
            "apiVersion": names.API_VERSION,
            "kind": "ElasticJob",
            "metadata": {"name": "train", "namespace": "team", "uid": "u1"},
            "spec": {"replicaSpecs": roles} | spec,
        }
    )


def templated(containers: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    return {"template": {"spec": {"containers": containers} | spec}}


def variables(pod: dict[str, Any], container: int = 0) -> dict[str, Any]:
    env = pod["spec"]["containers"][container]["env"]
    assert len({variable["name"] for variable in env}) == len(env), "no variable twice"
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in env}


def test_a_template_without_labels_policy_or_resources_is_enough() -> None:
    pod = nodes.pod(elastic_job(), LaunchNode(5, 2), "master.team.svc:50001")
    assert pod["metadata"]["name"] == "train-edljob-worker-5"
    assert pod["metadata"]["namespace"] == "team"
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "u1"
    assert pod["metadata"]["labels"][names.JOB_LABEL] == "train"
    assert pod["metadata"]["labels"][names.ROLE_LABEL] == "worker"
    assert (nodes.node_id(pod), nodes.node_rank(pod)) == (5, 2)
    assert pod["spec"]["restartPolicy"] == "Never"
    env = variables(pod)
    assert env["DLROVER_MASTER_ADDR"] == "master.team.svc:50001"
    assert (env["DLROVER_NODE_ID"], env["DLROVER_NODE_RANK"], env["NODE_NUM"]) == ("5", "2", "4")
    token = {"name": "elasticjob-train-dlrover-master-u1", "key": "token"}
    assert env["DLROVER_TOKEN"] == {"secretKeyRef": token}


def test_a_template_is_kept_as_it_is_given() -> None:
    main = {
        "name": "main",
        "image": "training:1",
        "command": COMMAND,
        "env": [{"name": "MINE", "value": "1"}, {"name": "NODE_RANK", "value": "mine"}],
        "resources": {"limits": {"nvidia.com/gpu": 8}},
    }
    side = {"name": "logs", "image": "logs:1", "env": [{"name": "SHARED", "value": "own"}]}
    worker = templated([side, main], tolerations=[{"operator": "Exists"}], restartPolicy="Always")
    worker["template"]["metadata"] = {"labels": {"team": "a"}, "annotations": {"x": "y"}}
    envs = {"any": {"name": "SHARED", "value": "all"}}
    job = elastic_job(worker, envs=envs)
    pod = nodes.pod(job, LaunchNode(0, 0), "m:1")
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"] == {"x": "y"}
    assert pod["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["containers"][1]["resources"] == main["resources"]
    assert variables(pod, 0) == {"SHARED": "own"}, "a container's own variable counts"
    env = variables(pod, 1)
    assert (env["MINE"], env["SHARED"], env["NODE_RANK"]) == ("1", "all", "0")
    assert job.spec.replica_specs["worker"].template == worker["template"], "it is not changed"


@pytest.mark.parametrize("given", [{}, {"enableServiceLinks": True}])
def test_services_are_no_variables_of_a_pod_unless_its_template_wants_them(
    given: dict[str, bool],
) -> None:
    containers = [{"name": "main", "image": "training:1", "command": COMMAND}]
    master = {"replicas": 1} | templated([{"name": "main"}], **given)
    job = elastic_job(templated(containers, **given), roles={"dlrover-master": master})
    wanted = given.get("enableServiceLinks", False)
    assert nodes.pod(job, LaunchNode(0, 0), "m:1")["spec"]["enableServiceLinks"] is wanted
    assert objects.master_pod(job, "dlrover:1")["spec"]["enableServiceLinks"] is wanted


def test_roles_have_ranks_in_their_order() -> None:
    template = elastic_job().spec.replica_specs["worker"].template
    roles = {
        "evaluator": {"replicas": 1, "template": template},
        "chief": {"replicas": 1, "template": template},
    }
    job = elastic_job({"replicas": 2}, roles=roles)
    places = [("chief", 0), ("evaluator", 0), ("worker", 0), ("worker", 1)]
    assert [nodes.place(job, rank) for rank in range(nodes.count(job))] == places
    assert nodes.pod_name(job, LaunchNode(9, 0)) == "train-edljob-chief-9"
    assert variables(nodes.pod(job, LaunchNode(9, 1), "m:1"))["NODE_TYPE"] == "evaluator"


@pytest.mark.parametrize(
    ("asked", "factor", "wanted"),
    [
        ("1Gi", 2.0, "2048Mi"),
        ("1500M", 2.0, "2862Mi"),
        (1048576, 4.0, "4Mi"),
        ("1.5Gi", 1.0, "1.5Gi"),
    ],
)
def test_memory_grows_where_it_is_asked_for(asked: str | int, factor: float, wanted: str) -> None:
    resources = {"requests": {"memory": asked, "cpu": 1}, "limits": {"cpu": 2}}
    main = {"name": "main", "image": "i", "command": COMMAND, "resources": resources}
    pod = nodes.pod(elastic_job(templated([main])), LaunchNode(0, 0, (), factor), "m:1")
    grown = pod["spec"]["containers"][0]["resources"]
    assert grown == {"requests": {"memory": wanted, "cpu": 1}, "limits": {"cpu": 2}}


@pytest.mark.parametrize(("asked", "wanted"), [(1, "1500m"), ("500m", "750m"), ("0.1", "150m")])
def test_cores_grow_where_they_are_asked_for(asked: str | int, wanted: str) -> None:
    resources = {"requests": {"memory": "1Gi", "cpu": asked}, "limits": {"memory": "2Gi"}}
    main = {"name": "main", "image": "i", "command": COMMAND, "resources": resources}
    pod = nodes.pod(elastic_job(templated([main])), LaunchNode(0, 0, cpu_factor=1.5), "m:1")
    grown = pod["spec"]["containers"][0]["resources"]
    assert grown == {"requests": {"memory": "1Gi", "cpu": wanted}, "limits": {"memory": "2Gi"}}


def test_hosts_are_avoided_beside_what_the_template_asks() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    terms = [{"matchExpressions": [zone]}, {"matchFields": []}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    worker = templated(
        [{"name": "main", "image": "i", "command": COMMAND}], affinity={"nodeAffinity": required}
    )
    pod = nodes.pod(elastic_job(worker), LaunchNode(0, 0, ("b", "a")), "m:1")
    away = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["a", "b"]}
    given = pod["spec"]["affinity"]["nodeAffinity"]
    assert given["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] == [
        {"matchExpressions": [zone, away]},
        {"matchFields": [], "matchExpressions": [away]},
    ]
    assert "affinity" not in nodes.pod(elastic_job(), LaunchNode(0, 0), "m:1")["spec"]


@pytest.mark.parametrize(
    ("priority", "classes"),
    [
        ("", [None] * 4),
        ("high", ["high"] * 4),
        ("low", ["low"] * 4),
        ("0.5", ["high", "high", "low", "low"]),
        ("0.3", ["high", "high", "low", "low"]),
    ],
)
def test_priorities(priority: str, classes: list[str | None]) -> None:
    job = elastic_job({"priority": priority})
    pods = [nodes.pod(job, LaunchNode(rank, rank), "m:1") for rank in range(4)]
    assert [pod["spec"].get("priorityClassName") for pod in pods] == classes


def pod_with(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"} | metadata, "status": status}


def terminated(code: int, reason: str = "Error") -> dict[str, Any]:
    end = {"terminated": {"exitCode": code, "reason": reason}}
    return {"phase": "Failed", "containerStatuses": [{"name": "main", "state": end}]}


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        (pod_with({"phase": "Running"}), ""),
        (pod_with({}), ""),
        (pod_with({"phase": "Succeeded"}), "its pod ended"),
        (pod_with(terminated(3)), "its container main ended with exit code 3"),
        (
            pod_with(terminated(128, "StartError")),
            "its container main ended with exit code 128 (StartError)",
        ),
        (
            pod_with(terminated(137, "OOMKilled")),
            "its container main ran out of memory (OOMKilled)",
        ),
        (
            pod_with(
                {"phase": "Failed", "reason": "DeadlineExceeded", "message": "It was active."}
            ),
            "its pod failed: DeadlineExceeded: It was active",
        ),
        (pod_with({"phase": "Failed"}), "its pod failed"),
        (
            {
                **pod_with(terminated(4) | {"phase": "Running"}),
                "spec": {"containers": [{"name": "main"}]},
            },
            "its container main ended with exit code 4",
        ),
        (
            {
                **pod_with(terminated(4) | {"phase": "Running"}),
                "spec": {"containers": [{"name": "x"}]},
            },
            "",
        ),
        (
            pod_with(
                {"initContainerStatuses": terminated(5)["containerStatuses"], "phase": "Failed"}
            ),
            "its container main ended with exit code 5",
        ),
        (pod_with({"phase": "Running"}, deletionTimestamp="now"), "its pod was deleted"),
        (
            pod_with(
                {
                    "conditions": [
                        {
                            "type": "DisruptionTarget",
                            "status": "True",
                            "reason": "PreemptionByScheduler",
                            "message": "For another pod.",
                        }
                    ]
                },
                deletionTimestamp="now",
            ),
            "its pod was deleted: PreemptionByScheduler: For another pod",
        ),
    ],
)
def test_how_a_pod_ended_is_told(pod: dict[str, Any], said: str) -> None:
    assert nodes.ending(pod) == said


@pytest.mark.parametrize(
    ("code", "output", "said"),
    [
        (
            3,
            "Loading.\nNo DLRover master answered.\n\nJob:  /j\nEvents:  e\n",
            ": No DLRover master answered",
        ),
        (3, "dlrover-run: The host m is not known.", ": dlrover-run: The host m is not known"),
        (3, "", ""),
        (2, "a\n\ndlrover-run: t.py does not exist", ": dlrover-run: t.py does not exist"),
        (1, "ValueError", ""),
    ],
)
def test_the_output_says_why_a_node_did_not_start(code: int, output: str, said: str) -> None:
    pod = pod_with(terminated(code))
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = output
    assert nodes.ending(pod) == f"its container main ended with exit code {code}{said}"


DISRUPTED = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}
LOW = "The node was low on resource: memory. Container main was using 5Gi, which exceeds its request of 1Gi."
FULL = "Container main exceeded its local ephemeral storage limit 1Gi."


@pytest.mark.parametrize(
    ("pod", "removed"),
    [
        (pod_with({"phase": "Running"}), False),
        (pod_with({"phase": "Running"}, deletionTimestamp="now"), True),
        (pod_with(terminated(143) | DISRUPTED), True),
        (pod_with({"phase": "Failed", "reason": "UnexpectedAdmissionError"}), True),
        (pod_with(terminated(143) | {"reason": "Terminated"}), True),
        (pod_with(terminated(137) | {"reason": "Evicted", "message": LOW}), True),
        (pod_with(terminated(137) | {"reason": "Evicted", "message": FULL}), False),
        (pod_with(terminated(137, "OOMKilled")), False),
        (pod_with(terminated(2)), False),
        (pod_with({"phase": "Succeeded"}), False),
    ],
)
def test_whether_the_cluster_ended_a_pod(pod: dict[str, Any], removed: bool) -> None:
    assert nodes.removed(pod | {"spec": {"containers": [{"name": "main"}]}}) is removed


@pytest.mark.parametrize("kind", ["initContainerStatuses", "containerStatuses"])
def test_a_pod_whose_image_has_no_name_that_can_be_is_impossible(kind: str) -> None:
    wrong = {"waiting": {"reason": "InvalidImageName", "message": "Failed to parse a:b:c."}}
    pod = pod_with({"phase": "Pending", kind: [{"name": "main", "state": wrong}]})
    expected = "its pod cannot start: InvalidImageName: Failed to parse a:b:c"
    assert nodes.impossible(pod) == expected


@pytest.mark.parametrize("name", ["main", "trainer"])
def test_the_main_container_is_known_though_admission_puts_another_one_first(name: str) -> None:
    container = {"name": name, "image": "training:1", "command": COMMAND}
    pod = nodes.pod(elastic_job(templated([container])), LaunchNode(0, 0), "m:1")
    pod["spec"]["containers"].insert(0, {"name": "istio-proxy"})
    end = {"terminated": {"exitCode": 1, "reason": "Error"}}
    pod["status"] = {
        "phase": "Running",
        "containerStatuses": [
            {"name": "istio-proxy", "state": {"running": {}}},
            {"name": name, "state": end},
        ],
    }
    assert nodes.ending(pod) == f"its container {name} ended with exit code 1"
    assert nodes.exit_code(pod) == 1


def test_the_main_container_says_how_its_pod_ended() -> None:
    ends = {"a-proxy": 2, "main": 1}
    pod = {
        "metadata": {},
        "spec": {"containers": [{"name": name} for name in ends]},
        "status": {
            "phase": "Failed",
            "containerStatuses": [
                {"name": name, "state": {"terminated": {"exitCode": code}}}
                for name, code in ends.items()
            ],
        },
    }
    assert nodes.exit_code(pod) == 1, "2 would be a wrong command"
    assert nodes.ending(pod) == "its container main ended with exit code 1"


# ---- the job's master


def composed(job: ElasticJob) -> JobSpec:
    return master_config(jobs.request(job), Settings(), "", 0).job


def test_the_job_is_as_large_as_its_replicas() -> None:
    spec = composed(elastic_job({"restartCount": 7}))
    assert (spec.name, spec.min_nodes, spec.max_nodes, spec.managed_nodes) == ("train", 4, 4, 4)
    assert (spec.max_restarts, spec.grows_memory, spec.node_check) == (7, True, False)
    assert jobs.request(elastic_job({"minReplicas": 2})).job.min_nodes == 2


@pytest.mark.parametrize(
    ("options", "worker", "fewest", "restarts"),
    [
        ("--nnodes=1:10 --max_restarts=10", {}, 1, 10),
        ("--nnodes 2:4 --max-restarts 0", {}, 2, 0),
        ("--nnodes=2:4", {"minReplicas": 3}, 3, 3),
        ("--nnodes=8:10", {}, 4, 3),
        ("--nnodes=0:4", {}, 1, 3),
        ("--nnodes=2", {"restartCount": 5}, 4, 5),
        ("--nnodes=$NODE_NUM --max_restarts=$RESTARTS", {}, 4, 3),
    ],
)
def test_numbers_in_the_command_count(
    options: str, worker: dict[str, Any], fewest: int, restarts: int
) -> None:
    command = ["bash", "-c", f"dlrover-run {options} train.py"]
    main = {"name": "main", "image": "i", "command": command}
    spec = jobs.request(elastic_job(templated([main]) | worker)).job
    assert (spec.min_nodes, spec.max_nodes, spec.max_restarts) == (fewest, 4, restarts)


@pytest.mark.parametrize(
    ("command", "check", "stragglers", "unit"),
    [
        (["dlrover-run", "--network-check", "--node_unit=2", "train.py"], True, False, 2),
        (["dlrover-run", "--node-unit", "4", "--exclude-straggler", "train.py"], True, True, 4),
        (["bash", "-c", "pip list && dlrover-run --network_check train.py"], True, False, 1),
        (["bash", "-c", "echo 'it is' open\"; dlrover-run train.py"], False, False, 1),
        (["dlrover-run", "--node_unit=$UNIT", "train.py"], False, False, 1),
    ],
)
def test_flags_that_are_the_masters_are_found_in_the_command(
    command: list[str], check: bool, stragglers: bool, unit: int
) -> None:
    main = {"name": "main", "image": "i", "command": command}
    spec = composed(elastic_job(templated([main])))
    assert (spec.node_check, spec.exclude_stragglers, spec.node_unit) == (check, stragglers, unit)


def test_a_unit_without_a_number_of_nodes_gets_a_sentence() -> None:
    main = {"name": "main", "image": "i", "command": ["dlrover-run", "--node-unit=3", "train.py"]}
    with pytest.raises(ConfigurationError) as caught:
        composed(elastic_job(templated([main])))
    assert str(caught.value) == (
        "ElasticJob train: --node-unit 3 in the workers' command needs a multiple of 3 nodes, and the job has at "
        "least 4 and at most 4: change replicas or minReplicas."
    )
    assert composed(elastic_job(templated([main]) | {"minReplicas": 3})).node_unit == 3


def test_the_master_gives_workers_the_time_to_end_that_their_launcher_gives_them() -> None:
    def seconds(*words: str) -> float:
        main = {"name": "main", "image": "i", "command": ["dlrover-run", *words, "train.py"]}
        return composed(elastic_job(templated([main]))).shutdown_timeout

    assert seconds("--shutdown_timeout=600") == 600.0
    assert seconds() == parse([__file__], {}).job.shutdown_timeout == 30.0


def test_the_master_of_workers_that_outlive_each_other_knows_it() -> None:
    main = {"name": "main", "image": "i", "command": ["dlrover-run", "--survive", "train.py"]}
    assert composed(elastic_job(templated([main]))).survive
    with_servers = elastic_job(templated([main]), roles={"ps": templated([main])})
    assert not composed(with_servers).survive


def with_chief(chiefs: int = 1) -> ElasticJob:
    main = {"name": "main", "image": "i", "command": ["dlrover-run", "--chief", "train.py"]}
    roles = {
        role: {"replicas": count, **templated([main])}
        for role, count in {"chief": chiefs, "evaluator": 1, "ps": 2}.items()
        if count
    }
    return elastic_job(templated([main]), roles=roles)


def test_a_job_with_a_chief() -> None:
    job = with_chief()
    spec = composed(job)
    assert (spec.chief, spec.other_nodes, spec.servers) == (True, 2, 2)
    assert (spec.server_failover, spec.world_nodes) == ("instance", (1, 1))
    assert [spec.place(rank) for rank in (0, 2, 5)] == [
        nodes.place(job, rank) for rank in (0, 2, 5)
    ]
    assert not composed(elastic_job()).chief


def test_a_chief_in_the_command_needs_one_pod() -> None:
    with pytest.raises(ConfigurationError) as caught:
        composed(with_chief(0))
    assert str(caught.value) == (
        "ElasticJob train: --chief in the workers' command needs spec.replicaSpecs.chief with 1 replica."
    )


def test_resources_that_are_none_get_a_sentence() -> None:
    main = {"name": "main", "image": "i", "resources": {"requests": {"cpu": "two"}}}
    with pytest.raises(ConfigurationError) as caught:
        composed(elastic_job(templated([main])))
    assert str(caught.value) == (
        "spec.replicaSpecs.worker.template: 'two' is not a quantity of a container's resources, as 2, 500m or 3Gi."
    )


def test_what_a_template_leaves_empty_is_absent() -> None:
    main = {"name": "main", "image": "i", "command": COMMAND, "env": [{"name": "A", "value": None}]}
    main["resources"] = {"requests": {"cpu": None}, "limits": {"cpu": "500m"}}
    job = elastic_job(templated([main], initContainers=None))
    assert jobs.request(job).brain.node.cpu == 0.0
    pod = nodes.pod(job, LaunchNode(0, 0, cpu_factor=2.0), "")
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "1000m"}


def test_a_quantity_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="'lots' is not a quantity"):
        resources.quantity("lots")


@pytest.mark.parametrize("value", ["", "train", "/train", "team/"])
def test_a_master_that_is_told_no_job_says_so(value: str) -> None:
    with pytest.raises(ConfigurationError, match="must be the ElasticJob of this master"):
        asyncio.run(jobs.read(None, {jobs.VARIABLE: value}))  # type: ignore[arg-type]
