"""Structural Kubernetes schemas derived from the types: no references, no alternatives, defaults in place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.rules import RULES, TEMPLATE_RULES, FieldRule
from dlrover.kubernetes.resources.types import ElasticJob, ScalePlan

Schema = dict[str, Any]
_DROPPED = ("title", "anyOf", "$ref")
_INT_OR_STRING = "x-kubernetes-int-or-string"


@cache
def elastic_job() -> Schema:
    """Return the schema of an ElasticJob, with its CEL rules."""
    schema = _of(ElasticJob)
    schema["x-kubernetes-validations"] = [
        {
            "rule": f"size(self.metadata.name) <= {names.LONGEST_NAME}",
            "message": f"metadata.name: accepted are {names.LONGEST_NAME} characters at most",
        },
        {
            "rule": f"self.metadata.name.matches('^{names.JOB_NAME}$')",
            "message": "metadata.name: accepted are lower case letters, digits and '-', with a letter "
            "first and no '-' last",
        },
    ]
    spec = schema["properties"]["spec"]
    for rule in RULES:
        _add(_at(spec, rule.path), rule.cel, rule)
    for rule in TEMPLATE_RULES:
        _add(_at(spec, rule.path[:-1]), _but_master(rule.cel), rule)
    return schema


@cache
def scale_plan() -> Schema:
    """Return the schema of a ScalePlan."""
    return _of(ScalePlan)


def _of(kind: type[msgspec.Struct]) -> Schema:
    found = msgspec.json.schema(kind)
    schema = _structural(found["$defs"][kind.__name__], found["$defs"])
    properties = schema["properties"]
    properties["metadata"] = {"type": "object"}
    properties["apiVersion"] = {"type": "string"}
    properties["kind"] = {"type": "string"}
    _without_defaults(properties["status"])
    properties["status"].pop("default", None)
    schema["required"] = ["spec"]
    return schema


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Return a node with its references resolved and ``null`` removed, since unset fields are absent."""
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        node = {**target, **node}
    alternatives = [n for n in node.get("anyOf", ()) if n.get("type") != "null"]
    if _INT_OR_STRING not in node and alternatives:
        node = {**_structural(alternatives[0], definitions), **node}
    result = {key: value for key, value in node.items() if key not in _DROPPED}
    if result.get("default") in (None, [], "") or isinstance(result["default"], dict):
        result.pop("default", None)
    if not result.get("required", True):
        del result["required"]
    if "properties" in result:
        result["properties"] = {
            key: _structural(value, definitions) for key, value in node["properties"].items()
        }
    for key in ("additionalProperties", "items"):
        if isinstance(node.get(key), dict):
            child = _structural(node[key], definitions)
            # A map with unrestricted values is an object that keeps its fields.
            result.pop(key) if not child else result.update({key: child})
    if "enum" in result:
        result.setdefault("type", "string")
    return result


def _without_defaults(node: Schema) -> None:
    node.pop("default", None)
    for child in node.get("properties", {}).values():
        _without_defaults(child)
    for key in ("additionalProperties", "items"):
        if isinstance(node.get(key), dict):
            _without_defaults(node[key])


def _at(schema: Schema, path: tuple[str, ...]) -> Schema:
    for key in path:
        schema = schema["additionalProperties"] if key == "*" else schema["properties"][key]
    return schema


def _add(node: Schema, cel: str, rule: FieldRule) -> None:
    subject = rule.at or ".".join(p for p in rule.path if p != "*") or "spec"
    validation = {"rule": cel, "message": f"{subject}: accepted is {rule.says}"}
    node.setdefault("x-kubernetes-validations", []).append(validation)


def _but_master(cel: str) -> str:
    """Turn a rule about one ``replica`` into one about the whole map, where the roles' names are visible."""
    about = cel.replace("replica.", "self[role].")
    return f"self.all(role, role.lowerAscii() == '{names.MASTER_ROLE}' || ({about}))"
