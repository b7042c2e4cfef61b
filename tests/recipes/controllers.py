"""What the controllers of others make of a manifest: pods with names, variables and a policy for exit codes.

Each function reads the manifest as the controller does whose public source says so, and only what the recipes
use. The environment of a pod is the controller's, nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SECRETS = {("digits-token", "token"): "0b6e7f7ab5a94ef2"}
PYTORCHJOB_PORT = 23456
TRAINER_PORT = 29500


@dataclass(frozen=True)
class Pod:
    """A pod that a controller makes."""

    hostname: str
    subdomain: str
    """Empty if the pod's own ``/etc/hosts`` has only its host name."""
    name: str
    """What DNS calls it, by a headless service."""
    command: list[str]
    env: dict[str, str]
    mount: str
    """Where the claim of the checkpoints is mounted."""
    security: dict[str, Any]
    """The security contexts of the pod and of its container together."""


@dataclass(frozen=True)
class Job:
    """The pods of a job, and which of their exit codes make the controller replace one."""

    pods: list[Pod]
    replaces: Callable[[int], bool]


def pytorchjob(manifest: Mapping[str, Any]) -> Job:
    """A PyTorchJob with an elastic policy and workers only (training operator 1.7 and later)."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    elastic, workers = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
    env = {
        "PYTHONUNBUFFERED": "0",
        "PET_RDZV_ENDPOINT": f"{name}-worker-0:{PYTORCHJOB_PORT}",
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
        "PET_RDZV_ID": elastic["rdzvId"],
        "PET_RDZV_CONF": ",".join(f"{c['key']}={c['value']}" for c in elastic["rdzvConf"]),
    }
    template = workers["template"]["spec"]
    names = [f"{name}-worker-{index}" for index in range(workers["replicas"])]
    assert workers["restartPolicy"] == "ExitCode"
    return Job([_pod(template, n, "", n, env) for n in names], lambda code: code >= 128)


def jobset(manifest: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Job:
    """A JobSet of one replicated job: a pod for each completion index, whose names are in its subdomain."""
    name = manifest["metadata"]["name"]
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    template = job["template"]["spec"]
    pods = []
    for index in range(job["completions"]):
        host = f"{name}-{replicated['name']}-0-{index}"
        own = {key: value.replace("INDEX", str(index)) for key, value in (env or {}).items()} | {
            "JOB_COMPLETION_INDEX": str(index)
        }
        pods.append(_pod(template, host, name, f"{host}.{name}", own))
    (ends,) = [
        rule["onExitCodes"]["values"]
        for rule in job["podFailurePolicy"]["rules"]
        if rule["action"] == "FailJob"
    ]
    assert job["parallelism"] == job["completions"]
    assert template["restartPolicy"] == "Never", "what podFailurePolicy asks for"
    return Job(pods, lambda code: code not in ends)


def trainjob(runtime: Mapping[str, Any], manifest: Mapping[str, Any]) -> Job:
    """A TrainJob and its runtime, of which Kubeflow Trainer makes a JobSet."""
    name, trainer = manifest["metadata"]["name"], manifest["spec"]["trainer"]
    assert manifest["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "torch" in runtime["spec"]["mlPolicy"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    step = replicated["template"]["metadata"]["labels"]
    assert step == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["name"] == replicated["name"] == "node"
    changed = container | {key: trainer[key] for key in ("command", "args")}
    template = job["template"]["spec"] | {"containers": [changed]}
    nodes = trainer["numNodes"]
    spec = job | {"parallelism": nodes, "completions": nodes, "template": {"spec": template}}
    env = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "INDEX",
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": str(TRAINER_PORT),
    }
    replicas = [{"name": "node", "template": {"spec": spec}}]
    return jobset({"metadata": {"name": name}, "spec": {"replicatedJobs": replicas}}, env)


def volcano(manifest: Mapping[str, Any]) -> Job:
    """A job of Volcano with one task and the plugins "svc" and "env"."""
    name, (task,) = manifest["metadata"]["name"], manifest["spec"]["tasks"]
    names = [f"{name}-{task['name']}-{index}" for index in range(task["replicas"])]
    key = task["name"].replace("-", "_").upper()
    pods = []
    for index, host in enumerate(names):
        env = {
            "VK_TASK_INDEX": str(index),
            "VC_TASK_INDEX": str(index),
            f"VC_{key}_HOSTS": ",".join(f"{n}.{name}" for n in names),
            f"VC_{key}_NUM": str(len(names)),
        }
        assert set(manifest["spec"]["plugins"]) == {"svc", "env"}
        pods.append(_pod(task["template"]["spec"], host, name, f"{host}.{name}", env))

    def replaces(code: int) -> bool:
        for policy in task["policies"]:
            if policy.get("exitCode") == code or policy.get("event") == "PodFailed":
                return policy["action"] == "RestartPod"
        return False

    return Job(pods, replaces)


def _pod(
    template: Mapping[str, Any], hostname: str, subdomain: str, name: str, env: Mapping[str, str]
) -> Pod:
    (container,) = template["containers"]
    (mount,) = container["volumeMounts"]
    (volume,) = template["volumes"]
    assert mount["name"] == volume["name"]
    variables = {v["name"]: _value(v) for v in container.get("env", [])} | dict(env)
    words = [_expanded(word, variables) for word in (*container["command"], *container["args"])]
    security = template["securityContext"] | container["securityContext"]
    return Pod(hostname, subdomain, name, words, variables, mount["mountPath"], security)


def _value(variable: Mapping[str, Any]) -> str:
    if "valueFrom" in variable:
        source = variable["valueFrom"]["secretKeyRef"]
        return SECRETS[source["name"], source["key"]]
    return str(variable["value"])


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)`` is replaced in commands by Kubernetes; what is not known stays."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word)
