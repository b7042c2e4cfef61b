"""The operator against a real API server, with masters that are real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api.client import LEASES, Client
from dlrover.kubernetes.machine import scaleplans
from dlrover.kubernetes.operator.leader import Leader, LeaseTerms
from dlrover.kubernetes.platform.reporting import Reporter, duration
from dlrover.kubernetes.resources import names, times, validation
from dlrover.platform.base import Progress
from tests.kubernetes.faults import FaultyServer
from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.manifests import job

SLEEP = ["sleep", "1000"]


def test_the_smallest_manifest_gets_a_master(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with cluster.operator():
            manifest = job()
            manifest["metadata"] = {"name": "digits"}
            cluster.create(manifest)
            await cluster.phase("Pending")
            # the scheduler's own reason
            await cluster.until(lambda: "no nodes available" in cluster.status["message"])
        master = names.master_name("digits")
        pod = cluster.get("pods", master)
        own = names.own_name("digits", cluster.get("elasticjobs", "digits")["metadata"]["uid"])
        assert pod["spec"]["serviceAccountName"] == own
        assert pod["metadata"]["ownerReferences"][0]["kind"] == "ElasticJob"
        assert cluster.get("services", master)["spec"]["ports"][0]["port"] == 50001
        assert cluster.get("secrets", own)["data"]["token"]
        assert cluster.told == {"Accepted": 1, "MasterStarted": 1}

    asyncio.run(scenario())


def test_a_job_may_be_deleted_and_made_again_at_once(
    cluster: Cluster, kubelet: Callable[..., Kubelet]
) -> None:
    kubelet()

    async def scenario() -> None:
        async with cluster.operator():
            for _ in range(3):
                cluster.submit(SLEEP)
                await cluster.until(lambda: cluster.status.get("master", {}).get("starts") == 1)
                path = cluster.path("elasticjobs", "digits")
                cluster.plane.call("DELETE", path, {"propagationPolicy": "Background"})
            cluster.submit(SLEEP)
            await cluster.until(lambda: cluster.status.get("master", {}).get("starts") == 1)
            uid = cluster.get("elasticjobs", "digits")["metadata"]["uid"]

            def owners() -> set[str]:
                made = cluster.list("pods") + cluster.list("services")
                return {one["metadata"]["ownerReferences"][0]["uid"] for one in made}

            # The garbage collector takes its time with a resource that was defined just now.
            await cluster.until(lambda: owners() == {uid}, timeout=90)
            await cluster.until(lambda: len(cluster.list("services")) == 1)
            own = names.own_name("digits", uid)
            assert cluster.get("secrets", own)["data"]["token"]
            assert cluster.get("serviceaccounts", own)

    asyncio.run(scenario())


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_the_operators_clock_may_be_wrong(
    cluster: Cluster,
    kubelet: Callable[..., Kubelet],
    monkeypatch: pytest.MonkeyPatch,
    ahead: float,
) -> None:
    """A master has its time to end, and counts once."""
    kubelet()
    own = time.time
    monkeypatch.setattr(time, "time", lambda: own() + ahead)
    slowly = "trap 'sleep 2; exit 143' TERM; sleep 1000 & wait"

    async def scenario() -> None:
        async with cluster.operator():
            master = cluster.submit(["sh", "-c", slowly], grace=20)
            await cluster.until(lambda: cluster.master_ready(1))
            cluster.plane.call("DELETE", cluster.path("pods", master))
            await cluster.until(lambda: cluster.master_ready(2))
        assert cluster.told["MasterStarted"] == 2
        assert "MasterForced" not in cluster.told

    asyncio.run(scenario())


def test_finalizers_that_keep_a_masters_pod_are_named(
    cluster: Cluster, kubelet: Callable[..., Kubelet]
) -> None:
    kubelet()

    async def scenario() -> None:
        async with cluster.operator():
            master = cluster.path("pods", cluster.submit(SLEEP))
            await cluster.until(lambda: cluster.master_ready(1))
            cluster.plane.call("PATCH", master, {"metadata": {"finalizers": ["a.io/held"]}})
            cluster.plane.call("DELETE", master)
            await cluster.until(lambda: cluster.status["message"].endswith(" remove: a.io/held."))
            await cluster.until(lambda: cluster.told.get("PodHeld") == 1)
            cluster.plane.call("PATCH", master, {"metadata": {"finalizers": None}})
            await cluster.until(lambda: cluster.master_ready(2))
        assert "MasterForced" not in cluster.told

    asyncio.run(scenario())


def test_a_volume_that_the_masters_pod_lacks_is_named(
    cluster: Cluster, kubelet: Callable[..., Kubelet]
) -> None:
    """With the operator's own rights."""
    kubelet()
    manifest = job()
    manifest["metadata"] = {"name": "digits"}
    mounts = [{"name": "data", "mountPath": "/data"}]
    container = {"name": "main", "command": SLEEP, "volumeMounts": mounts}
    volume = {"name": "data", "secret": {"secretName": "absent"}}
    template = {"spec": {"containers": [container], "volumes": [volume]}}
    manifest["spec"]["replicaSpecs"]["dlrover-master"] = {"template": template}

    async def scenario() -> None:
        async with cluster.operator():
            cluster.create(manifest)
            said = f"Pod {names.master_name('digits')} waits: FailedMount: MountVolume.SetUp failed"
            await cluster.until(lambda: cluster.status.get("message", "").startswith(said), 60)
            assert cluster.status["message"].endswith(': secret "absent" not found.')
            cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "absent"}})
            await cluster.until(lambda: cluster.master_ready(1))

    asyncio.run(scenario())


def test_an_unexpected_error_of_a_master_is_not_the_end_of_its_job(
    cluster: Cluster, kubelet: Callable[..., Kubelet]
) -> None:
    """Python's own exit code would blame the training program."""
    kubelet()
    damage = "mkdir ../once && mkdir -p $DLROVER_JOB_DIR/events.jsonl"  # of the first pod
    container = {"name": "main", "image": "train:1", "command": SLEEP}
    worker = {"template": {"spec": {"containers": [container]}}}
    serve = "exec dlrover master --platform kubernetes --port 50001"

    async def scenario() -> None:
        async with cluster.operator():
            cluster.submit(["sh", "-c", f"{damage}; {serve}"], replicaSpecs={"worker": worker})
            await cluster.until(lambda: cluster.master_ready(2), timeout=60)
            messages = [one["message"] for one in cluster.list("events")]
            assert any("ended before its job: IsADirectoryError" in one for one in messages)

    asyncio.run(scenario())


def test_a_wrong_manifest_that_a_server_lets_through_gets_a_sentence(cluster: Cluster) -> None:
    async def scenario() -> None:
        manifest = job()
        manifest["metadata"] = {"name": "digits"}
        manifest["spec"]["replicaSpecs"]["wroker"] = manifest["spec"]["replicaSpecs"].pop("worker")
        cluster.create(manifest)
        async with cluster.operator():
            await cluster.phase("Rejected")
            assert "spec.replicaSpecs is wroker: accepted" in cluster.status["message"]
            await cluster.until(lambda: cluster.told == {"Rejected": 1})
            assert cluster.list("pods") == []
            right = job()["spec"]["replicaSpecs"]
            cluster.change(replicaSpecs={**right, "wroker": None})
            await cluster.phase("Pending")

    asyncio.run(scenario())


@pytest.mark.parametrize("levels", [300, 1500, 5000])
def test_a_job_that_is_nested_deeply_does_not_stop_those_of_others(
    cluster: Cluster, levels: int
) -> None:
    deep = json.dumps(job() | {"metadata": {"name": "deep"}})
    nested = '{"a":' * levels + "1" + "}" * levels
    deep = deep.replace('"image":', f'"x": {nested}, "image":')

    async def scenario() -> None:
        cluster.plane.kubectl("create", "-f", "-", namespace=cluster.namespace, text=deep)
        async with cluster.operator():
            cluster.create(job() | {"metadata": {"name": "digits"}})
            await cluster.phase("Pending")
            await cluster.until(lambda: "Rejected" in cluster.told)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["delete", "kill", "oom", "evict"])
def test_a_master_comes_back(cluster: Cluster, kubelet: Callable[..., Kubelet], how: str) -> None:
    node = kubelet()

    async def scenario() -> None:
        async with cluster.operator():
            master = cluster.submit(SLEEP)
            await cluster.until(lambda: cluster.told.get("MasterReady") == 1)
            first = cluster.get("pods", master)["metadata"]["uid"]
            containers = node.pods[master].containers
            if how == "delete":
                cluster.plane.kubectl("delete", "pod", master, namespace=cluster.namespace)
            elif how == "evict":
                node.evict(master)
            else:
                node.kill(master, reason="OOMKilled" if how == "oom" else "")
            await cluster.until(lambda: cluster.told.get("MasterReady") == 2)
            assert cluster.get("pods", master)["metadata"]["uid"] != first
            assert cluster.status["master"]["starts"] == 2
            for container in containers:
                assert container.process is not None
                container.process.wait(timeout=10)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "phase", "reason"), [(0, "Succeeded", "Succeeded"), (4, "Failed", "NoProgress")]
)
def test_the_masters_exit_code_is_the_jobs(
    cluster: Cluster, kubelet: Callable[..., Kubelet], code: int, phase: str, reason: str
) -> None:
    kubelet()

    async def scenario() -> None:
        async with cluster.operator():
            cluster.submit(["sh", "-c", f"echo no step for 3 restarts; exit {code}"])
            await cluster.phase(phase)
            (ended,) = [c for c in cluster.status["conditions"] if c["type"] == phase]
            assert ended["reason"] == reason
            if code:
                assert cluster.status["message"].endswith("no step for 3 restarts")
            await cluster.until(lambda: cluster.told.get(phase) == 1)

    asyncio.run(scenario())


def test_suspend_resume_and_the_time_after_the_end(
    cluster: Cluster, kubelet: Callable[..., Kubelet]
) -> None:
    kubelet()

    async def scenario() -> None:
        async with cluster.operator():
            cluster.submit(SLEEP, ttlSecondsAfterFinished=2)
            await cluster.until(lambda: cluster.told.get("MasterReady") == 1)
            cluster.change(suspend=True)
            await cluster.until(lambda: cluster.list("pods") == [])
            await cluster.phase("Suspended")
            container = {"name": "main", "command": ["true"]}
            replicas = {"dlrover-master": {"template": {"spec": {"containers": [container]}}}}
            cluster.change(suspend=False, replicaSpecs=replicas)
            await cluster.phase("Succeeded")
            await cluster.until(lambda: cluster.list("elasticjobs") == [])
            await cluster.until(lambda: cluster.list("services") == [])  # by the garbage collector
            await cluster.until(lambda: cluster.list("pods") == [])

    asyncio.run(scenario())


def test_an_operator_that_was_away_finds_what_it_has_to_do(
    cluster: Cluster, kubelet: Callable[..., Kubelet]
) -> None:
    node = kubelet()

    async def scenario() -> None:
        async with cluster.operator():
            master = cluster.submit(SLEEP)
            await cluster.until(lambda: cluster.told.get("MasterReady") == 1)
        node.kill(master)
        await cluster.until(lambda: cluster.get("pods", master)["status"]["phase"] == "Failed")
        async with cluster.operator():
            await cluster.until(lambda: cluster.told.get("MasterReady") == 2)
            assert cluster.status["master"]["starts"] == 2

    asyncio.run(scenario())


def test_an_api_server_that_restarts_loses_nothing(
    cluster: Cluster, kubelet: Callable[..., Kubelet]
) -> None:
    node = kubelet()

    async def scenario() -> None:
        async with cluster.operator():
            master = cluster.submit(SLEEP)
            await cluster.until(lambda: cluster.master_ready(1))
            await asyncio.to_thread(cluster.plane.kill, "kube-apiserver")
            node.kill(master)
            await asyncio.to_thread(cluster.plane.start_api_server)
            await cluster.until(lambda: cluster.master_ready(2), timeout=60)

    asyncio.run(scenario())


def test_a_server_that_refuses_and_loses_answers_gets_one_master_for_each_that_is_lost(
    cluster: Cluster, kubelet: Callable[..., Kubelet], tmp_path: Path
) -> None:
    node = kubelet()
    faulty = FaultyServer(cluster.plane.port, seed=7)
    path = cluster.plane.write_kubeconfig(tmp_path / "faulty", faulty.port, cluster.token)
    path.write_text(path.read_text().replace("https://", "http://"))
    cluster.kubeconfig = str(path)

    async def scenario() -> None:
        async with cluster.operator():
            master = cluster.submit(SLEEP)
            await cluster.until(lambda: cluster.master_ready(1), timeout=60)
            node.kill(master)
            await cluster.until(lambda: cluster.master_ready(2), timeout=60)
            started = [path for path in node.folder.iterdir() if path.name.startswith(master)]
            assert len(started) == 2, "one pod, and one in its place"
            assert {"Accepted", "MasterStarted", "MasterReady", "MasterLost"} <= set(cluster.told)

    try:
        asyncio.run(scenario())
    finally:
        faulty.close()
    assert all(faulty.faults[kind] for kind in ("429", "503", "409", "lost")), faulty.faults


def test_what_the_server_refuses_for_good_is_told(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with cluster.operator():
            manifest = job()
            manifest["metadata"] = {"name": "digits"}
            broken = {"containers": [{"name": "main", "ports": [{"containerPort": 99999}]}]}
            manifest["spec"]["replicaSpecs"]["dlrover-master"] = {"template": {"spec": broken}}
            cluster.create(manifest)
            await cluster.until(lambda: cluster.told == {"Refused": 1})
            message = cluster.status["message"]
            assert "spec.containers[0].ports[0].containerPort" in message
            assert cluster.status["phase"] == "Rejected"
            await asyncio.sleep(3.0)
            assert cluster.told == {"Refused": 1}, "it is tried again, and told once"

    asyncio.run(scenario())


def make_service(cluster: Cluster, name: str) -> None:
    spec = {"selector": {"app": "another"}, "ports": [{"port": 80}]}
    cluster.plane.call("POST", cluster.path("services"), {"metadata": {"name": name}, "spec": spec})


def test_anothers_service_and_pod_of_the_masters_name_are_told_and_survived(
    cluster: Cluster, kubelet: Callable[..., Kubelet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrover.kubernetes.operator.operator.TAKEN_AGAIN", 0.5)
    monkeypatch.setattr("dlrover.kubernetes.machine.reconcile.FOREIGN_CHECK", 0.5)
    kubelet()
    master = names.master_name("digits")
    container = {"name": "main", "image": "another:1", "command": SLEEP}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    make_service(cluster, master)
    cluster.plane.call("POST", cluster.path("pods"), {"metadata": {"name": master}, "spec": spec})

    async def scenario() -> None:
        async with cluster.operator():
            cluster.submit(SLEEP)
            for kind in ("services", "pods"):
                said = f"{kind[:-1].title()} {master} does not belong to this job".lower()
                await cluster.until(
                    lambda said=said: said in cluster.status.get("message", "").lower()
                )
                assert cluster.status["phase"] == "Pending"
                cluster.plane.call("DELETE", cluster.path(kind, master))
            await cluster.until(lambda: cluster.told.get("MasterReady") == 1)
            assert cluster.told["NameTaken"] == 2
            # A master's pod that loses its label is seen no more by nodes: there has to be another one.
            first = cluster.get("pods", master)["metadata"]["uid"]
            labels = {names.JOB_LABEL: None}
            cluster.plane.call(
                "PATCH", cluster.path("pods", master), {"metadata": {"labels": labels}}
            )
            await cluster.until(lambda: cluster.told.get("MasterReady") == 2)
            assert cluster.get("pods", master)["metadata"]["uid"] != first
            events = [event["message"] for event in cluster.list("events")]
            assert any("lost its label" in message for message in events)

    asyncio.run(scenario())


def test_a_plan_goes_with_its_job_and_never_scales_the_next_of_its_name(cluster: Cluster) -> None:
    plans = cluster.path("elasticjobs").replace("elasticjobs", "scaleplans")

    def there() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = cluster.plane.call("GET", plans)["items"]
        return found

    async def scenario() -> None:
        async with cluster.operator():
            spec = {"ownerJob": "digits", "replicaResourceSpecs": {"worker": {"replicas": 4}}}
            plan = {"apiVersion": names.API_VERSION, "kind": "ScalePlan", "spec": spec}
            cluster.submit(SLEEP)
            cluster.create({**plan, "metadata": {"name": "grow"}})
            uid = cluster.get("elasticjobs", "digits")["metadata"]["uid"]
            await cluster.until(lambda: scaleplans.owner_of(there()[0]) == uid)
            path = cluster.path("elasticjobs", "digits")
            cluster.plane.call("DELETE", path, {"propagationPolicy": "Background"})
            await cluster.until(lambda: there() == [], timeout=90)

    asyncio.run(scenario())


def test_one_of_two_operators_works_and_the_other_takes_over(
    cluster: Cluster, kubelet: Callable[..., Kubelet]
) -> None:
    kubelet()

    async def scenario() -> None:
        async with cluster.operator(leader=True) as first:
            master = cluster.submit(SLEEP)
            await cluster.until(lambda: cluster.told.get("MasterReady") == 1)
            async with cluster.operator(leader=True):
                await asyncio.sleep(3.0)
                first.cancel()  # as by SIGTERM: it gives the Lease back
                await asyncio.wait([first])
                began = time.monotonic()
                cluster.plane.kubectl("delete", "pod", master, namespace=cluster.namespace)
                await cluster.until(lambda: cluster.told.get("MasterReady") == 2)
                assert time.monotonic() - began < 15.0, "nobody waits for the Lease to run out"
                assert cluster.status["master"]["starts"] == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0s"),
        (59.4, "59s"),
        (59.6, "1m"),
        (3570.0, "1h00m"),
        (11_520.0, "3h12m"),
        (190_800.0, "2d5h"),
    ],
)
def test_a_duration_is_as_long_as_a_column_is_wide(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_the_masters_part_of_the_status_and_the_operators_do_not_meet(
    cluster: Cluster, kubelet: Callable[..., Kubelet]
) -> None:
    kubelet()
    made = [Progress(steps=120, restarts=1, goodput=0.975, seconds_left=11_520.0)]

    async def scenario() -> None:
        client = Client.from_config(str(cluster.plane.kubeconfig))
        try:
            async with cluster.operator():
                master = cluster.submit(SLEEP)
                await cluster.until(lambda: cluster.told.get("MasterReady") == 1)
                found = validation.parse(cluster.get("elasticjobs", "digits"))
                reporter = Reporter(client, found, lambda: made[0], period=0.1)
                reporting = asyncio.create_task(reporter.run())
                expected = {"steps": 120, "restarts": 1, "goodput": "97.5%", "eta": "3h12m"}
                await cluster.until(lambda: cluster.status.get("training") == expected)
                cluster.plane.kubectl("delete", "pod", master, namespace=cluster.namespace)
                await cluster.until(lambda: cluster.told.get("MasterReady") == 2)
                assert cluster.status["training"] == expected
                reporting.cancel()
                made[0] = Progress(steps=121, restarts=2, goodput=1.0)
                await reporter.close()
                assert cluster.status["training"]["steps"] == 121
                assert "eta" not in cluster.status["training"], "it is not known any more"
        finally:
            await client.close()

    asyncio.run(scenario())


# ---- the Lease


def test_a_lease_is_taken_when_it_ran_out_by_the_clock_of_who_waits(cluster: Cluster) -> None:
    terms = LeaseTerms(duration=2.0, deadline=1.5, renew=0.2)

    async def scenario() -> None:
        client = Client.from_config(cluster.kubeconfig)
        try:
            gone = Leader(client, cluster.namespace, "lease", "gone", terms)
            await gone.acquire()
            lease = await client.get(LEASES, cluster.namespace, "lease")
            lease["spec"]["renewTime"] = times.written_micro(time.time() + 86_400)  # a wrong clock
            await client.replace(LEASES, lease)
            began = time.monotonic()
            heir = Leader(client, cluster.namespace, "lease", "heir", terms)
            await asyncio.wait_for(heir.acquire(), 20)
            assert 2.0 <= time.monotonic() - began < 8.0
            lease = await client.get(LEASES, cluster.namespace, "lease")
            assert lease["spec"]["holderIdentity"] == "heir"
            assert lease["spec"]["leaseTransitions"] == 1
            await asyncio.wait_for(gone.hold(), 10)  # it notices that it leads no more
        finally:
            await client.close()

    asyncio.run(scenario())


def test_a_leader_that_cannot_renew_its_lease_stops(cluster: Cluster) -> None:
    terms = LeaseTerms(duration=4.0, deadline=2.0, renew=0.2)

    async def scenario() -> None:
        client = Client.from_config(cluster.kubeconfig)
        try:
            leader = Leader(client, cluster.namespace, "lease", "one", terms)
            await leader.acquire()
            holding = asyncio.create_task(leader.hold())
            await asyncio.sleep(3.0)
            assert not holding.done()
            cluster.plane.kubectl(
                "delete", "rolebinding", "dlrover-operator-lease", namespace=cluster.namespace
            )
            why = await asyncio.wait_for(holding, 20)
            assert why == f"The Lease {cluster.namespace}/lease could not be renewed for 2 s."
        finally:
            with contextlib.suppress(InfrastructureError):
                await client.close()

    asyncio.run(scenario())


def test_a_time_with_no_microseconds_has_six_digits_all_the_same() -> None:
    assert times.written_micro(1_800_000_000.0) == "2027-01-15T08:00:00.000000Z"
    assert times.read("2027-01-15T08:00:00Z") == 1_800_000_000.0
    assert times.read("soon") is None


def test_the_command_runs_and_ends_by_a_signal(
    cluster: Cluster, kubelet: Callable[..., Kubelet]
) -> None:
    kubelet()
    command = ["dlrover", "operator", "--namespace", cluster.namespace]
    process = subprocess.Popen(
        [*command, "--kubeconfig", cluster.kubeconfig], stderr=subprocess.PIPE, text=True
    )
    try:
        cluster.submit(["true"])
        asyncio.run(cluster.phase("Succeeded"))
        process.terminate()
        _, log = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "All workers succeeded." in log
    path = f"/apis/coordination.k8s.io/v1/namespaces/{cluster.namespace}/leases/dlrover-operator"
    lease: dict[str, Any] = cluster.plane.call("GET", path)
    assert not lease["spec"].get("holderIdentity"), json.dumps(lease)
