"""A ScalePlan has pods replaced: which ones, by what, and what is told of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine import nodes, pods, scaleplans
from dlrover.kubernetes.platform import migration
from dlrover.kubernetes.platform.migration import Factors, PodMigration
from dlrover.kubernetes.resources import validation
from dlrover.kubernetes.resources.types import ElasticJob, ScalePlanSpec
from dlrover.master import platformside
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.job import JobMachine
from dlrover.spec import events
from dlrover.spec.failure import FailureKind
from dlrover.spec.node import FoundNode, LaunchNode
from tests.kubernetes import manifests
from tests.support.drivers import JobDriver

KILLED = {"kind": FailureKind.SIGNAL, "signal": 9}
REQUESTS = {"cpu": "500m", "memory": "1Gi"}


def elastic_job(resources: dict[str, Any] | None = None, **roles: int) -> ElasticJob:
    main = {**manifests.CONTAINER, "resources": resources or {"requests": REQUESTS}}
    template = {"spec": {"containers": [{"name": "other", "image": "log:1"}, main]}}
    specs = {role: {"replicas": number, "template": template} for role, number in roles.items()}
    return validation.parse(manifests.job(replicaSpecs=specs))


def plan(**spec: Any) -> ScalePlanSpec:
    return msgspec.convert({"ownerJob": "digits", **spec}, ScalePlanSpec)


class Told:
    """A job of pods w0, w1, ... that trains, and whoever carries out a plan for it."""

    def __init__(self, job: ElasticJob, **spec: Any) -> None:
        self.job = job
        count = sum(role.replicas for role in job.spec.replica_specs.values())
        servers = job.spec.replica_specs["ps"].replicas if "ps" in job.spec.replica_specs else 0
        workers = count - servers
        others = sum(role in job.spec.replica_specs for role in ("chief", "evaluator"))
        self.driver = JobDriver(
            workers,
            workers,
            managed_nodes=workers,
            other_nodes=others,
            servers=servers,
            min_servers=servers,
            max_servers=servers,
            **spec,
        )
        for node in range(count):
            self.come(node)
        self.driver.join(*range(count), at=10.0)

    def come(self, node: int) -> None:
        self.driver.give(inputs.NodePlaced(node, f"w{node}"))
        self.driver.connect(node, claims=node)

    def placed(self) -> migration.Placed:
        return platformside.placed(self.driver.machine)

    def ask(self, pod: str, cpu: float, memory: float, why: str) -> str:
        asked = platformside.migration(self.driver.machine, pod, (cpu, memory), why)
        refused = self.driver.machine.resizer.migration_refusal(asked)
        self.driver.give(asked)
        return refused

    def numbers(self) -> dict[str, int]:
        return {role: spec.replicas for role, spec in self.job.spec.replica_specs.items()}

    def moves(self, spec: ScalePlanSpec, **numbers: int) -> dict[str, Factors]:
        counts = self.numbers() | numbers
        migration.check(spec, self.job, self.placed(), counts)
        return migration.moves(spec, self.job, self.placed(), counts)

    def begun(self, spec: ScalePlanSpec) -> PodMigration:
        """Whoever carries out a plan, after the first look."""
        moved = PodMigration(self.moves(spec), self.placed, self.ask, "ScalePlan larger")
        moved.advance()
        return moved


def larger(pod: str = "w1") -> ScalePlanSpec:
    return plan(migratePods=[{"name": pod, "resource": {"cpu": 2, "memory": "3Gi"}}])


# ---- what a plan asks for


@pytest.mark.parametrize(
    ("resource", "factors"),
    [
        ({"cpu": 2, "memory": "3Gi"}, (4.0, 3.0)),
        ({"cpu": "250m"}, (0.5, None)),
        ({"memory": "1536Mi"}, (None, 1.5)),
        ({}, (None, None)),
    ],
)
def test_the_size_of_the_pod_that_takes_a_place(resource: dict[str, Any], factors: Any) -> None:
    told = Told(elastic_job(worker=2))
    named = plan(migratePods=[{"name": "w1", "resource": resource}])
    assert told.moves(named) == {"w1": factors}
    of_limits = Told(elastic_job({"limits": REQUESTS}, worker=2))
    assert of_limits.moves(named) == {"w1": factors}, "Kubernetes takes the limits as requests"


@pytest.mark.parametrize("wanted", ["100m", "700m", "1", "1300m"])
def test_a_pod_gets_the_very_amount(wanted: str) -> None:
    job = elastic_job({"requests": {"cpu": "300m", "memory": "3Gi"}}, worker=1)
    spec = plan(replicaResourceSpecs={"worker": {"resource": {"cpu": wanted, "memory": "1Gi"}}})
    cpu, memory = migration.size_of_new(spec, job, "worker")
    made = nodes.pod(job, LaunchNode(3, 0, memory_factor=memory, cpu_factor=cpu), "master:1")
    asked = made["spec"]["containers"][1]["resources"]["requests"]
    assert asked == {"cpu": {"1": "1000m"}.get(wanted, wanted), "memory": "1024Mi"}
    assert (pods.cpu_factor(made), pods.memory_factor(made)) == (cpu, memory)


def test_the_pods_of_a_role_that_have_another_size() -> None:
    told = Told(elastic_job(worker=3, ps=1, chief=1))
    told.driver.give(inputs.MigrationRequested(2, 4.0, 1.0, "it is slow"))
    told.come(5)
    spec = plan(replicaResourceSpecs={"Worker": {"resource": {"cpu": 2}}})
    assert told.moves(spec) == {f"w{i}": (4.0, None) for i in (1, 2, 3)}, "w5 has that size"
    assert told.moves(spec, worker=2) == {f"w{i}": (4.0, None) for i in (1, 2)}, "w3 leaves"
    servers = plan(replicaResourceSpecs={"ps": {"resource": {"memory": "4Gi"}}})
    assert told.moves(servers) == {"w4": (None, 4.0)}
    assert migration.size_of_new(servers, told.job, "ps") == (1.0, 4.0)
    assert told.moves(plan(replicaResourceSpecs={"ps": {"resource": REQUESTS}})) == {}


def test_a_plan_that_only_replaces_pods_sets_no_number() -> None:
    job = elastic_job(worker=2)
    for spec in (larger(), plan(replicaResourceSpecs={"worker": {"resource": REQUESTS}})):
        assert scaleplans.wanted(spec, job, {"worker": 2}) == {}
    both = plan(replicaResourceSpecs={"worker": {"replicas": 3, "resource": REQUESTS}})
    assert scaleplans.wanted(both, job, {"worker": 2}) == {"worker": 3}


ACCEPTED = ": accepted is a pod of worker or ps that trains, now"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"migratePods": [{}]}, f"spec.migratePods[0].name is empty{ACCEPTED} w1 and w2."),
        (
            {"migratePods": [{"name": "w1"}, {"name": "w9"}]},
            f"spec.migratePods[1].name is w9, no pod of the job{ACCEPTED} w1 and w2.",
        ),
        (
            {"migratePods": [{"name": "w0"}]},
            f"spec.migratePods[0].name is w0, a pod of chief{ACCEPTED} w1 and w2.",
        ),
        (
            {"migratePods": [{"name": "w3"}]},
            f"spec.migratePods[0].name is w3, which leaves already{ACCEPTED} w1 and w2.",
        ),
        (
            {"migratePods": [{"name": "w4"}]},
            f"spec.migratePods[0].name is w4, which does not train{ACCEPTED} w1 and w2.",
        ),
        (
            {"migratePods": [{"name": "w1"}, {"name": "w1"}]},
            f"spec.migratePods[1].name is w1, named twice{ACCEPTED} w1 and w2.",
        ),
        (
            {"migratePods": [{"name": "w1", "resource": {"nvidia.com/gpu": 1}}]},
            "spec.migratePods[0].resource.nvidia.com/gpu is 1: accepted are cpu and memory.",
        ),
        (
            {"migratePods": [{"name": "w1", "resource": {"cpu": "lots"}}]},
            "spec.migratePods[0].resource.cpu is lots: accepted is a quantity above 0, as 2 or 500m.",
        ),
        (
            {"migratePods": [{"name": "w1", "resource": {"memory": 0}}]},
            "spec.migratePods[0].resource.memory is 0: accepted is a quantity above 0, as 3Gi.",
        ),
        (
            {"migratePods": [{"name": "w1", "resource": {"memory": "5u"}}]},
            "spec.migratePods[0].resource.memory is 5u: accepted is a quantity above 0, as 3Gi.",
        ),
        (
            {"replicaResourceSpecs": {"chief": {"resource": {"cpu": 1}}}},
            "spec.replicaResourceSpecs.chief.resource is cpu 1: accepted are resources of worker or "
            "ps, whose pods can be replaced.",
        ),
    ],
)
def test_a_wrong_plan_gets_a_sentence(spec: dict[str, Any], sentence: str) -> None:
    told = Told(elastic_job(worker=3, chief=1))
    told.driver.give(inputs.MigrationRequested(3, 1.0, 1.0, "it is slow"))
    told.driver.give(inputs.NodePlaced(4, "w4"))
    with pytest.raises(ConfigurationError) as caught:
        told.moves(plan(**spec))
    assert str(caught.value) == sentence


def test_a_pod_that_leaves_by_the_same_plan_is_not_replaced() -> None:
    told = Told(elastic_job(worker=3))
    with pytest.raises(ConfigurationError) as caught:
        told.moves(larger("w2"), worker=2)
    assert "is w2, which leaves by this plan: accepted" in str(caught.value)


def test_a_template_without_requests_says_so() -> None:
    told = Told(elastic_job({"requests": {"memory": "1Gi"}}, worker=2))
    with pytest.raises(ConfigurationError) as caught:
        told.moves(larger())
    assert str(caught.value) == (
        "spec.migratePods[0].resource.cpu is 2: accepted is what the template of worker requests for its "
        "main container, and that is no cpu."
    )


def test_what_of_a_named_pod_counts_for_nothing_is_told() -> None:
    said = ["spec.migratePods: only the name and the resource of its pods count."]
    assert list(scaleplans.notes({"migratePods": [{"name": "w1", "rankIndex": 1}]})) == said
    resource = {"cpu": 2}
    quiet = {
        "migratePods": [{"name": "w1", "id": 0, "resource": resource}],
        "replicaResourceSpecs": {"worker": {"resource": resource}},
    }
    assert list(scaleplans.notes(quiet)) == []


# ---- having it


def test_pods_are_replaced_while_they_train() -> None:
    told = Told(elastic_job(worker=3))
    spec = plan(replicaResourceSpecs={"worker": {"resource": {"cpu": 2, "memory": "3Gi"}}})
    moved = told.begun(spec)
    assert moved.missing == ["w0", "w1", "w2"]
    assert migration.asked(spec, moved.pods) == [
        "w0, w1 and w2 train on until other pods replace them."
    ]
    machine = told.driver.machine
    assert [(machine.nodes[i].cpu_factor, machine.nodes[i].memory_factor) for i in (3, 4, 5)] == [
        (4.0, 3.0)
    ] * 3
    for node in (3, 4, 5):
        told.come(node)
    told.driver.join(3, 4, 5, at=20.0)
    moved.advance()
    assert moved.missing == ["w0", "w1", "w2"]
    for node in (0, 1, 2):
        told.driver.give(inputs.NodeExited(node, "it left"), at=21.0)
    moved.advance()
    assert (moved.missing, moved.failed) == ([], "")
    assert migration.done(spec) == ["The pods of worker have cpu 2 and memory 3Gi."]
    assert machine.rendezvous.round == 2, "one round for all"


def test_without_a_resource_the_other_pod_has_the_size_of_the_first() -> None:
    told = Told(elastic_job(worker=2), grows_memory=True)
    told.driver.give(inputs.MigrationRequested(1, 2.0, 3.0, "it is slow"))
    told.come(2)
    told.driver.join(2, at=20.0)
    told.driver.join(0)
    told.driver.give(inputs.NodeExited(1, "it left"), at=21.0)
    spec = plan(migratePods=[{"name": "w2"}])
    told.begun(spec)
    assert told.driver.machine.nodes[3].cpu_factor == 2.0
    assert told.driver.machine.nodes[3].memory_factor == 3.0
    assert migration.done(spec) == ["Another pod has replaced w2."]


def test_a_pod_whose_successor_never_starts_stays() -> None:
    told = Told(elastic_job(worker=2))
    moved = told.begun(larger())
    told.driver.give(inputs.NodePlaced(2, "w2"), events.NodeWaits(2, "no machine has 2 cores"))
    told.driver.give(inputs.DeadlinePassed(), at=told.driver.machine.deadline())
    moved.advance()
    assert moved.failed == (
        "w1 stays: w2 does not replace it: it had not started: no machine has 2 cores."
    )


def test_a_pod_waits_until_its_job_trains() -> None:
    told = Told(elastic_job(worker=2))
    spec = larger()
    wanted = told.moves(spec)
    told.driver.fail(0, KILLED)
    told.driver.join(1, at=15.0)
    assert told.moves(spec) == wanted, "between two rounds it counts as one that trains"
    moved = told.begun(spec)
    assert moved.refused.startswith("Node 1 does not train: only nodes of the running world")
    told.driver.join(0, at=20.0)
    told.driver.give(inputs.Progressed(2, 1), at=21.0)
    moved.advance()
    assert (moved.refused, moved.failed, moved.missing) == ("", "", ["w1"])
    assert 2 in told.driver.machine.fleet.migrations


def test_a_pod_that_is_lost_before_its_place_was_asked_for() -> None:
    told = Told(elastic_job(worker=2))
    told.driver.fail(0, KILLED)
    moved = told.begun(larger())
    told.driver.give(inputs.NodeExited(1, "its pod was deleted"), at=20.0)
    told.come(2)
    moved.advance()
    assert (moved.missing, moved.failed) == (["w1"], "")
    told.driver.join(0, 2, at=21.0)
    moved.advance()
    assert moved.failed == "w1 was lost before another pod could replace it: its pod was deleted."


def test_another_master_goes_on_where_the_last_one_was() -> None:
    told = Told(elastic_job(worker=3))
    spec = plan(migratePods=[{"name": "w1"}, {"name": "w2"}])
    told.ask("w1", 1.0, 1.0, "ScalePlan larger")  # it went no further
    moved = PodMigration(
        migration.moves(spec, told.job, told.placed(), {}),
        told.placed,
        told.ask,
        "ScalePlan larger",
    )
    moved.advance()
    assert sorted(told.driver.machine.fleet.migrations) == [3, 4]
    assert moved.missing == ["w1", "w2"]
    told.driver.give(inputs.NodeExited(1, "its pod was deleted"), at=20.0)
    told.come(3)
    told.driver.join(0, 2, 3, at=21.0)
    moved.advance()
    assert (moved.missing, moved.failed) == (["w2"], "")


def test_a_master_that_does_not_know_yet_what_trains_takes_up_a_plan() -> None:
    told = Told(elastic_job(worker=2))
    found = (FoundNode(0, 0, "w0"), FoundNode(1, 1, "w1", 3.0, 4.0))
    job = told.driver.machine.job
    told.driver.machine, told.driver.ledger = JobMachine(), Ledger()
    told.driver.give(inputs.Submitted(job, "", found, 12))
    resource = {"cpu": 2, "memory": "3Gi"}
    spec = plan(
        replicaResourceSpecs={"worker": {"resource": resource}}, migratePods=[{"name": "w0"}]
    )
    assert told.moves(spec) == {"w0": (4.0, 3.0)}, "w1 has that size"
    moved = told.begun(larger("w0"))
    assert (moved.missing, moved.failed) == (["w0"], "")
    assert moved.refused.startswith("Node 0 does not train")


def test_long_lists_of_pods_are_cut() -> None:
    assert migration.listed(["a"]) == "a"
    assert migration.listed([f"w{i}" for i in range(8)]) == "w0, w1, w2, w3, w4 and 3 more"


@pytest.mark.parametrize(
    ("has", "missing", "waits", "sentence"),
    [
        (
            "3 workers",
            [],
            "no room.",
            "The job does not have 3 workers after 600 s; they stay requested: no room.",
        ),
        (
            "",
            [],
            "",
            "The job is incomplete after 600 s; its nodes stay requested: the reason is unknown.",
        ),
        (
            "",
            ["w1"],
            "The job does not train.",
            "w1 is not replaced after 600 s: The job does not train.",
        ),
        (
            "3 workers",
            ["w1", "w2"],
            "",
            "w1 and w2 are not replaced after 600 s: the reason is unknown.",
        ),
    ],
)
def test_what_a_plan_lacks_whose_time_is_up(has, missing, waits, sentence) -> None:
    assert migration.late(has, missing, waits, 600.0) == sentence
