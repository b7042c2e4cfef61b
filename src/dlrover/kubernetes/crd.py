"""CustomResourceDefinitions from the types; ``python -m dlrover.kubernetes.crd DIR`` writes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from dlrover.kubernetes import names, schema

Manifest = dict[str, Any]
HEADER = "# Written by python -m dlrover.kubernetes.crd; change src/dlrover/kubernetes/types.py.\n"
_WORKERS = ".spec.replicaSpecs.worker.replicas"


def elastic_jobs() -> Manifest:
    """The definition of ElasticJob."""
    scale = {
        "specReplicasPath": _WORKERS,
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    columns = [
        _column("State", ".status.phase"),
        _column("Workers", ".status.workers"),
        _column("Restarts", ".status.training.restarts", "integer"),
        _column("Step", ".status.training.step", "integer"),
        _column("Goodput", ".status.training.goodput"),
        _column("Age", ".metadata.creationTimestamp", "date"),
        _column("Message", ".status.message", priority=1),
    ]
    version = _version(schema.elastic_job(), columns)
    version["subresources"]["scale"] = scale
    return _definition("ElasticJob", "elasticjobs", ["ej"], version)


def scale_plans() -> Manifest:
    """The definition of ScalePlan."""
    columns = [
        _column("State", ".status.phase"),
        _column("Job", ".spec.ownerJob"),
        _column("Age", ".metadata.creationTimestamp", "date"),
    ]
    return _definition("ScalePlan", "scaleplans", [], _version(schema.scale_plan(), columns))


def definitions() -> dict[str, Manifest]:
    """All definitions, by the name of the file that has it."""
    return {
        f"{definition['metadata']['name']}.yaml": definition
        for definition in (elastic_jobs(), scale_plans())
    }


def text(definition: Manifest) -> str:
    """A definition as it stands in its file."""
    return HEADER + yaml.dump(definition, Dumper=_Plain, sort_keys=False, width=100)


class _Plain(yaml.SafeDumper):
    """Without anchors: what occurs twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Whether ``data`` is written in full."""
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


def main(folder: str) -> None:
    """Write all definitions into a folder."""
    for name, definition in definitions().items():
        (Path(folder) / name).write_text(text(definition))


if __name__ == "__main__":
    main(sys.argv[1])
