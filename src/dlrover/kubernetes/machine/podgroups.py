"""Pod groups for schedulers that place pods all together or not at all. No I/O here.

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

The group contains the job's nodes but not its master, which creates them.
"""

from __future__ import annotations

from dlrover.kubernetes.resources import commands
from dlrover.kubernetes.resources.types import ElasticJob, Manifest

VOLCANO, COSCHEDULING = "scheduling.volcano.sh", "scheduling.x-k8s.io"
VERSIONS = {"volcano": (VOLCANO, "v1beta1"), "coscheduling": (COSCHEDULING, "v1alpha1")}
"""API group and version of the PodGroups."""
_SCHEDULERS = {"volcano": "volcano", "koordinator": "koord-scheduler"}
_KOORDINATOR = "gang.scheduling.koordinator.sh"
_KUEUE = "kueue.x-k8s.io"


def name(job: ElasticJob) -> str:
    """Return the name of a job's group, distinct from those of earlier jobs of its name."""
    uid = job.uid.partition("-")[0]
    return f"{job.name}-edljob-{uid}"


def pod_group(job: ElasticJob) -> Manifest | None:
    """Return the PodGroup that a job's scheduler needs besides the pods; None if it needs none.

    The caller adds its name and owner.
    """
    gang = job.spec.gang
    if gang.by not in VERSIONS:
        return None
    queue = {"queue": gang.queue} if gang.by == "volcano" and gang.queue else {}
    spec = {"minMember": commands.fewest_nodes(job), **queue}
    return {"apiVersion": "/".join(VERSIONS[gang.by]), "kind": "PodGroup", "spec": spec}


def join(pod: Manifest, job: ElasticJob, nodes: int) -> None:
    """Make a node's pod a member of its job's group, which has at most ``nodes`` nodes.

    Values from the pod's template take precedence.
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
        labels = {f"{_KUEUE}/pod-group-name": group}
        annotations = {f"{_KUEUE}/pod-group-total-count": str(nodes)}
    metadata = pod["metadata"]
    metadata["labels"] = {**labels, **metadata["labels"]}
    metadata["annotations"] = {**annotations, **metadata["annotations"]}
    schedule(pod, job)


def schedule(pod: Manifest, job: ElasticJob) -> None:
    """Give a pod the scheduler and queue of its job's group; a spare is no member of the group itself."""
    gang = job.spec.gang
    if gang.by in _SCHEDULERS:
        pod["spec"].setdefault("schedulerName", _SCHEDULERS[gang.by])
    if gang.by == "kueue":
        pod["metadata"]["labels"].setdefault(f"{_KUEUE}/queue-name", gang.queue or _queue(job))


def _queue(job: ElasticJob) -> str:
    """Return the queue from the job's own label."""
    return str((job.metadata.get("labels") or {}).get(f"{_KUEUE}/queue-name", ""))
