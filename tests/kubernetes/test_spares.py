"""Spare pods: what they are made of, and a lost worker's place taken on a real control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrover.kubernetes.machine import nodes
from dlrover.kubernetes.platform.job import request
from dlrover.kubernetes.resources import names, validation
from dlrover.spec.node import FIRST_SPARE, LaunchNode
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.manifests import job as manifest_of
from tests.kubernetes.test_job import Job


def spare(**spec: Any) -> dict[str, Any]:
    """The pod of a job's first spare."""
    job = validation.parse(manifest_of(**spec))
    return nodes.pod(job, LaunchNode(7, FIRST_SPARE), "m:1")


def test_a_spare_prefers_a_host_of_its_own_and_has_its_own_priority() -> None:
    pod = spare(spares={"replicas": 1, "priorityClassName": "lowest"})
    assert pod["spec"]["priorityClassName"] == "lowest"
    (wish,) = pod["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    term = wish["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"] == {"matchLabels": {names.JOB_LABEL: "digits"}}
    assert pod["metadata"]["labels"][nodes.RANK_LABEL] == str(FIRST_SPARE)
    assert pod["metadata"]["name"] == "digits-edljob-worker-7"
    assert (
        "affinity"
        not in nodes.pod(
            validation.parse(manifest_of(spares={"replicas": 1})), LaunchNode(0, 0), "m:1"
        )["spec"]
    )


def test_a_spare_is_in_no_gang_but_in_its_queue() -> None:
    metadata = spare(spares={"replicas": 1}, gang={"by": "kueue", "queue": "team"})["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "kueue.x-k8s.io/pod-group-name" not in metadata["labels"]
    pod = spare(spares={"replicas": 1}, gang={"by": "volcano"})
    assert pod["spec"]["schedulerName"] == "volcano"
    assert pod["metadata"]["annotations"] == {}


def test_spares_do_not_count_as_nodes() -> None:
    asked = request(validation.parse(manifest_of(spares={"replicas": 1}))).job
    assert (asked.min_nodes, asked.max_nodes, asked.managed_nodes, asked.spares) == (2, 2, 2, 1)
    chosen = request(validation.parse(manifest_of(spares={"auto": True}))).job
    assert (chosen.spares, chosen.auto_spares) == (0, True)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_spare_pod_takes_the_place_of_a_lost_worker(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, kubelet: Callable[..., Kubelet]
) -> None:
    job = Job(Cluster(control_plane, namespace, tmp_path), kubelet(nodes=3), tmp_path)

    async def story() -> None:
        async with job.cluster.operator():
            job.submit(2, spares={"replicas": 1})
            await job.until(lambda: len(job.workers()) == 3 and job.steps() > 5)
            assert job.cluster.status["workers"] == "2/2"
            first = {start["pod"] for start in job.starts()}
            (waiting,) = set(job.workers()) - first
            victim = min(first)
            job.delete(victim)
            await job.until(lambda: len(job.starts()) == 4)
            assert {start["pod"] for start in job.starts()[2:]} == (first - {victim}) | {waiting}
            await job.until(lambda: len(job.workers()) == 3)  # another spare
            training = await job.succeeds()
            assert training["restarts"] == 1
        assert len({start["pod"] for start in job.starts()}) == 3
        log = job.log()
        number = waiting.rpartition("-")[2]
        assert f"Spare node {number} takes the place of node {victim.rpartition('-')[2]}." in log

    asyncio.run(story())
