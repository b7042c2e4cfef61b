"""The objects of a job's master: pod, Service, token, account and the account's rights."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from dlrover.kubernetes.machine import podgroups, tls
from dlrover.kubernetes.resources import commands, names, quantities as resources
from dlrover.kubernetes.resources.types import ElasticJob, Manifest, ReplicaSpec
from dlrover.spec.jobdir import liveness_socket

HOME = "/var/lib/dlrover"
"""Where the master keeps the job's directory: an empty volume per pod, or the volume of ``journalClaim``."""
PROBE_TIMEOUT = 15
"""Seconds that a master has for its sign of life."""
USER = 65532
"""User and group id of the master, as in distroless images."""


def owner(job: ElasticJob) -> Manifest:
    """Return the owner reference by which the garbage collector removes a job's objects."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ElasticJob",
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def parent(metadata: Mapping[str, Any]) -> Manifest | None:
    """Return a role's reference to its job of several roles; None if the job is no role."""
    references = metadata.get("ownerReferences") or ()
    kind = (names.API_VERSION, "ElasticJob")
    return next((one for one in references if (one["apiVersion"], one["kind"]) == kind), None)


def service(job: ElasticJob) -> Manifest:
    """Return the Service through which nodes reach the master, regardless of its pod."""
    chosen = _chosen(job)
    port = {"name": "grpc", "port": names.MASTER_PORT, "targetPort": names.MASTER_PORT}
    spec = {"selector": chosen, "ports": [port], "publishNotReadyAddresses": True}
    return _object("v1", "Service", job, names.master_name(job.name), spec=spec)


def _chosen(job: ElasticJob) -> dict[str, str]:
    """Return the labels by which the Service selects the master's pod."""
    labels = names.labels(job.name, names.MASTER_ROLE)
    return {key: labels[key] for key in (names.JOB_LABEL, names.ROLE_LABEL)}


def missing_labels(job: ElasticJob, pod: Manifest) -> list[str]:
    """Return those selector labels that a master's pod has lost."""
    given = pod["metadata"].get("labels") or {}
    return [key for key, value in _chosen(job).items() if given.get(key) != value]


def secret(job: ElasticJob, token: str) -> Manifest | None:
    """Return the Secret with the token that every connection to the master presents; None if its parent has it."""
    if parent(job.metadata) is not None:
        return None
    content = {names.TOKEN_KEY: token}
    return _object("v1", "Secret", job, _own_name(job), type="Opaque", stringData=content)


def certificate(job: ElasticJob) -> Manifest | None:
    """Return the Secret of the master's certificate, without content; None if the job does not use TLS."""
    if not job.spec.master.tls:
        return None
    return _object("v1", "Secret", job, tls.secret_name(job), type="kubernetes.io/tls")


def pod_group(job: ElasticJob) -> Manifest | None:
    """Return the PodGroup of the job's nodes; None if their scheduler needs none."""
    group = podgroups.pod_group(job)
    if group is None:
        return None
    name = podgroups.name(job)
    return _object(group["apiVersion"], "PodGroup", job, name, spec=group["spec"])


def account(job: ElasticJob) -> list[Manifest]:
    """Return the master's service account, role and role binding."""
    rbac = "rbac.authorization.k8s.io"
    name = _own_name(job)
    subject = {"kind": "ServiceAccount", "name": name, "namespace": job.namespace}
    return [
        _object("v1", "ServiceAccount", job, name),
        _object(f"{rbac}/v1", "Role", job, name, rules=_rules(job)),
        _object(
            f"{rbac}/v1",
            "RoleBinding",
            job,
            name,
            roleRef={"apiGroup": rbac, "kind": "Role", "name": name},
            subjects=[subject],
        ),
    ]


def _rules(job: ElasticJob) -> list[Manifest]:
    """Return the rights of a job's master; a coordinator makes and removes the jobs of its roles, too."""
    theirs = [names.job_of_role(job.name, role) for role in job.spec.roles]
    if not theirs:
        return role_rules(job.name)
    return [
        *role_rules(job.name),
        _rule(names.GROUP, ["elasticjobs"], ["create"]),
        {
            **_rule(names.GROUP, ["elasticjobs"], ["get", "list", "watch", "delete"]),
            "resourceNames": theirs,
        },
    ]


def role_rules(job: str) -> list[Manifest]:
    """Return a master's rights in its namespace: its own job, pods, plans for jobs and events."""
    return [
        _rule("", ["pods"], ["get", "list", "watch", "create", "delete"]),
        _rule(names.GROUP, ["elasticjobs"], ["get", "list", "watch", "patch"], job),
        _rule(names.GROUP, ["elasticjobs/status", "elasticjobs/scale"], ["patch"], job),
        _rule(names.GROUP, ["scaleplans"], ["get", "list", "watch", "create"]),
        _rule(names.GROUP, ["scaleplans/status"], ["patch"]),
        _rule("", ["events"], ["get", "list", "create", "patch"]),
    ]


def operator_rules() -> list[Manifest]:
    """Return the operator's rights where it works; they must include all rights that it grants to masters."""
    rbac = "rbac.authorization.k8s.io"
    return [
        _rule(names.GROUP, ["elasticjobs"], ["get", "list", "watch", "create", "patch", "delete"]),
        _rule(names.GROUP, ["elasticjobs/status", "elasticjobs/scale"], ["patch"]),
        _rule(names.GROUP, ["scaleplans"], ["get", "list", "watch", "create", "patch", "delete"]),
        _rule(names.GROUP, ["scaleplans/status"], ["patch"]),
        _rule("", ["pods"], ["get", "list", "watch", "create", "delete"]),
        _rule("", ["services"], ["get", "list", "watch", "create"]),
        _rule("", ["serviceaccounts", "secrets"], ["create"]),
        _rule(rbac, ["roles"], ["create", "patch"]),
        _rule(rbac, ["rolebindings"], ["create"]),
        _rule("", ["events"], ["get", "list", "create", "patch"]),
        _rule(podgroups.VOLCANO, ["podgroups"], ["create"]),
        _rule(podgroups.COSCHEDULING, ["podgroups"], ["create"]),
    ]


def aggregated_rules() -> dict[str, list[Manifest]]:
    """Return the rights of a namespace's users, added to the cluster's roles ``view`` and ``edit``.

    Those to ``view`` suffice for what the dashboard shows of ended jobs and of logs.
    """
    both = ["elasticjobs", "scaleplans"]
    change = ["create", "update", "patch", "delete", "deletecollection"]
    return {
        "view": [
            _rule(names.GROUP, both, ["get", "list", "watch"]),
            _rule(
                names.GROUP,
                ["elasticjobs/status", "elasticjobs/scale", "scaleplans/status"],
                ["get"],
            ),
            _rule(
                "", ["pods"], ["get", "list"]
            ),  # this and the next one are in the cluster's view, too
            _rule("", ["pods/log"], ["get"]),
        ],
        "edit": [
            _rule(names.GROUP, both, change),
            _rule(names.GROUP, ["elasticjobs/scale"], ["update", "patch"]),
        ],
    }


def lease_rules() -> list[Manifest]:
    """Return the operator's additional rights in its own namespace, for leader election."""
    return [_rule("coordination.k8s.io", ["leases"], ["get", "create", "update"])]


def _rule(group: str, resources: list[str], verbs: list[str], only: str = "") -> Manifest:
    named = {"resourceNames": [only]} if only else {}
    return {"apiGroups": [group], "resources": resources, "verbs": verbs, **named}


def pod(job: ElasticJob, role: str, name: str, index: int = 0) -> Manifest:
    """Return a pod from its role's template, which is preserved, with the job's labels and owner.

    The pod never restarts its containers, even if the template says so: the operator and the master decide
    what follows its end.
    """
    replica = job.spec.replica_specs.get(role, ReplicaSpec())
    template = copy.deepcopy(replica.template)
    spec: Manifest = template.get("spec") or {}
    given: Mapping[str, Any] = template.get("metadata") or {}
    spec["containers"] = spec.get("containers") or [{}]
    spec["restartPolicy"] = "Never"
    spec.setdefault("enableServiceLinks", False)
    priority = _priority(replica, index)
    if priority:
        spec.setdefault("priorityClassName", priority)
    annotations = {**(given.get("annotations") or {})}
    main = commands.main({"spec": spec}).get("name", "main")
    if main != "main":
        annotations[names.MAIN_CONTAINER] = main
    made = _object("v1", "Pod", job, name, spec=spec)
    made["metadata"] |= {
        "labels": {**(given.get("labels") or {}), **names.labels(job.name, role)},
        "annotations": annotations,
    }
    return made


def _priority(replica: ReplicaSpec, index: int) -> str:
    """Return the priority class of a role's pod; a fraction is the share of pods with class ``high``."""
    if replica.priority in ("", "high", "low"):
        return replica.priority
    most = math.ceil(float(replica.priority) * max(1, replica.replicas))
    return "high" if index < most else "low"


def variables(
    job: ElasticJob, plain: Mapping[str, str], fields: Mapping[str, str]
) -> list[Manifest]:
    """Return variables of a container: values, fields of its pod, and the job's token."""
    above = parent(job.metadata)
    holder = _own_name(job) if above is None else names.own_name(above["name"], above["uid"])
    token = {"name": holder, "key": names.TOKEN_KEY}
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *(
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ),
        {"name": "DLROVER_TOKEN", "valueFrom": {"secretKeyRef": token}},
    ]


def master_pod(
    job: ElasticJob, image: str, number: int = 1, memory_factor: float = 1.0
) -> Manifest:
    """Return the pod of the job's master with this number, from the role ``dlrover-master`` if present.

    Its memory is multiplied by ``memory_factor``.
    """
    made = pod(job, names.MASTER_ROLE, names.master_name(job.name))
    spec = made["spec"]
    container = commands.main(made)
    _complete(container, job, image)
    resources.grow(container, memory_factor)
    spec.setdefault("serviceAccountName", _own_name(job))
    spec.setdefault(
        "securityContext",
        {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    )
    claim = job.spec.master.journal_claim
    home = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    spec["volumes"] = [
        *(spec.get("volumes") or []),
        {"name": "dlrover-home", **home},
        {"name": "dlrover-tmp", "emptyDir": {}},
    ]
    tls.give_master(spec, container, job)
    made["metadata"]["annotations"][names.MASTER_NUMBER] = str(number)
    if memory_factor != 1.0:
        made["metadata"]["annotations"][names.MEMORY_FACTOR] = str(memory_factor)
    return made


def _complete(container: Manifest, job: ElasticJob, image: str) -> None:
    """Fill in what the template of the master's container leaves out."""
    container.setdefault("name", "main")
    container["image"] = job.spec.master.image or container.get("image") or image
    if "command" not in container:
        port = str(names.MASTER_PORT)
        container["command"] = ["dlrover", "master", "--platform", "kubernetes", "--port", port]
        container.setdefault("livenessProbe", liveness_probe(names.MASTER_PORT))
    container["env"] = [*(container.get("env") or []), *_environment(job)]
    container["ports"] = [
        *(container.get("ports") or []),
        {"name": "grpc", "containerPort": names.MASTER_PORT},
    ]
    container["volumeMounts"] = [
        *(container.get("volumeMounts") or []),
        {"name": "dlrover-home", "mountPath": HOME},
        {"name": "dlrover-tmp", "mountPath": "/tmp"},  # noqa: S108 - inside the pod
    ]
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    container.setdefault(
        "readinessProbe", {"tcpSocket": {"port": names.MASTER_PORT}, "periodSeconds": 5}
    )
    container.setdefault(
        "resources",
        {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
    )
    container.setdefault(
        "securityContext",
        {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    )


def liveness_probe(port: int) -> Manifest:
    """Return the probe that ends a master on ``port`` once it has stood still for five minutes.

    A busy one answers in time. A socket that is not there says nothing: the master may wait for the API server, be of a
    release without one, or run where none is allowed.
    """
    code = (
        "import socket, sys\n"
        "alive = socket.socket(socket.AF_UNIX)\n"
        f"alive.settimeout({PROBE_TIMEOUT})\n"
        "try:\n"
        f"    alive.connect({liveness_socket(port)!r})\n"
        "except (TimeoutError, BlockingIOError):\n"
        "    raise\n"
        "except OSError:\n"
        "    sys.exit()\n"
        "alive.recv(1)\n"
    )
    return {
        "exec": {"command": ["python3", "-ISc", code]},
        "periodSeconds": 30,
        "timeoutSeconds": 2 * PROBE_TIMEOUT,  # a process has to start, too
        "failureThreshold": 10,
    }


def _environment(job: ElasticJob) -> list[Manifest]:
    # The name distinguishes the job from an earlier one of its name on the same volume.
    folder = f"{HOME}/{_own_name(job)}"
    plain = {
        "DLROVER_KUBERNETES_JOB": f"{job.namespace}/{job.name}",
        "DLROVER_KUBERNETES_JOB_UID": job.uid,
        "DLROVER_JOB_DIR": folder,
        "DLROVER_STATE_DIR": f"{HOME}/state",
        "HOME": HOME,
    }
    return variables(job, plain, {"POD_IP": "status.podIP"})


def _own_name(job: ElasticJob) -> str:
    return names.own_name(job.name, job.uid)


def _object(api_version: str, kind: str, job: ElasticJob, name: str, **content: Any) -> Manifest:
    metadata = {
        "name": name,
        "namespace": job.namespace,
        "labels": names.labels(job.name, names.MASTER_ROLE),
        "ownerReferences": [owner(job)],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}
