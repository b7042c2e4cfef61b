"""The pods of a job's nodes: their manifests and the interpretation of their status. No I/O here."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dlrover.errors import ExitCode
from dlrover.kubernetes.machine import objects, podgroups, pods, tls
from dlrover.kubernetes.resources import commands, names, quantities as resources
from dlrover.kubernetes.resources.types import ElasticJob, Manifest, ReplicaSpec
from dlrover.spec.node import SERVER, WORKER, LaunchNode, index_in_role, is_server, is_spare

ROLES = ("chief", "evaluator", WORKER, SERVER)
"""Roles whose pods are nodes, in rank order."""
SCALED = (WORKER, SERVER)
"""Roles whose number of pods may change."""
NODE_LABEL = f"{names.GROUP}/node-id"
"""Label with the id of a pod's node, unique within a job."""
RANK_LABEL = f"{names.GROUP}/node-rank"
"""Label with the rank that a pod's node prefers; a pod and its replacement share it."""
WRONG_COMMAND = (ExitCode.USAGE, 126, 127)
"""Exit codes of a wrong command; the container's last output line gives the details."""
TELLING = (*WRONG_COMMAND, ExitCode.INFRASTRUCTURE)
"""Exit codes whose reason is in the output; the reason of a failed program comes from its agent."""
HOST_LABEL = "kubernetes.io/hostname"


def count(job: ElasticJob) -> int:
    """Return the number of the job's nodes."""
    return sum(spec.replicas for role, spec in job.spec.replica_specs.items() if role in ROLES)


def resized(job: ElasticJob, role: str, replicas: int) -> ElasticJob:
    """Return the job with another number of pods of a role."""
    specs = dict(job.spec.replica_specs)
    if role in specs:
        specs[role] = msgspec.structs.replace(specs[role], replicas=replicas)
    spec = msgspec.structs.replace(job.spec, replica_specs=specs)
    return msgspec.structs.replace(job, spec=spec)


def place(job: ElasticJob, rank: int) -> tuple[str, int]:
    """Return the role of the node that prefers a rank, and the node's index in its role."""
    if is_server(rank):
        return SERVER, index_in_role(rank)
    for role in ROLES:
        replica = job.spec.replica_specs.get(role)
        if role in SCALED or replica is None:
            continue
        if rank < replica.replicas:
            return role, rank
        rank -= replica.replicas
    return WORKER, rank


def requests(job: ElasticJob, role: str) -> dict[str, Any]:
    """Return the resources of a role's main container: its requests or, where absent, its limits."""
    replica = job.spec.replica_specs.get(role, ReplicaSpec())
    spec = copy.deepcopy(replica.template.get("spec") or {})
    asked = _main(spec).get("resources") or {}
    return {**(asked.get("limits") or {}), **(asked.get("requests") or {})}


def pod_name(job: ElasticJob, launch: LaunchNode) -> str:
    """Return the name of a node's pod."""
    return f"{job.name}-edljob-{place(job, launch.node_rank)[0]}-{launch.node_id}"


def pod(job: ElasticJob, launch: LaunchNode, master: str) -> Manifest:
    """Return the manifest of a node's pod; ``master`` is the address of the job's master.

    Besides `objects.pod`, it gets what a node needs: its id and rank, variables for ``dlrover-run``, its group.
    """
    role, index = place(job, launch.node_rank)
    made = objects.pod(job, role, pod_name(job, launch), index)
    spec = made["spec"]
    container = _main(spec)
    _give_variables(spec, container, job, launch, role, master)
    tls.give_node(spec, container, job)
    resources.grow(container, launch.memory_factor, launch.cpu_factor)
    _avoid(spec, launch.avoid)
    made["metadata"]["labels"] |= {
        NODE_LABEL: str(launch.node_id),
        RANK_LABEL: str(launch.node_rank),
    }
    made["metadata"]["annotations"] |= _factors(launch)
    if is_spare(launch.node_rank):
        _stand_apart(made, job)
        podgroups.schedule(made, job)
    else:
        podgroups.join(made, job, count(job))
    return made


def _stand_apart(pod: Manifest, job: ElasticJob) -> None:
    """Prefer a host without other pods of the job for a spare, and give it its own priority."""
    spec = pod["spec"]
    if job.spec.spares.priority_class_name:
        spec["priorityClassName"] = job.spec.spares.priority_class_name
    affinity = spec.setdefault("affinity", {}).setdefault("podAntiAffinity", {})
    wish = {
        "weight": 100,
        "podAffinityTerm": {
            "labelSelector": {"matchLabels": {names.JOB_LABEL: job.name}},
            "topologyKey": HOST_LABEL,
        },
    }
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    affinity[preferred] = [*(affinity.get(preferred) or []), wish]


def _factors(launch: LaunchNode) -> dict[str, str]:
    """Return the annotations from which a master without a journal reads a pod's size."""
    factors = {
        names.CPU_FACTOR: launch.cpu_factor,
        names.MEMORY_FACTOR: launch.memory_factor,
    }
    return {key: repr(factor) for key, factor in factors.items() if factor != 1.0}


def _main(spec: Manifest) -> Manifest:
    """Return the container that runs ``dlrover-run``; give each container a name."""
    containers: list[Manifest] = spec.get("containers") or [{}]
    spec["containers"] = containers
    for container in containers:
        container.setdefault("name", "main")
    return commands.main({"spec": spec})


def _give_variables(
    spec: Manifest, main: Manifest, job: ElasticJob, launch: LaunchNode, role: str, master: str
) -> None:
    """Add the job's variables to all containers, and the node's to the main one."""
    shared = [msgspec.to_builtins(variable) for variable in job.spec.envs.values()]
    for variable in shared:
        if variable["valueFrom"] is None:
            del variable["valueFrom"]
        else:
            del variable["value"]
    for container in spec["containers"]:
        given = {variable["name"] for variable in container.get("env") or ()}
        added = [variable for variable in shared if variable["name"] not in given]
        container["env"] = [*(container.get("env") or []), *added]
    own = _own_variables(job, launch, role, master)
    names_of_own = {variable["name"] for variable in own}
    theirs = [variable for variable in main["env"] if variable["name"] not in names_of_own]
    main["env"] = [*own, *theirs]  # first, because variables may refer to earlier ones
    main.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")


def _own_variables(job: ElasticJob, launch: LaunchNode, role: str, master: str) -> list[Manifest]:
    plain = {
        "DLROVER_MASTER_ADDR": master,
        "DLROVER_NODE_ID": str(launch.node_id),
        "DLROVER_NODE_RANK": str(launch.node_rank),
        "ELASTIC_JOB_NAME": job.name,
        "NODE_TYPE": role,
        "NODE_ID": str(launch.node_id),
        "NODE_NUM": str(count(job)),
        "NODE_RANK": str(index_in_role(launch.node_rank)),
        "WORKER_NUM": str(count(job)),
    }
    fields = {
        "DLROVER_NODE_NAME": "spec.nodeName",
        "POD_NAME": "metadata.name",
        "POD_IP": "status.podIP",
        "NODE_IP": "status.hostIP",
    }
    return objects.variables(job, plain, fields)


def _avoid(spec: Manifest, hosts: Sequence[str]) -> None:
    """Keep a pod off the given hosts, in addition to its template's constraints."""
    if not hosts:
        return
    wanted = {"key": HOST_LABEL, "operator": "NotIn", "values": sorted(hosts)}
    affinity = spec.setdefault("affinity", {})
    node = affinity.setdefault("nodeAffinity", {})
    required = node.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.setdefault("nodeSelectorTerms", [{}])  # a host must match one of them
    for term in terms:
        term["matchExpressions"] = [*(term.get("matchExpressions") or []), wanted]


# ---- the status of a pod


def node_id(obj: Manifest) -> int:
    """Return the id of a pod's node; -1 if the pod is no node."""
    value = (obj["metadata"].get("labels") or {}).get(NODE_LABEL, "")
    return int(value) if value.isdecimal() else -1


def node_rank(obj: Manifest) -> int:
    """Return the rank that a pod's node prefers."""
    return int(obj["metadata"]["labels"][RANK_LABEL])


def ending(obj: Manifest) -> str:
    """Return how a pod ended or why it is ending, in words; empty while it lives."""
    if pods.finished(obj):
        return _end(obj)
    if obj["metadata"].get("deletionTimestamp"):
        return pods.words("its pod was deleted", pods.disruption(obj))
    return ""


def _end(obj: Manifest) -> str:
    status, main = obj["status"], commands.main(obj).get("name")
    kinds = ("initContainerStatuses", "containerStatuses")
    found = [one for kind in kinds for one in status.get(kind) or ()]
    for container in sorted(found, key=lambda one: one["name"] != main):
        end = (container.get("state") or {}).get("terminated") or {}
        code = end.get("exitCode", 0)
        if end.get("reason") == "OOMKilled":
            return f"its container {container['name']} ran out of memory (OOMKilled)"
        if code and not status.get("reason"):
            reason = end.get("reason")
            also = f" ({reason})" if reason not in (None, "", "Error") else ""
            last = _last_words(end) if also or code in TELLING else ""
            said = f": {last}" if last else ""
            return f"its container {container['name']} ended with exit code {code}{also}{said}"
    if status.get("reason"):
        return pods.words("its pod failed", status)
    return "its pod failed" if status["phase"] == "Failed" else "its pod ended"


def _last_words(end: Manifest) -> str:
    """Return why a container ended, as the last line of its output says; ``dlrover-run`` puts where to look below that."""
    text = str(end.get("message") or "").strip()
    if end["exitCode"] == ExitCode.INFRASTRUCTURE:
        text = text.rpartition("\n\n")[0] or text
    return text.rpartition("\n")[2].rstrip(".")


def exit_code(obj: Manifest) -> int:
    """Return the exit code of the main container, else of the first failed one; 0 if none failed or it is unknown."""
    main = pods.end_of_main(obj)
    for end in [main] if main else [one for _, one in pods.states(obj, "terminated")]:
        if end.get("exitCode") and end.get("reason") != "OOMKilled":
            return int(end["exitCode"])
    return 0


def removed(obj: Manifest) -> bool:
    """Return whether the cluster ended a pod: it was deleted, preempted, evicted, or refused by its machine.

    A pod that is evicted because it exceeds its own limit of storage is not.
    """
    if pods.disruption(obj):
        return True
    status = obj.get("status") or {}
    if not pods.finished(obj):
        return pods.leaving(obj)
    said = str(status.get("message") or "")
    own = status.get("reason") == "Evicted" and "exceed" in said and "low on resource" not in said
    return bool(status.get("reason")) and not own


def impossible(obj: Manifest) -> str:
    """Return why a pod can never start on any machine; empty if it can."""
    for waiting in pods.waits(obj):
        if waiting.get("reason") == "InvalidImageName":
            return pods.words("its pod cannot start", waiting)
    return ""


def waiting(obj: Manifest, noticed: Mapping[str, str]) -> str:
    """Return why a pod does not run yet, as for `pods.obstacle`; empty if it runs or the reason is unknown."""
    return pods.obstacle([obj], noticed).rstrip(".")
