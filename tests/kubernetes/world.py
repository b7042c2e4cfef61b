"""A cluster in memory that carries out the operator's decisions on a virtual clock."""

from __future__ import annotations

import copy
from typing import Any

from dlrover.kubernetes.api.elasticjobs import status_patch
from dlrover.kubernetes.machine.decisions import Decision, Observed
from dlrover.kubernetes.machine.reconcile import reconcile
from dlrover.kubernetes.machine.yielding import Claim
from dlrover.kubernetes.resources import names, times
from tests.kubernetes.manifests import Manifest, job

START = 1_800_000_000.0


class World:
    """One job. An object's name is taken while it exists, as in a real cluster."""

    def __init__(self, manifest: Manifest | None = None) -> None:
        self.now = START
        self.job: Manifest | None = copy.deepcopy(manifest or job())
        self.job["metadata"].setdefault("creationTimestamp", times.written(START))
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.events: list[str] = []
        self.uids = 0
        self.decision = Decision()
        self.rivals: list[Claim] = []
        self.parent: Manifest | None = None
        self.noticed: dict[str, str] = {}

    @property
    def master(self) -> Manifest | None:
        return self.objects.get(("Pod", names.master_name(self.name)))

    @property
    def name(self) -> str:
        return "digits"

    @property
    def status(self) -> dict[str, Any]:
        assert self.job is not None
        return self.job.get("status", {})

    @property
    def workers(self) -> list[Manifest]:
        return [pod for pod in self.pods if pod is not self.master]

    @property
    def pods(self) -> list[Manifest]:
        return [o for (kind, _), o in self.objects.items() if kind == "Pod"]

    def condition(self, kind: str) -> str:
        return next((c["status"] for c in self.status["conditions"] if c["type"] == kind), "")

    # ---- the operator

    def step(self) -> Decision:
        """Reconcile once and carry it out."""
        if self.job is None:
            return Decision()
        service = self.objects.get(("Service", names.master_name(self.name)))
        seen = Observed(
            copy.deepcopy(self.job),
            copy.deepcopy(self.pods),
            service,
            self.rivals,
            self.noticed,
            self.parent,
        )
        before = copy.deepcopy(self.objects)
        self.decision = reconcile(seen, self.now, "dlrover:1", f"token-{self.uids}")
        assert self.objects == before
        self._apply(self.decision)
        return self.decision

    def settle(self, steps: int = 20) -> None:
        """Reconcile until nothing changes any more; time stands still."""
        for _ in range(steps):
            before = copy.deepcopy((self.job, self.objects))
            self.step()
            if before == (self.job, self.objects):
                return
        raise AssertionError(f"It does not converge: {self.status}")

    def _apply(self, decision: Decision) -> None:
        secret = [decision.certificate.secret] if decision.certificate is not None else []
        for made in [*decision.ensure, *secret]:
            self.objects.setdefault((made["kind"], made["metadata"]["name"]), copy.deepcopy(made))
        if decision.start is not None:
            self.create_pod(decision.start)
        for gone in decision.delete:
            if gone.kind == "ElasticJob":
                self.job = None
                self.objects.clear()
                return
            pod = self.objects[gone.kind, gone.name]
            assert pod["metadata"]["uid"] == gone.uid
            self.delete(pod, force=gone.grace == 0)
        if decision.status is not None and self.job is not None:
            patch = status_patch(self.job.get("status"), decision.status) or {}
            self.job["status"] = merge(self.job.get("status"), patch)
        self.events += [event.reason for event in decision.events]

    # ---- the cluster

    def create_pod(self, pod: Manifest) -> Manifest:
        key = ("Pod", pod["metadata"]["name"])
        assert key not in self.objects, "the API server refuses a second pod of one name"
        self.uids += 1
        made = copy.deepcopy(pod)
        made["metadata"]["uid"] = f"pod-{self.uids}"
        made["metadata"]["creationTimestamp"] = times.written(self.now)
        made["status"] = {"phase": "Pending"}
        self.objects[key] = made
        return made

    def create_worker(self, index: int) -> Manifest:
        """As the master does."""
        assert self.job is not None
        owner = {"kind": "ElasticJob", "uid": self.job["metadata"]["uid"]}
        metadata = {
            "name": f"{self.name}-edljob-worker-{index}",
            "labels": names.labels(self.name, "worker"),
            "ownerReferences": [owner],
        }
        return self.create_pod({"kind": "Pod", "metadata": metadata, "spec": {}})

    def delete(self, pod: Manifest, *, force: bool = False) -> None:
        """A pod with nothing running goes at once; others are leaving."""
        pending = pod["status"]["phase"] == "Pending"
        if pod["metadata"].get("finalizers"):
            pod["metadata"].setdefault("deletionTimestamp", times.written(self.now + 30))
            pod["metadata"]["deletionGracePeriodSeconds"] = 0 if force or pending else 30
        elif force or pending or pod["status"]["phase"] in ("Succeeded", "Failed"):
            self.gone(pod)
        else:
            pod["metadata"].setdefault("deletionTimestamp", times.written(self.now + 30))

    def gone(self, pod: Manifest) -> None:
        del self.objects["Pod", pod["metadata"]["name"]]

    def run(self, pod: Manifest) -> None:
        pod["status"] = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
        }

    def end(self, pod: Manifest, code: int | None, reason: str = "", ran: float = 100.0) -> None:
        """The pod's container ends; ``code`` None: nobody says how, as of an evicted pod."""
        phase = "Succeeded" if code == 0 else "Failed"
        pod["status"] = {"phase": phase}
        if code is None:
            pod["status"]["reason"] = reason
            return
        terminated: Manifest = {
            "exitCode": code,
            "startedAt": times.written(self.now - ran),
            "finishedAt": times.written(self.now),
        }
        if reason:
            terminated["reason"] = reason
        state = {"terminated": terminated}
        pod["status"]["containerStatuses"] = [{"name": "main", "state": state}]


def running(**spec: Any) -> World:
    """A job whose master and two workers are running."""
    world = World(job(**spec))
    world.settle()
    assert world.master is not None
    world.run(world.master)
    for index in range(2):
        world.run(world.create_worker(index))
    world.settle()
    assert world.status["phase"] == "Running"
    world.now += 1000.0
    return world


def merge(old: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result
