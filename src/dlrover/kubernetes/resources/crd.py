"""The custom resource definitions and access rights installed in a cluster, generated from the code.

``python -m dlrover.kubernetes.resources.crd`` writes the generated files below ``deploy``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dlrover.kubernetes.machine import objects
from dlrover.kubernetes.resources import names, schema
from dlrover.kubernetes.resources.types import Manifest

HEADER = "# Written by python -m dlrover.kubernetes.resources.crd: do not edit.\n"
_WORKERS = ".spec.replicaSpecs.worker.replicas"


def elastic_jobs() -> Manifest:
    """Return the definition of ElasticJob."""
    scale = {
        "specReplicasPath": _WORKERS,
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    columns = [
        _column("State", ".status.phase"),
        _column("Workers", ".status.workers"),
        _column("Restarts", ".status.training.restarts", "integer"),
        _column("Steps", ".status.training.steps", "integer"),
        _column("ETA", ".status.training.eta"),
        _column("Goodput", ".status.training.goodput"),
        _column("Age", ".metadata.creationTimestamp", "date"),
        _column("Message", ".status.message", priority=1),
    ]
    version = _version(schema.elastic_job(), columns)
    version["subresources"]["scale"] = scale
    return _definition("ElasticJob", "elasticjobs", ["ej"], version)


def scale_plans() -> Manifest:
    """Return the definition of ScalePlan."""
    columns = [
        _column("State", ".status.phase"),
        _column("Job", ".spec.ownerJob"),
        _column("Message", ".status.message"),
        _column("Age", ".metadata.creationTimestamp", "date"),
    ]
    return _definition("ScalePlan", "scaleplans", [], _version(schema.scale_plan(), columns))


def files() -> dict[str, str]:
    """Return the contents of the generated files, by path below ``deploy``."""
    made = {}
    for definition in (elastic_jobs(), scale_plans()):
        name = f"{definition['metadata']['name']}.yaml"
        made[f"crds/{name}"] = made[f"chart/crds/{name}"] = _text(without_rules(definition))
        made[f"crds/cel/{name}"] = _text(definition)
    rights = {
        "rules": objects.operator_rules(),
        "leaseRules": objects.lease_rules(),
        "aggregatedRules": objects.aggregated_rules(),
    }
    made["crds/roles.yaml"] = made["crds/cel/roles.yaml"] = _text(*_aggregated())
    made["chart/files/rules.yaml"] = _text(rights)
    for kind, folder in (("ClusterRole", "cluster"), ("Role", "namespaced")):
        granted = _granted(kind, "dlrover-operator", objects.operator_rules())
        made[f"{folder}/rights.yaml"] = _text(*granted)
    made["operator/lease.yaml"] = _text(
        *_granted("Role", "dlrover-operator-lease", objects.lease_rules())
    )
    return made


def without_rules(node: Any) -> Any:
    """Return a definition without its CEL rules, which clusters before Kubernetes 1.25 reject."""
    if isinstance(node, dict):
        kept = {key: child for key, child in node.items() if key != "x-kubernetes-validations"}
        return {key: without_rules(child) for key, child in kept.items()}
    return [without_rules(child) for child in node] if isinstance(node, list) else node


def _aggregated() -> list[Manifest]:
    """Return the roles that are aggregated into the cluster's own roles."""
    into = {"view": ["view", "edit", "admin"], "edit": ["edit", "admin"]}
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {
                "name": f"dlrover-{role}",
                "labels": {f"{prefix}{one}": "true" for one in into[role]},
            },
            "rules": rules,
        }
        for role, rules in objects.aggregated_rules().items()
    ]


def _granted(kind: str, name: str, rules: list[Manifest]) -> list[Manifest]:
    """Return a role of a kind and its binding to the operator's account."""
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": "dlrover-operator", "namespace": "dlrover-system"}
    return [
        {"apiVersion": f"{rbac}/v1", "kind": kind, "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": f"{kind}Binding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": rbac, "kind": kind, "name": name},
            "subjects": [subject],
        },
    ]


def _text(*documents: Manifest) -> str:
    """Return documents as the contents of a file."""
    return HEADER + yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=100)


class _Plain(yaml.SafeDumper):
    """A dumper without anchors: it writes repeated values in full."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True to write ``data`` in full."""
        return True


def _column(name: str, path: str, kind: str = "string", priority: int = 0) -> Manifest:
    column: Manifest = {"name": name, "type": kind, "jsonPath": path}
    return column | ({"priority": priority} if priority else {})


def _version(content: schema.Schema, columns: list[Manifest]) -> Manifest:
    return {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": columns,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": content},
    }


def _definition(kind: str, plural: str, short: list[str], version: Manifest) -> Manifest:
    spelled = {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": plural,
        "singular": kind.lower(),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "names": {**spelled, **({"shortNames": short} if short else {})},
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def main(folder: Path) -> None:
    """Write all files below a folder."""
    for name, content in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


if __name__ == "__main__":
    main(Path("deploy"))
