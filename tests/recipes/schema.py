"""The fields of foreign manifests that the recipes may use, as their public definitions name them.

A dictionary is an object with these fields, a list of one is an array of it; ``ANY`` is an object with any
fields, which the user names.
"""

from __future__ import annotations

from typing import Any

ANY: dict[str, Any] = {"*": str}
META = {"name": str, "labels": ANY, "annotations": ANY}
ENV = {"name": str, "value": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [ENV],
    "securityContext": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [str]}},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {
    "metadata": META,
    "spec": {
        "restartPolicy": str,
        "securityContext": {"runAsNonRoot": bool, "fsGroup": int},
        "containers": [CONTAINER],
        "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
    },
}
"""core/v1 PodTemplateSpec."""
JOB = {
    "metadata": META,
    "spec": {
        "parallelism": int,
        "completions": int,
        "completionMode": str,
        "backoffLimit": int,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": str,
                    "onExitCodes": {"containerName": str, "operator": str, "values": [int]},
                    "onPodConditions": [{"type": str}],
                }
            ]
        },
        "template": POD,
    },
}
"""batch/v1 JobTemplateSpec; ``podFailurePolicy`` is stable since Kubernetes 1.31."""
JOBSET_SPEC = {
    "network": {"enableDNSHostnames": bool},
    "replicatedJobs": [{"name": str, "replicas": int, "template": JOB}],
}
"""``JobSetSpec`` of jobset.x-k8s.io/v1alpha2."""
REPLICA = {"replicas": int, "restartPolicy": str, "template": POD}
VOLCANO_POLICY = {"event": str, "exitCode": int, "action": str}


def _object(api: str, kind: str, spec: dict[str, Any]) -> tuple[tuple[str, str], dict[str, Any]]:
    return (api, kind), {"apiVersion": str, "kind": str, "metadata": META, "spec": spec}


KINDS = dict(
    [
        _object(
            "kubeflow.org/v1",
            "PyTorchJob",
            {
                "runPolicy": {"cleanPodPolicy": str},
                "elasticPolicy": {
                    "rdzvBackend": str,
                    "rdzvId": str,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "maxRestarts": int,
                    "rdzvConf": [{"key": str, "value": str}],
                },
                "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
            },
        ),
        _object("jobset.x-k8s.io/v1alpha2", "JobSet", JOBSET_SPEC),
        _object(
            "trainer.kubeflow.org/v1alpha1",
            "TrainingRuntime",
            {
                "mlPolicy": {"numNodes": int, "torch": {}},
                "template": {"metadata": META, "spec": JOBSET_SPEC},
            },
        ),
        _object(
            "trainer.kubeflow.org/v1alpha1",
            "TrainJob",
            {
                "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
                "trainer": {
                    "numNodes": int,
                    "numProcPerNode": int,
                    "command": [str],
                    "args": [str],
                },
            },
        ),
        _object(
            "batch.volcano.sh/v1alpha1",
            "Job",
            {
                "schedulerName": str,
                "minAvailable": int,
                "maxRetry": int,
                "plugins": {"svc": [str], "env": [str]},
                "tasks": [
                    {
                        "name": str,
                        "replicas": int,
                        "policies": [VOLCANO_POLICY],
                        "template": POD,
                    }
                ],
            },
        ),
    ]
)


def faults(manifest: dict[str, Any]) -> list[str]:
    """What a manifest has that its kind does not know, with the place of each."""
    key = (manifest.get("apiVersion", ""), manifest.get("kind", ""))
    if key not in KINDS:
        return [f"no kind {key}"]
    return _faults(manifest, KINDS[key], "")


def _faults(value: Any, wanted: Any, path: str) -> list[str]:
    if isinstance(wanted, list):
        if not isinstance(value, list):
            return [f"{path} is no array"]
        return [f for i, item in enumerate(value) for f in _faults(item, wanted[0], f"{path}[{i}]")]
    if isinstance(wanted, dict):
        if not isinstance(value, dict):
            return [f"{path} is no object"]
        found = []
        for name, item in value.items():
            expected = wanted.get(name, wanted.get("*"))
            below = f"{path}.{name}"
            found += [f"{below} is unknown"] if expected is None else _faults(item, expected, below)
        return found
    return [] if type(value) is wanted else [f"{path} is no {wanted.__name__}"]
