"""What was meant for an object never reaches the next one of its name, and a conflict loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.kubernetes.api import client
from dlrover.kubernetes.api.client import ELASTIC_JOBS, LEASES, PODS, SCALE_PLANS, ApiError
from dlrover.kubernetes.machine import objects, pods
from dlrover.kubernetes.machine.decisions import Decision
from dlrover.kubernetes.operator import apply, scaleplans
from dlrover.kubernetes.operator.leader import Leader, LeaseTerms
from dlrover.kubernetes.operator.operator import ByJob
from dlrover.kubernetes.operator.scaleplans import ScalePlans
from dlrover.kubernetes.platform import job as jobs, platform, reporting, scaling
from dlrover.kubernetes.platform.platform import KubernetesPlatform
from dlrover.kubernetes.platform.reporting import Reporter
from dlrover.kubernetes.platform.scaling import Scaler
from dlrover.kubernetes.resources import names, times, validation
from dlrover.kubernetes.resources.types import ElasticJob, ElasticJobStatus
from dlrover.platform.base import Progress, RoleSize
from dlrover.rpc.messages import ScaleReply
from dlrover.spec.node import LaunchNode
from tests.kubernetes import manifests
from tests.kubernetes.memory import MemoryServer, stop, until

Manifest = dict[str, Any]
Conflict = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = {
        reporting: ["PERIOD", "SHORTEST_PERIOD"],
        scaleplans: ["RETRY"],
        scaling: ["POLL"],
    }
    for module, settings in waits.items():
        for setting in settings:
            monkeypatch.setattr(module, setting, 0.001)
    monkeypatch.setattr(client, "CONFLICT_RETRY", (0.001, 0.001))
    monkeypatch.setattr(platform, "RETRY", (0.001, 15.0))


def submit(server: MemoryServer) -> ElasticJob:
    return validation.parse(server.put(ELASTIC_JOBS, manifests.job()))


def again(server: MemoryServer) -> ElasticJob:
    """The job is deleted, and another one of its name is made."""
    server.remove(ELASTIC_JOBS, "digits")
    return submit(server)


def conflicts(server: MemoryServer, times: int, path: str) -> Conflict:
    """So often the server answers 409 to who writes at ``path``."""
    left = [times]

    def before(method: str, called: str) -> None:
        if method in ("PATCH", "POST") and called.endswith(path) and left[0]:
            left[0] -= 1
            raise ApiError(409, "Conflict", "others changed it")

    return before


def status(server: MemoryServer, plan: str = "") -> Manifest:
    found = server.there(SCALE_PLANS, plan) if plan else server.there(ELASTIC_JOBS, "digits")
    return dict(found.get("status") or {})


def test_a_master_that_comes_late_is_not_the_next_jobs() -> None:
    async def story() -> None:
        server = MemoryServer()
        first = submit(server)
        env = objects.master_pod(first, "dlrover:1")["spec"]["containers"][0]["env"]
        known = {one["name"]: one["value"] for one in env if "value" in one}
        assert (await jobs.read(server, known)).uid == first.uid
        again(server)
        with pytest.raises(ConfigurationError, match="was deleted; another one now has its name"):
            await jobs.read(server, known)

    asyncio.run(story())


# ---- the status of a job


def reporter(server: MemoryServer, job: ElasticJob) -> Reporter:
    done = Progress(steps=7, restarts=1, goodput=0.5)
    return Reporter(server, job, lambda: done, period=0.001)


def test_a_late_report_is_not_the_next_jobs() -> None:
    async def story() -> None:
        server = MemoryServer()
        first = reporter(server, submit(server))
        again(server)
        await first.close()
        assert status(server) == {}

    asyncio.run(story())


def test_a_job_that_is_replaced_in_the_midst_of_a_report_gets_none() -> None:
    async def story() -> None:
        server = MemoryServer()
        first = reporter(server, submit(server))

        def before(method: str, _path: str) -> None:
            if method == "PATCH":
                server.before = lambda *_: None
                again(server)

        server.before = before
        await first.close()
        assert status(server) == {}

    asyncio.run(story())


def test_what_an_earlier_job_has_trained_is_not_the_next_jobs() -> None:
    async def story() -> None:
        server = MemoryServer()
        submit(server)
        earlier = {"jobUid": "another", "phase": "Running", "training": {"restarts": 3}}
        server.change(ELASTIC_JOBS, "digits", status=earlier)
        job = server.there(ELASTIC_JOBS, "digits")
        decision = Decision(status=ElasticJobStatus(phase="Created"))
        await apply.carry_out(server, job, decision)
        assert "training" not in status(server)

    asyncio.run(story())


def test_a_report_that_meets_a_conflict_is_written() -> None:
    async def story() -> None:
        server = MemoryServer()
        one = reporter(server, submit(server))
        server.before = conflicts(server, 2, "/status")
        await one.close()
        assert status(server)["training"]["steps"] == 7

    asyncio.run(story())


def test_a_server_that_is_away_does_not_end_the_reports() -> None:
    async def story() -> None:
        server = MemoryServer()
        one = reporter(server, submit(server))

        def away(_method: str, _path: str) -> None:
            raise InfrastructureError("The server does not answer.")

        server.before = away
        one.waits("Pod a: its pod cannot be created.")
        running = asyncio.create_task(one.run())
        await until(lambda: server.calls)
        server.before = lambda *_: None
        await until(lambda: len(server.calls) > 1 or running.done())
        assert not running.done()
        await stop(running)

    asyncio.run(story())


# ---- scaling


class Numbers:
    """How many workers a job is to have, as its master keeps it."""

    def __init__(self, workers: int = 2) -> None:
        self.size = RoleSize(workers, workers, complete=False, waits_for="", plans=0, reason="")

    def scale(
        self,
        number: int,
        reason: str,
        source: Literal["user", "plan"],
        _role: str,
        _factors: tuple[float, float],
    ) -> ScaleReply:
        plans = self.size.plans + (source == "plan")
        asked = number if source == "user" else self.size.requested
        self.size = self.size._replace(wanted=number, requested=asked, plans=plans, reason=reason)
        return ScaleReply(f"The job will have {number} nodes.")


@contextlib.asynccontextmanager
async def scaler(server: MemoryServer, job: ElasticJob, numbers: Numbers) -> AsyncIterator[Scaler]:
    calls: Any = SimpleNamespace(
        size=lambda _role: numbers.size,
        ask_scale=numbers.scale,
        placed=dict,
        ask_migrate=lambda *_: "",
    )
    one = Scaler(server, job, calls, lambda _role, _number: None)
    running = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        await stop(running)


def plan(
    server: MemoryServer, name: str = "grow", scale_type: str = "manual", **spec: Any
) -> Manifest:
    workers = {"replicaResourceSpecs": {"worker": {"replicas": 4}}}
    metadata = {"name": name, "labels": {"scale-type": scale_type}}
    manifest = {"metadata": metadata, "spec": {"ownerJob": "digits", **(spec or workers)}}
    return server.put(SCALE_PLANS, manifest)


@pytest.mark.parametrize("times", [1, 20])
@pytest.mark.parametrize("path", ["scaleplans/grow/status", "elasticjobs/digits/scale"])
def test_a_conflict_loses_nothing_of_a_plan(path: str, times: int) -> None:
    async def story() -> None:
        server = MemoryServer()
        job, numbers = submit(server), Numbers()
        server.before = conflicts(server, times, path)
        async with scaler(server, job, numbers):
            plan(server)
            await until(lambda: status(server, "grow").get("phase") == "Scaling")
            await until(lambda: replicas(server) == 4)

    asyncio.run(story())


def test_a_number_that_a_user_sets_while_a_plan_begins_is_kept() -> None:
    """It would be lost if the plan's number were written over it."""

    async def story() -> None:
        server = MemoryServer()
        job, numbers = submit(server), Numbers()
        set_once = False

        def user(method: str, path: str) -> None:
            nonlocal set_once
            if method == "PATCH" and path.endswith("elasticjobs/digits/scale") and not set_once:
                set_once = True
                spec = {"replicaSpecs": {"worker": {"replicas": 3}}}
                server.change(ELASTIC_JOBS, "digits", spec=spec)

        server.before = user
        async with scaler(server, job, numbers):
            plan(server)
            await until(lambda: numbers.size.wanted == 3)
            await until(lambda: status(server, "grow").get("phase") == "Failed")
        assert replicas(server) == 3
        assert "Another request has changed the job" in status(server, "grow")["message"]

    asyncio.run(story())


def replicas(server: MemoryServer) -> int:
    worker = server.there(ELASTIC_JOBS, "digits")["spec"]["replicaSpecs"]["worker"]
    return int(worker["replicas"])


def test_a_plan_is_taken_up_once_a_wrong_manifest_is_right_again() -> None:
    async def story() -> None:
        server = MemoryServer()
        job, numbers = submit(server), Numbers()

        def change(replicas: int) -> None:
            spec = {"replicaSpecs": {"worker": {"replicas": replicas}}}
            server.change(ELASTIC_JOBS, "digits", spec=spec)

        async with scaler(server, job, numbers):
            await asyncio.sleep(0.02)  # both watches wait: of the manifest, and of plans
            change(0)
            await asyncio.sleep(0.02)
            plan(server)
            await asyncio.sleep(0.02)
            assert status(server, "grow") == {}
            change(2)
            await until(lambda: status(server, "grow").get("phase") == "Scaling")

    asyncio.run(story())


def test_what_is_said_of_a_plan_is_not_said_of_the_next_of_its_name() -> None:
    async def story() -> None:
        server = MemoryServer()
        job, numbers = submit(server), Numbers()
        async with scaler(server, job, numbers):
            plan(server)
            await until(lambda: replicas(server) == 4)
            server.silent = True
            server.remove(SCALE_PLANS, "grow")
            plan(server, replicaResourceSpecs={"worker": {"replicas": 5}})
            numbers.size = numbers.size._replace(complete=True)
            await asyncio.sleep(0.02)
            assert status(server, "grow") == {}, "it is not the one that has succeeded"
            server.speak()
            await until(lambda: replicas(server) == 5)

    asyncio.run(story())


def test_the_number_of_a_plan_is_not_written_into_the_next_job_of_the_name() -> None:
    async def story() -> None:
        server = MemoryServer()
        job, numbers = submit(server), Numbers()

        def before(method: str, path: str) -> None:
            if method == "PATCH" and path.endswith("/grow/status"):
                server.before = lambda *_: None
                again(server)

        server.before = before
        async with scaler(server, job, numbers):
            plan(server)
            await until(lambda: numbers.size.wanted == 4)
            await asyncio.sleep(0.02)
        assert replicas(server) == 2

    asyncio.run(story())


@pytest.mark.parametrize("lost", [False, True])
def test_a_plan_of_the_masters_own_is_recorded_once_though_a_call_fails(lost: bool) -> None:
    async def story() -> None:
        server = MemoryServer()
        job, numbers = submit(server), Numbers(4)
        post, failures = server._post, [2]

        def fail(path: str, body: Manifest) -> Manifest:
            if not path.endswith("scaleplans") or not failures[0]:
                return post(path, body)
            failures[0] -= 1
            if lost:
                post(path, body)
            raise InfrastructureError("The server does not answer.")

        server._post = fail  # type: ignore[method-assign]
        async with scaler(server, job, numbers):
            await until(lambda: server.calls)
            await asyncio.sleep(0.01)
            numbers.scale(3, "The fourth adds nothing.", "plan", "worker", (1.0, 1.0))
            await until(lambda: "/scaleplans/" in str(server.objects))
            (made,) = [path for path in server.objects if "/scaleplans/" in path]
            await until(lambda: status(server, made.rpartition("/")[2]).get("phase") == "Scaling")
            await asyncio.sleep(0.02)
            assert sum("/scaleplans/" in path for path in server.objects) == 1

    asyncio.run(story())


def test_a_plan_for_one_pod_more_adds_one_though_its_master_is_lost_in_the_midst() -> None:
    async def story() -> None:
        server = MemoryServer()
        job, numbers = submit(server), Numbers()

        def lost(_method: str, _path: str) -> None:
            if numbers.size.wanted == 3:
                raise InfrastructureError("The server does not answer.")

        server.before = lost
        plan(server, scale_type="auto", createPods=[{}])
        async with scaler(server, job, numbers):
            await until(lambda: numbers.size.wanted == 3)
        server.before = lambda *_: None
        async with scaler(server, job, numbers):  # the next master, with the journal
            await until(lambda: status(server, "grow").get("phase") == "Scaling")
        assert numbers.size.wanted == 3

    asyncio.run(story())


def test_the_times_of_a_plan_are_the_api_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the next master may differ from that of the last one by more than the plan's time."""
    monkeypatch.setattr(scaling, "PLAN_TIMEOUT", 1000.0)

    async def story() -> None:
        server = MemoryServer()

        def since(time: str) -> float:
            return server.server_time() - (times.read(time) or 0.0)

        job, numbers = submit(server), Numbers()
        plan(server)
        async with scaler(server, job, numbers):
            await until(lambda: replicas(server) == 4)
        began = {"createTime": times.written(server.server_time() - 2000.0)}
        server.change(SCALE_PLANS, "grow", status=began)
        server.ahead = -2000.0
        async with scaler(server, job, numbers):
            await asyncio.sleep(0.02)
            assert status(server, "grow")["phase"] == "Scaling"
            plan(server, "later", replicaResourceSpecs={"worker": {"replicas": 5}})
            numbers.size = numbers.size._replace(complete=True)
            await until(lambda: status(server, "later"))
        assert status(server, "grow")["phase"] == "Succeeded"
        ended = [one for one in server.objects.values() if one.get("reason") == "Scaled"]
        for time in (
            status(server, "grow")["finishTime"],
            status(server, "later")["createTime"],
            ended[0]["lastTimestamp"],
        ):
            assert abs(since(time)) < 60.0

    asyncio.run(story())


# ---- plans of an earlier job


def test_a_master_leaves_a_plan_alone_that_is_older_than_its_job() -> None:
    async def story() -> None:
        server = MemoryServer()
        submit(server)
        plan(server)
        server.now += 1.0
        job, numbers = again(server), Numbers()
        async with scaler(server, job, numbers):
            plan(server, "newer", replicaResourceSpecs={"worker": {"replicas": 3}})
            await until(lambda: replicas(server) == 3)
        assert status(server, "grow") == {}

    asyncio.run(story())


def test_a_master_leaves_a_plan_alone_that_is_for_the_next_job_of_its_name() -> None:
    async def story() -> None:
        server = MemoryServer()
        job, numbers = submit(server), Numbers()
        async with scaler(server, job, numbers):
            await asyncio.sleep(0.01)
            server.silent = True
            server.now += 1.0
            again(server)
            made = plan(server)
            server.silent = False
            server._log[-3:-1] = []  # the watch of the plans is the quicker one
            server.speak()
            await asyncio.sleep(0.02)
            assert numbers.size.wanted == 2
            assert status(server, made["metadata"]["name"]) == {}

    asyncio.run(story())


@contextlib.asynccontextmanager
async def operator(server: MemoryServer) -> AsyncIterator[None]:
    def job(key: str) -> Manifest | None:
        return server.objects.get(ELASTIC_JOBS.path(*key.split("/")))

    one = ScalePlans(server, "default", job)
    running = asyncio.create_task(one.run())
    try:
        yield
    finally:
        await stop(running)


def test_the_operator_refuses_a_plan_that_is_older_than_the_job() -> None:
    async def story() -> None:
        server = MemoryServer()
        submit(server)
        plan(server)
        server.now += 1.0
        again(server)
        async with operator(server):
            await until(lambda: status(server, "grow").get("phase") == "Failed")
        assert status(server, "grow")["message"] == (
            "The plan is older than the ElasticJob digits: create the plan again."
        )
        assert "ownerReferences" not in server.there(SCALE_PLANS, "grow")["metadata"]

    asyncio.run(story())


def test_the_operator_makes_a_plan_its_jobs_despite_conflicts() -> None:
    async def story() -> None:
        server = MemoryServer()
        job = submit(server)
        server.before = conflicts(server, 2, "scaleplans/grow")
        plan(server)
        async with operator(server):
            await until(lambda: status(server, "grow").get("phase") == "Pending")
        references = server.there(SCALE_PLANS, "grow")["metadata"]["ownerReferences"]
        assert [one["uid"] for one in references] == [job.metadata["uid"]]

    asyncio.run(story())


# ---- pods


class Nodes:
    """A job's platform, and what it said of its nodes."""

    def __init__(self, server: MemoryServer, job: ElasticJob) -> None:
        self.exits: dict[int, str] = {}
        self.waits: list[str] = []
        self.removed: list[int] = []
        self.platform = KubernetesPlatform(server, job, "m:1", self._ended, self._waits)

    def _ended(
        self,
        node_id: int,
        reason: str,
        /,
        *,
        exit_code: int = 0,
        refused: bool = False,
        removed: bool = False,
    ) -> None:
        assert node_id not in self.exits, "reported once"
        self.exits[node_id] = reason
        self.removed += [node_id] if removed else []

    def _waits(self, _node_id: int, reason: str) -> None:
        self.waits += [reason] if reason else []


@contextlib.asynccontextmanager
async def watched(server: MemoryServer, job: ElasticJob) -> AsyncIterator[Nodes]:
    nodes = Nodes(server, job)
    await nodes.platform.start()
    try:
        yield nodes
    finally:
        server.before = lambda *_: None
        await nodes.platform.close()


POD = "digits-edljob-worker-0"
FAILED = {"phase": "Failed", "containerStatuses": [{"name": "main", "state": {}}]}


def uid(server: MemoryServer) -> str:
    """That of the pod that has the name now; empty while there is none."""
    found = server.objects.get(PODS.path("default", POD))
    return str(found["metadata"]["uid"]) if found else ""


def test_the_end_of_an_earlier_pod_is_not_the_end_of_the_next_one() -> None:
    """The informer has not seen yet that the pod of an earlier run has gone, nor the one that was made."""

    async def story() -> None:
        server = MemoryServer()
        job = submit(server)
        async with watched(server, job) as nodes:
            nodes.platform.launch(LaunchNode(0, 0))
            await until(lambda: POD in str(server.objects))
        server.change(PODS, POD, status=FAILED)
        async with watched(server, job) as nodes:
            server.silent = True
            server.remove(PODS, POD)
            nodes.platform.launch(LaunchNode(0, 0))
            await until(lambda: POD in str(server.objects))
            await asyncio.sleep(0.01)
            assert nodes.exits == {}
            server.speak()
            await asyncio.sleep(0.01)
            assert nodes.exits == {}
            server.remove(PODS, POD)
            await until(lambda: nodes.exits)
            assert nodes.exits == {0: "its pod was deleted"}

    asyncio.run(story())


def test_a_pod_that_another_has_the_name_of_was_deleted() -> None:
    """Both happen between two looks of the informer."""

    async def story() -> None:
        server = MemoryServer()
        job = submit(server)
        async with watched(server, job) as nodes:
            nodes.platform.launch(LaunchNode(0, 0))
            await until(lambda: POD in str(server.objects))
            await asyncio.sleep(0.01)
            pod = server.there(PODS, POD)
            server.silent = True
            server.remove(PODS, POD)
            server.put(PODS, pod)
            del server._log[-2]
            server.speak()
            await until(lambda: nodes.exits)
            assert nodes.exits == {0: "its pod was deleted"}

    asyncio.run(story())


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_pod_on_a_lost_machine_does_not_keep_its_name_for_ever(
    earlier: bool, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The master that had made it is lost with the same machine, and its successor has no journal."""

    async def story() -> None:
        server = MemoryServer()
        job = submit(server)
        async with watched(server, job) as nodes:
            nodes.platform.launch(LaunchNode(0, 0))
            await until(lambda: POD in str(server.objects))
        server.ahead = 7200.0 if late else -7200.0
        since = server.server_time() - pods.FORCE_AFTER + (-1.0 if late else 20.0)
        server.change(PODS, POD, metadata={"deletionTimestamp": times.written(since)})
        lost = uid(server)
        async with watched(server, again(server) if earlier else job) as nodes:
            assert nodes.platform.find() == []
            nodes.platform.launch(LaunchNode(0, 0))
            if late:
                await until(lambda: uid(server) not in ("", lost))
            else:
                await asyncio.sleep(0.05)
                assert uid(server) == lost
            assert nodes.exits == {}
        warned = [one.message for one in caplog.records if one.levelname == "WARNING"]
        assert (
            warned
            == [f"Pod {POD} did not end in time and is deleted by force; its machine may be lost."]
            * late
        )

    asyncio.run(story())


def test_a_pod_that_finalizers_keep_is_deleted_by_force_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "SWEEP_INTERVAL", 0.01)
    monkeypatch.setattr(pods, "FORCE_AFTER", 0.0)

    async def story() -> None:
        server = MemoryServer()
        deletion = ("DELETE", PODS.path("default", POD))

        def keep(*call: str) -> None:
            if call == deletion:
                server.change(PODS, POD, metadata={"deletionGracePeriodSeconds": 0})
                raise ApiError(500, "", "it stays")

        server.before = keep
        async with watched(server, submit(server)) as nodes:
            nodes.platform.launch(LaunchNode(0, 0))
            await until(lambda: POD in str(server.objects))
            since = {"deletionTimestamp": times.written(server.now), "finalizers": ["a.io/one"]}
            server.change(PODS, POD, metadata={**since, "deletionGracePeriodSeconds": 0.01})
            await until(lambda: deletion in server.calls)
            await asyncio.sleep(0.1)
            assert server.calls.count(deletion) == 1

    asyncio.run(story())
    assert sum("is deleted by force" in one.message for one in caplog.records) == 1


def test_a_node_that_ended_beside_a_container_that_runs_on_leaves_its_name() -> None:
    """That of a service mesh keeps its pod running; a master without a journal uses the name again."""

    async def story() -> None:
        server = MemoryServer()
        job = submit(server)
        async with watched(server, job) as nodes:
            nodes.platform.launch(LaunchNode(0, 0))
            await until(lambda: POD in str(server.objects))
        ended = {"name": "main", "state": {"terminated": {"exitCode": 1}}}
        beside = {"name": "mesh", "state": {"running": {}}}
        status = {"phase": "Running", "containerStatuses": [ended, beside]}
        server.change(PODS, POD, status=status)
        first = uid(server)
        async with watched(server, job) as nodes:
            nodes.platform.launch(LaunchNode(0, 0))
            await until(lambda: uid(server) not in ("", first))
            assert nodes.exits == {}

    asyncio.run(story())


@pytest.mark.parametrize("known", [True, False])
def test_a_master_ends_no_pod_of_the_next_job_of_its_name(known: bool) -> None:
    async def story() -> None:
        server = MemoryServer()
        job = submit(server)
        async with watched(server, job) as nodes:
            nodes.platform.launch(LaunchNode(0, 0))
            await until(lambda: POD in str(server.objects))
            await asyncio.sleep(0.01)
            server.silent = not known
            server.remove(PODS, POD)
            async with watched(server, again(server)) as others:
                others.platform.launch(LaunchNode(0, 0))
                await until(lambda: POD in str(server.objects))
                await asyncio.sleep(0.01)
                nodes.platform.kill(POD)
                await asyncio.sleep(0.02)
                assert POD in str(server.objects)
                assert others.exits == {}

    asyncio.run(story())


def test_a_master_adopts_no_pod_of_another_job_of_its_name() -> None:
    async def story() -> None:
        server = MemoryServer()
        async with watched(server, submit(server)) as nodes:
            nodes.platform.launch(LaunchNode(0, 0))
            await until(lambda: POD in str(server.objects))
        async with watched(server, again(server)) as nodes:
            nodes.platform.adopt(0, POD)
            await until(lambda: nodes.exits)
            assert nodes.exits == {0: "its pod was deleted while the master was down"}

    asyncio.run(story())


@pytest.mark.parametrize("status", [401, 409])
def test_a_pod_whose_deletion_is_refused_for_now_is_deleted_later(status: int) -> None:
    async def story() -> None:
        server = MemoryServer()
        async with watched(server, submit(server)) as nodes:
            nodes.platform.launch(LaunchNode(0, 0))
            await until(lambda: POD in str(server.objects))
            await asyncio.sleep(0.01)
            left = [2]

            def before(method: str, _path: str) -> None:
                if method == "DELETE" and left[0]:
                    left[0] -= 1
                    raise ApiError(status, "Conflict", "not now")

            server.before = before
            nodes.platform.kill(POD)
            await until(lambda: POD not in str(server.objects))

    asyncio.run(story())


def test_a_node_whose_pod_loses_its_label_leaves_no_pod_that_is_unwatched() -> None:
    async def story() -> None:
        server = MemoryServer()
        async with watched(server, submit(server)) as nodes:
            nodes.platform.launch(LaunchNode(0, 0))
            await until(lambda: POD in str(server.objects))
            await asyncio.sleep(0.01)
            server.change(PODS, POD, metadata={"labels": {names.JOB_LABEL: "letters"}})
            await until(lambda: nodes.exits)
            await until(lambda: POD not in str(server.objects))
            assert nodes.exits == {0: "its pod was deleted"}

    asyncio.run(story())


def test_a_pod_that_gets_the_label_of_another_job_is_news_for_both() -> None:
    async def story() -> None:
        server = MemoryServer()
        told: list[str] = []
        pods = ByJob(server, PODS, "default", told.append)
        running = asyncio.create_task(pods.informer.run())
        server.put(PODS, {"metadata": {"name": "a", "labels": {names.JOB_LABEL: "digits"}}})
        await until(lambda: told == ["default/digits"])
        server.change(PODS, "a", metadata={"labels": {names.JOB_LABEL: "letters"}})
        await until(lambda: "default/letters" in told)
        assert told[1:] == ["default/digits", "default/letters"]
        assert pods.of("default/digits") == []
        assert len(pods.of("default/letters")) == 1
        await stop(running)

    asyncio.run(story())


# ---- the Lease


def test_a_leader_whose_lease_another_took_names_it() -> None:
    async def story() -> None:
        server = MemoryServer()
        leader = Leader(server, "default", "lease", "me", LeaseTerms(renew=0.001))
        await leader.acquire()
        server.change(LEASES, "lease", spec={"holderIdentity": "operator-b"})
        why = await leader.hold()
        assert why == "The Lease default/lease belongs to another operator, operator-b."

    asyncio.run(story())


def test_a_leader_that_took_a_lease_outlasts_a_renewal_that_fails() -> None:
    """The first one, before it has read its own Lease."""

    async def story() -> None:
        server = MemoryServer()
        spec = {"holderIdentity": "old", "leaseDurationSeconds": 1}
        server.put(LEASES, {"metadata": {"name": "lease"}, "spec": spec})
        now = 0.0
        leader = Leader(
            server, "default", "lease", "me", LeaseTerms(renew=0.001), clock=lambda: now
        )
        assert not await leader._attempt()
        now = 2.0
        await leader.acquire()
        failed = 0

        def away(_method: str, _path: str) -> None:
            nonlocal failed
            failed += 1
            if failed == 1:
                raise InfrastructureError("The API server is away.")

        server.before = away
        holding = asyncio.create_task(leader.hold())
        await until(lambda: failed > 4 or holding.done())
        assert not holding.done()
        await stop(holding)

    asyncio.run(story())


def test_a_lease_is_given_back_though_a_renewal_is_under_way() -> None:
    async def story() -> None:
        server = MemoryServer()
        leader = Leader(server, "default", "lease", "me")
        await leader.acquire()

        def renewed(method: str, _path: str) -> None:
            if method == "PUT":
                server.before = lambda *_: None
                server.change(LEASES, "lease", spec={"renewTime": "now"})

        server.before = renewed
        await leader.release()
        assert server.there(LEASES, "lease")["spec"]["holderIdentity"] == ""

    asyncio.run(story())


def test_pods_that_the_cluster_removes_at_once_are_made_ever_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delays = [0.0, 0.0, 0.005, 0.01, 0.02]
    monkeypatch.setattr(pods, "delay", delays.__getitem__)
    rejected = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "No device."}

    async def story() -> None:
        server = MemoryServer()
        async with watched(server, submit(server)) as nodes:
            for number in range(4):
                nodes.platform.launch(LaunchNode(number, 0))
                name = f"digits-edljob-worker-{number}"
                await until(lambda name=name: name in str(server.objects))
                server.change(PODS, name, status=rejected)
                await until(lambda number=number: number in nodes.exits)
            nodes.platform.launch(LaunchNode(9, 1))
            await until(lambda: "digits-edljob-worker-9" in str(server.objects))
            assert nodes.removed == [0, 1, 2, 3]
            why = "its pod failed: UnexpectedAdmissionError: No device"
            assert nodes.waits == [
                f"it is made after {delays[count]} s: {count} pods in its place were removed at once, the last one "
                f"because {why}"
                for count in (2, 3)
            ]

    asyncio.run(story())


def test_a_pod_that_ends_by_itself_lets_the_count_of_removed_ones_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pods, "delay", {0: 0.0, 1: 0.0}.__getitem__)
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "Low on resource: memory."}

    async def story() -> None:
        server = MemoryServer()
        async with watched(server, submit(server)) as nodes:
            for number, end in enumerate([evicted, FAILED, evicted, FAILED, evicted, FAILED]):
                nodes.platform.launch(LaunchNode(number, 0))
                name = f"digits-edljob-worker-{number}"
                await until(lambda name=name: name in str(server.objects))
                server.change(PODS, name, status=end)
                await until(lambda number=number: number in nodes.exits)
            assert nodes.removed == [0, 2, 4]

    asyncio.run(story())


def test_pods_that_the_master_ends_are_not_removed_by_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delays = [0.0, 0.0, 1000.0]
    monkeypatch.setattr(pods, "delay", delays.__getitem__)
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "Low on resource: memory."}

    async def story() -> None:
        server = MemoryServer()
        async with watched(server, submit(server)) as nodes:

            async def made(number: int) -> str:
                name = nodes.platform.launch(LaunchNode(number, 0))
                await until(lambda: name in str(server.objects))
                return name

            for number in range(3):
                nodes.platform.kill(await made(number))
                await until(lambda number=number: number in nodes.exits)
            for number in (3, 4):
                server.change(PODS, await made(number), status=evicted)
                await until(lambda number=number: number in nodes.exits)
            assert nodes.waits == []
            for number in (5, 6):
                waiting = nodes.platform.launch(LaunchNode(number, 0))
                await until(lambda number=number: len(nodes.waits) == number - 4)
                nodes.platform.kill(waiting)
                await until(lambda number=number: number in nodes.exits)
            assert nodes.exits[6] == "it was no longer wanted"
            assert "2 pods in its place were removed at once" in nodes.waits[1]

    asyncio.run(story())
