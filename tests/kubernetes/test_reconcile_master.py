"""What the operator does when a job's master has ended, is lost, or is not the job's."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dlrover.kubernetes.machine import objects
from dlrover.kubernetes.machine.pods import QUICK
from dlrover.kubernetes.machine.reconcile import LONG, QUICK_ENDS
from dlrover.kubernetes.resources import names, times, validation
from tests.kubernetes.manifests import job
from tests.kubernetes.world import World, running

MASTER = names.master_name("digits")


ENDS: list[tuple[int, str, str]] = [
    (0, "Succeeded", "Succeeded"),
    (1, "Failed", "UserCode"),
    (2, "Failed", "Usage"),
    (3, "Failed", "Infrastructure"),
    (4, "Failed", "NoProgress"),
    (5, "Failed", "Stopped"),
    (127, "Failed", "NoCommand"),
]


@pytest.mark.parametrize(("code", "phase", "reason"), ENDS)
def test_the_masters_exit_code_ends_the_job(code: int, phase: str, reason: str) -> None:
    world = running()
    assert world.master is not None
    world.end(world.master, code)
    world.settle()
    assert world.status["phase"] == phase
    (ended,) = [c for c in world.status["conditions"] if c["type"] == phase]
    assert ended["status"] == "True"
    assert ended["reason"] == reason
    assert world.status["completionTime"] == "2027-01-15T08:16:40Z"
    assert world.events[-1] == phase
    assert world.workers == [] or all("deletionTimestamp" in w["metadata"] for w in world.workers)


def end_beside(world: World, code: int, reason: str = "") -> None:
    """The master's container ends, and a container that a service mesh has added runs on."""
    master = world.master
    assert master is not None
    main = master["spec"]["containers"][0]
    master["spec"]["containers"] = [{"name": "istio-proxy"}, main]
    world.end(master, code, reason)
    proxy = {"name": "istio-proxy", "state": {"running": {}}}
    statuses = [proxy, *master["status"]["containerStatuses"]]
    master["status"] = {"phase": "Running", "containerStatuses": statuses}


@pytest.mark.parametrize(("code", "phase", "reason"), ENDS)
def test_the_job_ends_with_its_master_though_a_container_beside_it_runs_on(
    code: int, phase: str, reason: str
) -> None:
    world = running()
    end_beside(world, code)
    world.settle()
    assert world.status["phase"] == phase
    assert any(c["type"] == phase and c["reason"] == reason for c in world.status["conditions"])
    assert world.master is not None
    assert "deletionTimestamp" in world.master["metadata"], "what runs on is removed"


def test_the_job_ends_with_its_master_though_admission_put_another_container_first() -> None:
    container = {"name": "coordinator", "image": "i"}
    spec = job()["spec"]
    spec["replicaSpecs"]["dlrover-master"] = {"template": {"spec": {"containers": [container]}}}
    world = running(**spec)
    assert world.master is not None
    world.master["spec"]["containers"].insert(0, {"name": "istio-proxy"})
    ended = {"exitCode": 0, "startedAt": "", "finishedAt": ""}
    world.master["status"]["containerStatuses"] = [
        {"name": "istio-proxy", "state": {"running": {}}},
        {"name": "coordinator", "state": {"terminated": ended}},
    ]
    world.settle()
    assert world.status["phase"] == "Succeeded"


def test_a_master_that_ran_out_of_memory_beside_another_container_is_replaced() -> None:
    world = running()
    end_beside(world, 137, "OOMKilled")
    world.settle()
    assert world.master is not None
    world.gone(world.master)
    world.settle()
    assert world.status["master"]["memoryFactor"] == 2.0
    assert (world.status["master"]["starts"], world.status["phase"]) == (2, "Restarting")


def test_the_master_is_the_main_container_of_its_template() -> None:
    containers = [{"name": "shipper", "image": "s:1", "command": ["ship"]}, {"name": "main"}]
    made = job()
    made["spec"]["replicaSpecs"]["dlrover-master"] = {
        "template": {"spec": {"containers": containers}}
    }
    shipper, main = objects.master_pod(validation.parse(made), "dlrover:1")["spec"]["containers"]
    assert shipper == containers[0]
    assert (main["image"], main["command"][:2]) == ("dlrover:1", ["dlrover", "master"])


LOSSES: list[tuple[int | None, str]] = [
    (137, "OOMKilled"),
    (1, "OOMKilled"),
    (137, "Error"),
    (143, "Error"),
    (139, "Error"),
    (70, "Error"),
    (None, "Evicted"),
    (None, "NodeLost"),
    (None, ""),
]


@pytest.mark.parametrize(("code", "reason"), LOSSES)
def test_a_lost_master_comes_back_and_its_workers_stay(code: int | None, reason: str) -> None:
    world = running()
    assert world.master is not None
    lost = world.master["metadata"]["uid"]
    workers = copy.deepcopy(world.workers)
    world.end(world.master, code, reason)
    world.settle()
    assert world.master is not None
    assert world.master["metadata"]["uid"] != lost
    assert world.workers == workers
    assert world.status["master"]["starts"] == 2
    assert world.status["phase"] == "Restarting"
    world.run(world.master)
    world.settle()
    assert world.status["phase"] == "Running"
    assert "completionTime" not in world.status


def test_of_an_evicted_master_the_pods_reason_is_shown() -> None:
    """Its container was killed, too."""
    world = running()
    assert world.master is not None
    world.end(world.master, 137, "Error")
    low = "The node was low on resource: memory."
    world.master["status"] |= {"reason": "Evicted", "message": low}
    world.step()
    assert world.status["message"] == f"The master's pod failed: Evicted: {low}"


def memory_of(master: dict[str, Any] | None) -> tuple[str, str]:
    assert master is not None
    (container,) = master["spec"]["containers"]
    asked = container["resources"]
    return asked["requests"]["memory"], asked["limits"]["memory"]


def test_a_master_that_ran_out_of_memory_comes_back_with_more_up_to_a_limit() -> None:
    world = running()
    had = [memory_of(world.master)]
    for loss in ("OOMKilled", "Error", "OOMKilled", *["OOMKilled"] * 5):
        assert world.master is not None
        world.now += 100.0
        world.end(world.master, 137, loss)
        world.settle()
        had.append(memory_of(world.master))
    grown = [("256Mi", "2Gi"), ("512Mi", "4096Mi"), ("512Mi", "4096Mi"), ("1024Mi", "8192Mi")]
    assert had[:4] == grown
    assert had[-1] == ("2048Mi", "16384Mi")


def test_one_death_for_want_of_memory_counts_once_however_often_it_is_seen() -> None:
    world = running()
    assert world.master is not None
    world.end(world.master, 137, "OOMKilled")
    seen = copy.deepcopy(world.objects)
    for _ in range(3):
        world.objects = copy.deepcopy(seen)  # the operator's cache may be behind
        world.step()
    assert world.status["master"]["memoryFactor"] == 2.0


def test_a_deleted_master_comes_back_once_it_is_gone() -> None:
    world = running()
    first = world.master
    assert first is not None
    world.delete(first)
    world.settle()
    assert world.master is first, "its name is taken while it ends"
    assert world.status["phase"] == "Restarting"
    world.gone(first)
    world.settle()
    assert world.master is not None
    assert world.master is not first


def test_why_a_master_is_being_deleted_is_shown() -> None:
    world = running()
    assert world.master is not None
    world.delete(world.master)
    world.step()
    assert world.status["message"] == "The master's pod is being deleted."
    drained = {"reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting."}
    world.master["status"]["conditions"] = [
        {"type": "DisruptionTarget", "status": "True", **drained}
    ]
    world.step()
    assert world.status["message"] == (
        "The master's pod is being deleted: EvictionByEvictionAPI: Eviction API: evicting."
    )


def test_a_master_that_ended_its_job_while_it_was_deleted_has_ended_it() -> None:
    world = running()
    assert world.master is not None
    world.delete(world.master)
    world.end(world.master, 0)
    world.settle()
    assert world.status["phase"] == "Succeeded"


def test_a_master_on_a_lost_machine_is_deleted_by_force_after_its_time() -> None:
    world = running()
    assert world.master is not None
    world.delete(world.master)
    world.step()
    assert world.decision.again == 60.0
    world.now += 59.0
    world.settle()
    assert "MasterForced" not in world.events
    world.now += 1.0
    world.settle()
    assert world.events.count("MasterForced") == 1
    assert world.master is not None
    assert "deletionTimestamp" not in world.master["metadata"]


HELD = f"Pod {MASTER} is deleted but for its finalizers, which their controllers have to remove: a.io/one, b.io/two."


@pytest.mark.parametrize("ended", [False, True])
def test_finalizers_that_keep_a_masters_pod_are_named(ended: bool) -> None:
    world = running()
    assert world.master is not None
    world.master["metadata"]["finalizers"] = ["a.io/one", "b.io/two"]
    world.delete(world.master)
    world.settle()
    assert "finalizers" not in world.status["message"], "it may still run"
    if ended:
        world.end(world.master, None, "Evicted")
        world.master["metadata"]["deletionGracePeriodSeconds"] = 0
    else:
        world.now += 60.0
        world.step()
        assert world.events[-1] == "MasterForced"
    for _ in range(3):
        world.now += 100.0
        world.step()
    assert world.decision.delete == ()
    assert world.status["phase"] == "Restarting"
    assert world.status["message"].endswith(f". {HELD}")
    (ready,) = [c for c in world.status["conditions"] if c["type"] == "MasterReady"]
    assert ready["message"].endswith(HELD)
    assert world.events.count("PodHeld") == 1
    world.gone(world.master)
    world.settle()
    assert world.events[-1] == "MasterStarted"


def test_finalizers_that_keep_the_pods_of_a_suspended_job_are_named() -> None:
    world = running()
    assert world.job is not None
    assert world.master is not None
    world.job["spec"]["suspend"] = True
    world.master["metadata"]["finalizers"] = ["a.io/one", "b.io/two"]
    world.settle()
    world.now += 60.0
    world.settle()
    assert world.status["message"] == f"3 pods are ending. {HELD}"
    assert world.events.count("PodHeld") == 1
    world.gone(world.master)
    world.settle()
    assert "finalizers" not in world.status["message"]


def test_a_master_has_a_probe_unless_its_template_brings_a_command_or_a_probe() -> None:
    def probe(**container: Any) -> Any:
        template = {"spec": {"containers": [{"name": "main", **container}]}}
        made = job()
        made["spec"]["replicaSpecs"]["dlrover-master"] = {"template": template}
        pod = objects.master_pod(validation.parse(made), "dlrover:1")
        return pod["spec"]["containers"][0].get("livenessProbe")

    assert probe()["exec"]["command"][0] == "python3"
    assert probe(command=["dlrover", "master"]) is None
    own = {"tcpSocket": {"port": 1}}
    assert probe(livenessProbe=own) == own


def test_a_master_whose_machine_does_not_answer_is_not_said_to_start() -> None:
    """Kubernetes leaves its pod there for its toleration time, minutes, and takes the condition Ready."""
    world = running()
    assert world.master is not None
    world.master["spec"]["nodeName"] = "gpu-7"
    world.master["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    for _ in range(2):
        world.settle()
        assert world.status["phase"] == "Restarting"
        assert world.status["message"] == (
            "The master's pod is no longer ready: it does not answer, or gpu-7 does not."
        )
        world.now += 60.0
    assert world.events.count("MasterNotReady") == 1
    assert world.condition("MasterReady") == "False"
    world.run(world.master)
    world.settle()
    assert world.status["message"] == "2 of 2 workers are running."
    assert world.status["master"]["starts"] == 1
    world.end(world.master, 137)
    world.settle()
    assert world.status["message"] == "The master is starting."


def test_a_master_that_ends_quickly_again_and_again_is_started_later_each_time() -> None:
    world = World()
    waits = []
    for _ in range(8):
        world.settle()
        while world.master is None:
            waits.append(world.decision.again)
            assert world.decision.again is not None
            world.now += world.decision.again
            world.settle()
        world.now += 1.0
        world.end(world.master, 137)
    assert waits == [3.0, 7.0, 15.0, 31.0, 59.0]
    world.settle()
    world.now += 1000.0
    world.settle()
    assert world.status["master"]["quickEnds"] == 0


def test_a_master_comes_back_at_once_though_the_clock_was_set_back() -> None:
    world = running()
    assert world.master is not None
    world.now -= 7200.0
    world.end(world.master, 137)
    world.settle()
    assert (world.status["master"]["starts"], world.status["phase"]) == (2, "Restarting")


@pytest.mark.parametrize("code", [3, 70])
def test_a_master_that_cannot_work_yet_is_tried_some_times_before_the_job_fails(code: int) -> None:
    world = World()
    tries = 0
    while "completionTime" not in world.status:
        world.settle()
        if world.master is None:
            assert world.decision.again is not None
            world.now += world.decision.again
            continue
        if world.status.get("completionTime"):
            break
        tries += 1
        world.end(world.master, code, ran=QUICK - 1)
        world.step()
    assert tries == QUICK_ENDS + 1
    assert world.status["phase"] == "Failed"


@pytest.mark.parametrize(
    ("ran", "tries"), [(QUICK, QUICK_ENDS + 1), (LONG - 1, QUICK_ENDS + 1), (LONG, 20)]
)
def test_a_master_that_fails_again_and_again_fails_its_job_unless_it_works_for_long(
    ran: float, tries: int
) -> None:
    world = World()
    world.settle()
    tried = 0
    while tried < 20 and "completionTime" not in world.status:
        if world.master is None:
            assert world.decision.again is not None
            world.now += world.decision.again
        else:
            tried += 1
            world.now += ran
            world.end(world.master, 70, ran=ran)
        world.settle()
    assert tried == tries
    reasons = [c["reason"] for c in world.status["conditions"] if c["type"] == "Failed"]
    assert reasons == (["Infrastructure"] if tries < 20 else [])


def test_masters_that_are_lost_after_a_minute_do_not_count_with_those_that_fail() -> None:
    world = running()
    for code in (70, 137) * QUICK_ENDS:
        assert world.master is not None
        world.now += QUICK
        world.end(world.master, code, ran=QUICK)
        world.settle()
    assert "completionTime" not in world.status
    assert world.status["master"]["quickEnds"] == 0


def test_a_missing_service_is_made_again() -> None:
    world = running()
    del world.objects["Service", MASTER]
    world.settle()
    assert ("Service", MASTER) in world.objects


EARLIER = {
    "apiVersion": names.API_VERSION, "kind": "ElasticJob", "name": "digits", "uid": "uid-0"
}  # fmt: skip


def foreign_pod(world: World, **owner: str) -> dict[str, Any]:
    """A pod with the name of the master's, which runs."""
    manifest = objects.master_pod(validation.parse(job()), "old")
    manifest["metadata"]["ownerReferences"] = [owner]
    pod = world.create_pod(manifest)
    world.run(pod)
    return pod


def test_the_master_of_an_earlier_job_of_the_name_is_removed() -> None:
    world = World()
    old = foreign_pod(world, **EARLIER)
    world.settle()
    assert "deletionTimestamp" in old["metadata"]
    assert world.master is old
    world.gone(old)
    world.settle()
    assert world.master is not None
    assert world.master["metadata"]["ownerReferences"][0]["uid"] == "uid-1"


def test_the_master_of_an_earlier_job_of_the_name_goes_though_its_machine_is_lost() -> None:
    world = World()
    foreign_pod(world, **EARLIER)
    world.settle()
    world.now += 30.0 + 59.0
    world.settle()
    assert world.status["phase"] == "Pending"
    world.now += 1.0
    world.settle()
    assert world.master is not None
    assert world.master["metadata"]["ownerReferences"][0]["uid"] == "uid-1"


def test_finalizers_that_keep_the_pod_of_an_earlier_job_are_named() -> None:
    world = World()
    old = foreign_pod(world, **EARLIER)
    old["metadata"]["finalizers"] = ["a.io/one", "b.io/two"]
    world.settle()
    old["metadata"]["deletionGracePeriodSeconds"] = 0
    for _ in range(3):
        world.now += 100.0
        world.step()
    assert world.decision.delete == (), "force does not help"
    assert world.status["message"].endswith(f" must be deleted first. {HELD}")
    assert world.events.count("PodHeld") == 1
    world.gone(old)
    world.settle()
    assert world.master is not None
    assert world.master["metadata"]["ownerReferences"][0]["uid"] == "uid-1"


@pytest.mark.parametrize(
    "owner", [{"kind": "ReplicaSet"}, {"apiVersion": "other.io/v1"}, {"name": "letters"}]
)
def test_a_pod_of_somebody_else_with_the_masters_name_has_to_go_first(
    owner: dict[str, str],
) -> None:
    world = World()
    old = foreign_pod(world, **{**EARLIER, **owner})
    world.settle()
    assert world.master is old
    assert "deletionTimestamp" not in old["metadata"], "it is not ours to delete"
    assert world.decision.again == 5.0
    assert "does not belong to this job and must be deleted first." in world.status["message"]
    world.delete(old)
    world.now += 1000.0
    world.settle()
    assert world.master is old, "nor to delete by force"


def test_a_start_that_was_not_written_down_is_remembered() -> None:
    world = World()
    world.settle()
    assert world.job is not None
    del world.job["status"]
    world.now += 30.0
    world.settle()
    assert world.status["master"]["starts"] == 1
    assert world.status["startTime"] == world.status["master"]["lastStartTime"]
    assert world.events.count("MasterStarted") == 2


def test_a_master_that_was_made_late_after_its_decision_counts_once() -> None:
    world = World()
    world.step()
    assert world.master is not None
    late = times.written(world.now + 60.0)  # or by the clock of another machine
    world.master["metadata"]["creationTimestamp"] = late
    world.settle()
    assert world.status["master"]["starts"] == 1
    assert world.events.count("MasterStarted") == 1


@pytest.mark.parametrize("label", [names.JOB_LABEL, names.ROLE_LABEL])
def test_a_master_without_a_label_by_which_it_is_found_is_started_again(label: str) -> None:
    world = running()
    first = world.master
    assert first is not None
    del first["metadata"]["labels"][label]
    world.step()
    assert world.status["message"].startswith(f"The master's pod lost its label {label}")
    world.gone(first)
    world.settle()
    assert world.status["master"]["starts"] == 2
    assert world.events.count("MasterLost") == 1
    assert len(world.workers) == 2
