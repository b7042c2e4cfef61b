"""Validation of manifests: one sentence per fault, with the field, its value and what is accepted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dlrover._util import decoding
from dlrover.errors import ConfigurationError
from dlrover.kubernetes.resources import names, schema
from dlrover.kubernetes.resources.rules import RULES, TEMPLATE_RULES, canonical, objects
from dlrover.kubernetes.resources.types import QUANTITY, ElasticJob
from dlrover.spec.node import SERVER

_QUANTITY = re.compile(QUANTITY)
_NAME = re.compile(names.JOB_NAME)
_BOUNDED = {
    "minProperties": "a map of {minProperties} to {maxProperties} entries",
    "maxItems": "a list of at most {maxItems} entries",
    "maxLength": "a string of at most {maxLength} characters",
}
"""Descriptions of the values that a schema node with a limit accepts."""
_LONGEST_SHOWN = 60
DEEPEST = 100
"""Levels of nested maps and lists that a spec may have; a pod's template has about ten."""
_TYPES: dict[str, tuple[type[Any], str]] = {
    "object": (dict, "a map of fields"),
    "array": (list, "a list"),
    "string": (str, "a string"),
    "integer": (int, "a whole number"),
    "boolean": (bool, "true or false"),
}


def parse(manifest: Mapping[str, Any]) -> ElasticJob:
    """Return the job of a manifest.

    Raises:
        ConfigurationError: the manifest is invalid (the first of its `faults`), or its only pods are servers.
    """
    found = faults(manifest) or list(_servers_alone(manifest["spec"]))
    if found:
        raise ConfigurationError(found[0])
    job = decoding.convert({**manifest, "status": {}}, ElasticJob)
    roles = {canonical(role): spec for role, spec in job.spec.replica_specs.items()}
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, replica_specs=roles))


def faults(manifest: Mapping[str, Any], *, strict: bool = False) -> list[str]:
    """Return every fault of an ElasticJob's manifest; ``strict``: also report unknown fields."""
    metadata = manifest.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    found = list(_name(name))
    if "spec" not in manifest:
        return [*found, "spec is missing: accepted is the job's spec, with replicaSpecs."]
    if _is_deeper(manifest["spec"], DEEPEST):
        return [
            *found,
            f"spec is nested more than {DEEPEST} levels deep: accepted are pod templates.",
        ]
    spec_schema = schema.elastic_job()["properties"]["spec"]
    found += _walk("spec", manifest["spec"], spec_schema, strict=strict)
    return found or list(_rules(manifest["spec"]))


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether maps and lists are nested in more levels than these."""
    inner = {id(value): value}  # each once: YAML may name one value in many places
    for _ in range(levels):
        children = (
            child
            for one in inner.values()
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
        )
        inner = {id(child): child for child in children}
    return any(isinstance(one, dict | list) for one in inner.values())


def _servers_alone(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield a fault if only servers have pods. API servers accept that: the original adds the workers."""
    numbers = {
        canonical(role): one.get("replicas", 1) for role, one in spec["replicaSpecs"].items()
    }
    servers = numbers.pop(SERVER, 0)
    numbers.pop(names.MASTER_ROLE, None)
    if servers and not any(numbers.values()):
        yield (
            f"spec.replicaSpecs has no pod but {servers} of {SERVER}: servers need a worker or a chief, "
            "with replicas of 1 or more."
        )


def _name(name: Any) -> Iterator[str]:
    if not isinstance(name, str) or not name:
        yield f"metadata.name is {_shown(name)}: accepted is a name."
    elif not _NAME.fullmatch(name):
        yield (
            f"metadata.name is {_shown(name)}: accepted are lower case letters, digits and '-', with a "
            "letter first and no '-' last."
        )
    elif len(name) > names.LONGEST_NAME:
        yield (
            f"metadata.name is {_shown(name)}: accepted are {names.LONGEST_NAME} characters at most, "
            "as the master's Service is named after it."
        )


def _rules(spec: Mapping[str, Any]) -> Iterator[str]:
    for rule in (*RULES, *TEMPLATE_RULES):
        for path, value in objects(spec, rule.path):
            of_master = canonical(path).split(".")[2:3] == [names.MASTER_ROLE]
            if (of_master and rule in TEMPLATE_RULES) or rule.holds(value):
                continue
            field = f"{path}.{rule.at}" if rule.at else path
            at = _below(value, rule.at)
            shown = rule.shown(value) if rule.shown is not None else _shown(at)
            yield f"{field} is {shown}: accepted is {rule.says}."


def _below(value: Any, at: str) -> Any:
    for key in filter(None, at.split(".")):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _walk(path: str, value: Any, node: Mapping[str, Any], *, strict: bool) -> Iterator[str]:
    if node.get("x-kubernetes-int-or-string"):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not whole and not (isinstance(value, str) and _QUANTITY.fullmatch(value)):
            yield f"{path} is {_shown(value)}: accepted is a quantity, as 2, 500m or 3Gi."
        return
    if value is None and node.get("nullable"):
        return
    kind = node.get("type", "object")
    if not isinstance(value, _TYPES[kind][0]) or (kind == "integer" and isinstance(value, bool)):
        yield f"{path} is {_shown(value)}: accepted is {_accepted(node)}."
        return
    if not _fits(value, node):
        yield f"{path} is {_shown(value)}: accepted is {_accepted(node)}."
    elif kind == "object":
        yield from _fields(path, value, node, strict=strict)
    elif kind == "array":
        for index, item in enumerate(value):
            yield from _walk(f"{path}[{index}]", item, node["items"], strict=strict)


def _fields(
    path: str, value: Mapping[str, Any], node: Mapping[str, Any], *, strict: bool
) -> Iterator[str]:
    known = node.get("properties", {})
    for key in node.get("required", ()):
        if key not in value:
            yield f"{path}.{key} is missing: accepted is {_accepted(known[key])}."
    for key, child in value.items():
        inner = known.get(key, node.get("additionalProperties"))
        if inner is not None:
            yield from _walk(f"{path}.{key}", child, inner, strict=strict)
        elif strict and not node.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}.{key} is unknown: accepted are {', '.join(sorted(known))}."


def _fits(value: Any, node: Mapping[str, Any]) -> bool:
    if isinstance(value, str):
        return (
            value in node.get("enum", (value,))
            and re.search(node.get("pattern", ""), value) is not None
            and node.get("minLength", 0) <= len(value) <= node.get("maxLength", len(value))
        )
    if isinstance(value, int):
        return bool(node.get("minimum", value) <= value <= node.get("maximum", value))
    if isinstance(value, list):
        return bool(len(value) <= node.get("maxItems", len(value)))
    if isinstance(value, dict):
        count = len(value)
        return bool(node.get("minProperties", 0) <= count <= node.get("maxProperties", count))
    return True


def _accepted(node: Mapping[str, Any]) -> str:
    """Return what a node accepts, in words."""
    if "enum" in node:
        return _alternatives([value or "nothing" for value in node["enum"]])
    if "pattern" in node:
        return str(node["description"]).rstrip(".")
    if "minimum" in node:
        most = f" and at most {node['maximum']}" if "maximum" in node else ""
        return f"a whole number of at least {node['minimum']}{most}"
    for limit, words in _BOUNDED.items():
        if limit in node:
            return words.format(**node)
    return "a string that is not empty" if node.get("minLength") else _TYPES[node["type"]][1]


def _alternatives(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
