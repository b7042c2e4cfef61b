"""The operator's decisions, carried out in a cluster in memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from dlrover.kubernetes.api.elasticjobs import status_patch
from dlrover.kubernetes.machine import objects, pods
from dlrover.kubernetes.machine.decisions import Observed, status_of
from dlrover.kubernetes.machine.reconcile import reconcile
from dlrover.kubernetes.resources import names, validation
from dlrover.kubernetes.resources.types import ElasticJobStatus, ReplicaStatus
from tests.kubernetes.manifests import ORIGINAL, job
from tests.kubernetes.world import START, World, running

MASTER = names.master_name("digits")
OWN = names.own_name("digits", "uid-1")


# ---- a job's way


def test_a_new_job_gets_a_master_with_all_that_it_needs() -> None:
    world = World()
    world.settle()
    kinds = {kind for kind, _ in world.objects}
    assert kinds == {"Pod", "Service", "Secret", "ServiceAccount", "Role", "RoleBinding"}
    assert {world.objects[kind, MASTER]["kind"] for kind in ("Pod", "Service")} == {
        "Pod",
        "Service",
    }
    for kind in ("Secret", "ServiceAccount", "Role", "RoleBinding"):
        assert (kind, OWN) in world.objects
    for made in world.objects.values():
        assert made["metadata"]["labels"][names.JOB_LABEL] == "digits"
        assert made["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert world.events == ["Accepted", "MasterStarted"]
    assert world.condition("Accepted") == "True"


def test_the_master_is_reached_by_its_service_and_reads_its_token_from_the_secret() -> None:
    world = World()
    world.settle()
    service, secret = world.objects["Service", MASTER], world.objects["Secret", OWN]
    assert world.master is not None
    labels = world.master["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = world.master["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"] == 50001
    env = {entry["name"]: entry for entry in container["env"]}
    assert env["DLROVER_KUBERNETES_JOB"]["value"] == "default/digits"
    assert env["DLROVER_KUBERNETES_JOB_UID"]["value"] == "uid-1"
    reference = env["DLROVER_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": OWN, "key": "token"}
    assert secret["stringData"]["token"]
    assert world.master["spec"]["restartPolicy"] == "Never"
    assert container["image"] == "dlrover:1"


def test_the_state_follows_the_pods() -> None:
    world = World()
    world.step()
    assert world.status["phase"] == "Created"
    world.settle()
    assert world.status["phase"] == "Pending"
    assert world.master is not None
    world.run(world.master)
    world.settle()
    assert world.status["phase"] == "Pending"
    assert world.condition("MasterReady") == "True"
    world.run(world.create_worker(0))
    world.create_worker(1)
    world.settle()
    assert world.status["phase"] == "Running"
    assert world.status["workers"] == "1/2"
    assert world.status["message"] == "1 of 2 workers are running."
    assert world.status["replicaStatuses"]["worker"]["pending"] == 1


def test_a_pod_that_cannot_be_placed_is_explained() -> None:
    world = running()
    waiting = world.create_worker(2)
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    unplaced = {"type": "PodScheduled", "status": "False", "message": message}
    waiting["status"]["conditions"] = [unplaced]
    world.settle()
    assert world.status["message"] == f"Pod digits-edljob-worker-2 waits: {message}"
    stuck = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    waiting["status"] = {"phase": "Pending", "containerStatuses": [{"state": stuck}]}
    world.settle()
    expected = "Pod digits-edljob-worker-2 waits: ImagePullBackOff: Back-off pulling image."
    assert world.status["message"] == expected
    preparing = {"waiting": {"reason": "PodInitializing"}}
    waiting["status"] = {
        "phase": "Pending",
        "initContainerStatuses": [{"state": stuck}],
        "containerStatuses": [{"state": preparing}],
    }
    world.settle()
    assert world.status["message"] == expected


def noticed(reason: str, message: str, at: str, uid: str = "pod-1") -> Any:
    return {
        "involvedObject": {"uid": uid},
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
    }


WHY = 'MountVolume.SetUp failed for volume "data" : configmap "data" not found'
LATE = "Unable to attach or mount volumes: unmounted volumes=[data], unattached volumes=[data]"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([("FailedMount", WHY, "1"), ("FailedMount", LATE, "2")], f"FailedMount: {WHY}"),
        ([("FailedMount", LATE, "2")], f"FailedMount: {LATE}"),
        (
            [("FailedMount", WHY, "1"), ("FailedAttachVolume", "x  y", "2")],
            "FailedAttachVolume: x y",
        ),
        (
            [("FailedCreatePodSandBox", f'the network of sandbox "{"0a" * 32}"', "1")],
            'FailedCreatePodSandBox: the network of sandbox "…"',
        ),
        ([("FailedMount", WHY, "1"), ("Pulling", "", "2")], None),
        ([("Pulling", "", "2"), ("Scheduled", "", "0"), ("FailedMount", WHY, "1")], None),
    ],
)
def test_what_a_machine_says_last_about_a_pod_counts(
    events: list[tuple[str, str, str]], expected: str | None
) -> None:
    assert pods.notices(noticed(*event) for event in events).get("pod-1") == expected


def test_a_pod_whose_volume_cannot_be_mounted_is_explained() -> None:
    world = running()
    waiting = world.create_worker(2)
    scheduled = {"type": "PodScheduled", "status": "True"}
    waiting["status"]["conditions"] = [scheduled]
    world.noticed = {waiting["metadata"]["uid"]: f"FailedMount: {WHY}"}
    world.settle()
    assert world.status["message"] == f"Pod digits-edljob-worker-2 waits: FailedMount: {WHY}."
    assert world.decision.again == 15.0
    waiting["status"]["initContainerStatuses"] = [
        {"name": "data", "state": {"running": {"startedAt": "1"}}}
    ]
    world.settle()
    assert world.status["message"] == "2 of 2 workers are running."
    assert world.decision.again is None


def test_a_condition_keeps_the_time_of_its_last_change() -> None:
    world = running()
    world.create_worker(2)
    world.settle()
    since = {c["type"]: c["lastTransitionTime"] for c in world.status["conditions"]}
    assert set(since.values()) == {"2027-01-15T08:00:00Z"}
    assert world.master is not None
    world.end(world.master, 137)
    world.settle()
    since = {c["type"]: c["lastTransitionTime"] for c in world.status["conditions"]}
    assert since["Accepted"] == "2027-01-15T08:00:00Z"
    assert since["MasterReady"] == "2027-01-15T08:16:40Z"


def test_a_pod_that_is_being_deleted_is_not_ready_and_counts_no_more() -> None:
    world = running()
    (first, second) = world.workers
    world.delete(first)
    assert not pods.ready(first)
    assert pods.ready(second)
    world.settle()
    assert world.status["workers"] == "1/2"


# ---- suspend, the end, and who is in charge


def test_suspend_removes_the_master_first_and_resume_brings_it_back() -> None:
    world = running()
    assert world.job is not None
    world.job["spec"]["suspend"] = True
    master = world.master
    assert master is not None
    world.settle()
    assert "deletionTimestamp" in master["metadata"]
    assert not any("deletionTimestamp" in w["metadata"] for w in world.workers)
    world.gone(master)
    world.settle()
    for worker in world.workers:
        assert "deletionTimestamp" in worker["metadata"]
        world.gone(worker)
    world.settle()
    assert world.status["phase"] == "Suspended"
    assert world.condition("Suspended") == "True"
    assert world.pods == []
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.master is not None
    assert world.condition("Suspended") == "False"
    assert world.events.count("Suspended") == world.events.count("Resumed") == 1


def test_a_suspended_job_resumes_though_the_machine_of_a_worker_is_lost() -> None:
    world = running()
    assert world.job is not None
    assert world.master is not None
    world.job["spec"]["suspend"] = True
    world.settle()
    world.gone(world.master)
    world.settle()
    lost, other = world.workers
    assert world.status["message"] == "2 pods are ending."
    world.gone(other)
    world.settle()
    assert world.status["message"] == "1 pod is ending."
    assert world.decision.again == 90.0
    world.now += 89.0
    world.settle()
    assert world.workers == [lost]
    world.now += 1.0
    world.settle()
    assert (world.workers, world.events.count("PodForced")) == ([], 1)
    assert world.condition("Suspended") == "True"
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.master is not None


def test_a_job_that_is_suspended_from_the_start_makes_no_pod() -> None:
    world = World(job(suspend=True))
    world.settle()
    assert world.objects == {}
    assert world.status["phase"] == "Suspended"


@pytest.mark.parametrize(
    ("policy", "left"), [("Running", {MASTER, "done"}), ("All", set()), ("None", None)]
)
def test_the_policy_says_which_pods_are_removed_at_the_end(
    policy: str, left: set[str] | None
) -> None:
    world = running(cleanPodPolicy=policy)
    done = world.create_worker(7)
    world.objects["Pod", "done"] = world.objects.pop(("Pod", done["metadata"]["name"]))
    done["metadata"]["name"] = "done"
    world.end(done, 0)
    before = {pod["metadata"]["name"] for pod in world.pods}
    assert world.master is not None
    world.end(world.master, 0)
    world.settle()
    for pod in world.workers:
        if "deletionTimestamp" in pod["metadata"]:
            world.gone(pod)
    world.settle()
    assert {pod["metadata"]["name"] for pod in world.pods} == (before if left is None else left)
    assert world.status["phase"] == "Succeeded", "the end outlives the pods"


def test_a_job_is_deleted_its_time_after_its_end() -> None:
    world = running(ttlSecondsAfterFinished=60)
    assert world.master is not None
    world.end(world.master, 1)
    world.step()
    assert world.decision.again == 60.0
    world.now += 59.0
    world.settle()
    assert world.job is not None
    world.now += 1.0
    world.settle()
    assert world.job is None


@pytest.mark.parametrize("mine", ["", "elastic.iml.github.io/operator"])
def test_a_job_that_another_manages_is_left_alone(mine: str) -> None:
    other = World(job(managedBy="kueue.x-k8s.io/multikueue"))
    other.settle()
    assert (other.objects, other.status) == ({}, {})
    ours = World(job(managedBy=mine))
    ours.settle()
    assert ours.master is not None


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    world = running()
    assert world.job is not None
    world.job["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    before = copy.deepcopy(world.objects)
    assert world.master is not None
    world.gone(world.master)
    world.settle()
    assert before.keys() - world.objects.keys() == {("Pod", MASTER)}


# ---- what the manifest says


def test_a_wrong_manifest_is_told_once_and_runs_when_it_is_right() -> None:
    wrong = job()
    wrong["spec"]["replicaSpecs"]["wroker"] = wrong["spec"]["replicaSpecs"].pop("worker")
    world = World(wrong)
    world.settle()
    world.step()
    assert world.objects == {}
    assert world.events == ["Rejected"]
    assert world.condition("Accepted") == "False"
    assert world.status["phase"] == "Rejected"
    assert "spec.replicaSpecs is wroker" in world.status["message"]
    assert world.job is not None
    world.job["spec"] = job()["spec"]
    world.job["metadata"]["generation"] = 2
    world.settle()
    assert world.condition("Accepted") == "True"
    assert world.status["observedGeneration"] == 2
    assert world.master is not None


def test_what_has_no_effect_is_told_once_a_generation() -> None:
    manifest = yaml.safe_load(ORIGINAL)
    manifest["metadata"].update(uid="uid-1", generation=1, name="digits")
    manifest["spec"]["replicaSpecs"]["worker"]["replicas"] = 1
    world = World(manifest)
    world.settle()
    # distributionStrategy, resourceLimits, enableElasticScheduling, enableDynamicSharding; restartTimeout of ps
    assert world.events.count("NoEffect") == 5
    assert world.job is not None
    world.job["metadata"]["generation"] = 2
    world.settle()
    assert world.events.count("NoEffect") == 10


def test_the_masters_template_is_kept_and_completed() -> None:
    manifest = job()
    template = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "nodeSelector": {"disk": "ssd"},
            "containers": [{"imagePullPolicy": "Always", "env": [{"name": "A", "value": "1"}]}],
        },
    }
    manifest["spec"]["replicaSpecs"]["dlrover-master"] = {"template": template}
    before = copy.deepcopy(manifest)
    pod = objects.master_pod(validation.parse(manifest), "dlrover:2")
    assert pod["metadata"]["annotations"] == {"a": "b", names.MASTER_NUMBER: "1"}
    assert pod["spec"]["nodeSelector"] == {"disk": "ssd"}
    (container,) = pod["spec"]["containers"]
    assert container["imagePullPolicy"] == "Always"
    assert container["image"] == "dlrover:2"
    assert container["env"][0] == {"name": "A", "value": "1"}
    assert manifest == before


def test_a_claim_keeps_the_jobs_directory() -> None:
    pod = objects.master_pod(validation.parse(job(master={"journalClaim": "journals"})), "i")
    (home,) = [v for v in pod["spec"]["volumes"] if v["name"] == "dlrover-home"]
    assert home["persistentVolumeClaim"] == {"claimName": "journals"}
    env = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
    assert str(env["DLROVER_JOB_DIR"]).startswith(f"{objects.HOME}/{OWN}")


def test_a_status_that_is_none_is_written_anew() -> None:
    assert status_of({"status": {"conditions": "none"}}) == ElasticJobStatus()


def test_a_patch_of_the_status_removes_what_is_gone_and_spares_the_masters_part() -> None:
    old = {
        "phase": "Running",
        "message": "old",
        "training": {"steps": 7},
        "replicaStatuses": {"worker": {"pending": 0, "active": 2, "succeeded": 0, "failed": 0}},
    }
    new = ElasticJobStatus(phase="Running", replica_statuses={"ps": ReplicaStatus(active=1)})
    patch = status_patch(old, new)
    assert patch is not None
    assert patch["message"] is None
    assert patch["replicaStatuses"]["worker"] is None
    assert "phase" not in patch
    assert "training" not in patch
    assert status_patch({}, ElasticJobStatus()) != {}


# ---- whatever happens

FAULTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["run", "delete", "gone", "killed", "oom", "evicted", "step", "wait", "worker",
             "suspend", "resume", "service", "forget"]
        ),
        st.integers(0, 3),
    ),
    max_size=30,
)  # fmt: skip


def strike(world: World, what: str, which: int) -> None:
    """Something happens to one of the pods, or to the job."""
    assert world.job is not None
    pods = world.pods
    pod = pods[which % len(pods)] if pods else None
    if what == "step":
        world.step()
    elif what == "wait":
        world.now += 10.0**which
    elif what in ("suspend", "resume"):
        world.job["spec"]["suspend"] = what == "suspend"
    elif what == "service":
        world.objects.pop(("Service", MASTER), None)
    elif what == "forget":
        world.job.pop("status", None)
    elif (
        what == "worker"
        and world.master
        and ("Pod", f"digits-edljob-worker-{which}") not in (world.objects)
    ):
        world.create_worker(which)
    elif pod is not None:
        strike_pod(world, pod, what)


def strike_pod(world: World, pod: dict[str, Any], what: str) -> None:
    if what == "delete":
        world.delete(pod)
    elif what == "gone" and "deletionTimestamp" in pod["metadata"]:
        world.gone(pod)
    elif pod["status"]["phase"] in ("Succeeded", "Failed"):
        return
    elif what == "run":
        world.run(pod)
    elif what in ("killed", "oom"):
        world.end(pod, 137, "OOMKilled" if what == "oom" else "Error")
    elif what == "evicted":
        world.end(pod, None, "Evicted")


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(FAULTS)
def test_whatever_happens_to_the_pods_the_job_comes_back_to_one_running_master(
    faults: list[tuple[str, int]],
) -> None:
    world = World()
    for what, which in faults:
        strike(world, what, which)  # a second pod of one name raises in the world
        masters = [p for p in world.pods if p["metadata"]["name"] == MASTER]
        assert len(masters) <= 1
    assert world.job is not None
    world.job["spec"]["suspend"] = False
    for _ in range(12):
        world.settle()
        if world.master is not None and "deletionTimestamp" not in world.master["metadata"]:
            world.run(world.master)
        world.now += world.decision.again or 0.0
    assert world.master is not None
    assert world.condition("MasterReady") == "True"
    assert "completionTime" not in world.status


def test_a_decision_depends_on_nothing_but_what_it_is_told() -> None:
    seen = Observed(job())
    first = reconcile(seen, START, "dlrover:latest", "t")
    assert reconcile(seen, START, "dlrover:latest", "t") == first


# ---- jobs of several roles


def roles(**spec: Any) -> dict[str, Any]:
    """A job of several roles."""
    made = job(roles={"rollout": {"entry": "serving:Rollout"}}, **spec)
    made["spec"]["replicaSpecs"] = {
        names.MASTER_ROLE: {"template": {"spec": {"containers": [{"name": "main", "image": "i"}]}}}
    }
    return made


def of_role(parent: dict[str, Any]) -> World:
    """The job of one of its roles, whose master runs."""
    owner = objects.owner(validation.parse(parent))
    world = World({**job(), "metadata": {**job()["metadata"], "ownerReferences": [owner]}})
    world.parent = parent
    world.settle()
    assert world.master is not None
    world.run(world.master)
    world.settle()
    return world


def test_a_coordinator_may_make_and_remove_the_jobs_of_its_roles_alone() -> None:
    world = World(roles())
    world.settle()
    assert world.master is not None
    world.run(world.master)
    world.settle()
    assert (world.status["phase"], world.status["message"]) == (
        "Running",
        "The coordinator is running.",
    )
    of_jobs = [
        rule for rule in world.objects["Role", OWN]["rules"] if rule["resources"] == ["elasticjobs"]
    ]
    assert [(rule["verbs"], rule.get("resourceNames")) for rule in of_jobs[1:]] == [
        (["create"], None),
        (["get", "list", "watch", "delete"], ["digits-rollout"]),
    ]
    asked = {verb for rule in of_jobs for verb in rule["verbs"]}
    (own,) = [rule for rule in objects.operator_rules() if rule["resources"] == ["elasticjobs"]]
    assert asked <= set(own["verbs"])


def test_the_job_of_a_role_has_the_token_of_the_job_it_belongs_to() -> None:
    parent = roles()
    parent["metadata"] |= {"name": "numbers", "uid": "uid-2"}
    world = of_role(parent)
    assert not [name for kind, name in world.objects if kind == "Secret"]
    assert world.master is not None
    (source,) = [
        one["valueFrom"]["secretKeyRef"]["name"]
        for one in world.master["spec"]["containers"][0]["env"]
        if one["name"] == "DLROVER_TOKEN"
    ]
    assert source == names.own_name("numbers", "uid-2")


@pytest.mark.parametrize("how", ["suspended", "ended", "ended before", "another"])
def test_the_job_of_a_role_ends_with_the_job_it_belongs_to(how: str) -> None:
    parent = roles()
    world = of_role(parent)
    parent["spec"]["suspend"] = how == "suspended"
    if how != "suspended":
        assert world.job is not None
        parent["status"] = {"completionTime": "2026-01-02T03:04:05Z"}
        if how == "ended before":
            assert world.master is not None
            world.end(world.master, 1)  # its pods are kept for their logs
            parent.pop("status")
            world.settle()
            parent["status"] = {"completionTime": "2026-01-02T03:04:05Z"}
        elif how == "another":
            parent["metadata"]["uid"] = "uid-9"
    world.settle()
    assert (world.job is None) == (how in ("suspended", "ended"))


# ---- conditions, and the time that a job may be active


def test_conditions_say_whether_it_runs_and_whether_it_is_complete() -> None:
    world = running()
    assert world.condition("Running") == "True"
    assert world.master is not None
    world.end(world.master, 137)
    world.settle()
    assert world.condition("Running") == "False"
    world.end(world.master, 0)
    world.settle()
    assert world.condition("Complete") == world.condition("Succeeded") == "True"
    assert world.condition("Running") == "False"


@pytest.mark.parametrize("policy", ["Running", "None"])
def test_a_job_that_was_active_for_too_long_fails_and_its_pods_go(policy: str) -> None:
    world = running(activeDeadlineSeconds=1800, cleanPodPolicy=policy)
    world.step()
    assert world.decision.again == 800.0
    world.now += 800.0
    world.step()
    assert [gone.name for gone in world.decision.delete] == [MASTER], "it would replace its workers"
    world.settle()
    assert world.status["phase"] == "Failed"
    (failed,) = [c for c in world.status["conditions"] if c["type"] == "Failed"]
    assert failed["reason"] == "DeadlineExceeded"
    assert world.status["message"] == "The job was active for 1800 s (spec.activeDeadlineSeconds)."
    assert all("deletionTimestamp" in pod["metadata"] for pod in world.pods)
    assert world.condition("MasterReady") == "False"


def test_a_suspended_job_has_its_time_anew_when_it_resumes() -> None:
    world = running(activeDeadlineSeconds=1800)
    assert world.job is not None
    world.job["spec"]["suspend"] = True
    world.settle()
    for pod in list(world.pods):
        world.gone(pod)
    world.now += 5000.0
    world.settle()
    assert world.status["phase"] == "Suspended"
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.status["phase"] != "Failed"
    assert world.decision.again == 1800.0


def test_a_job_that_ended_in_time_has_not_failed_however_late_that_is_seen() -> None:
    world = running(activeDeadlineSeconds=1800)
    assert world.master is not None
    world.end(world.master, 0)
    world.now += 5000.0
    world.settle()
    assert world.status["phase"] == "Succeeded"
