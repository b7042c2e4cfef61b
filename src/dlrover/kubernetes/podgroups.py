"""The groups of schedulers that place pods all together or not at all. Nothing here does I/O.

================ ===========================================================================================
``volcano``      annotation ``scheduling.k8s.io/group-name``, ``schedulerName: volcano``, and a PodGroup of
                 ``scheduling.volcano.sh/v1beta1`` (https://volcano.sh/en/docs/podgroup/)
``coscheduling`` label ``scheduling.x-k8s.io/pod-group``, and a PodGroup of ``scheduling.x-k8s.io/v1alpha1``
                 (https://scheduler-plugins.sigs.k8s.io/docs/plugins/coscheduling/)
``koordinator``  annotations ``gang.scheduling.koordinator.sh/name`` and ``.../min-available``,
                 ``schedulerName: koord-scheduler`` (https://koordinator.sh/docs/user-manuals/gang-scheduling/)
``kueue``        labels ``kueue.x-k8s.io/queue-name`` and ``.../pod-group-name``, annotation
                 ``.../pod-group-total-count`` (https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/)
================ ===========================================================================================

The group has the job's nodes. Its master is none of them: it is what makes them.
"""

from __future__ import annotations

from typing import Any

from dlrover.kubernetes import commands
from dlrover.kubernetes.types import ElasticJob

Manifest = dict[str, Any]

VOLCANO, COSCHEDULING = "scheduling.volcano.sh", "scheduling.x-k8s.io"
VERSIONS = {"volcano": (VOLCANO, "v1beta1"), "coscheduling": (COSCHEDULING, "v1alpha1")}
"""Group and version of the PodGroups that are made."""
_SCHEDULERS = {"volcano": "volcano", "koordinator": "koord-scheduler"}
_KOORDINATOR = "gang.scheduling.koordinator.sh"
_KUEUE = "kueue.x-k8s.io"


def name(job: ElasticJob) -> str:
    """The name of a job's group, which no earlier job of its name had."""
    uid = job.uid.partition("-")[0]
    return f"{job.name}-edljob-{uid}"


def pod_group(job: ElasticJob) -> Manifest | None:
    """The PodGroup that a job's scheduler needs beside the pods; None if it needs none.

    Its name and its owner are for the caller to give.
    """
    gang = job.spec.gang
    if gang.by not in VERSIONS:
        return None
    queue = {"queue": gang.queue} if gang.by == "volcano" and gang.queue else {}
    spec = {"minMember": commands.fewest_nodes(job), **queue}
    return {"apiVersion": "/".join(VERSIONS[gang.by]), "kind": "PodGroup", "spec": spec}


def join(pod: Manifest, job: ElasticJob, nodes: int) -> None:
    """Make a node's pod a member of its job's group, which has so many ``nodes`` at most.

    What its template says itself is kept.
    """
    by, group = job.spec.gang.by, name(job)
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    if by == "volcano":
        annotations = {"scheduling.k8s.io/group-name": group}
    elif by == "coscheduling":
        labels = {f"{COSCHEDULING}/pod-group": group}
    elif by == "koordinator":
        least = str(commands.fewest_nodes(job))
        annotations = {f"{_KOORDINATOR}/name": group, f"{_KOORDINATOR}/min-available": least}
    elif by == "kueue":
        queue = job.spec.gang.queue or _queue(job)
        labels = {f"{_KUEUE}/queue-name": queue, f"{_KUEUE}/pod-group-name": group}
        annotations = {f"{_KUEUE}/pod-group-total-count": str(nodes)}
    metadata = pod["metadata"]
    metadata["labels"] = {**labels, **metadata["labels"]}
    metadata["annotations"] = {**annotations, **metadata["annotations"]}
    if by in _SCHEDULERS:
        pod["spec"].setdefault("schedulerName", _SCHEDULERS[by])


def _queue(job: ElasticJob) -> str:
    """The queue that the job itself is labelled with."""
    return str((job.metadata.get("labels") or {}).get(f"{_KUEUE}/queue-name", ""))
