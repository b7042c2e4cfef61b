"""The ``dlrover-run`` options in a role's command that the master follows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from dlrover.kubernetes.resources.names import MASTER_ROLE
from dlrover.kubernetes.resources.types import ElasticJob, ReplicaSpec
from dlrover.spec.node import SERVER


def options(template: Mapping[str, Any]) -> dict[str, str]:
    """Return the options in a template's command, such as ``network-check``; a value may be empty."""
    found: dict[str, str] = {}
    words = list(_words(template))
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            found[name.replace("_", "-")] = value if has_value else following
    return found


def launched(template: Mapping[str, Any]) -> list[str]:
    """Return the arguments of the ``dlrover-run`` in a template's command; empty if there is none."""
    words = list(_words(template))
    for index, word in enumerate(words):
        if word.rpartition("/")[2] == "dlrover-run":
            return words[index + 1 :]
    return []


def number(text: str, default: int) -> int:
    """Return an option's value; the default for errors and shell variables, left to ``dlrover-run``."""
    return int(text) if text.isdecimal() else default


def fewest_nodes(job: ElasticJob) -> int:
    """Return the minimum number of nodes for the job to run, including servers."""
    return _fewest_others(job) + fewest_servers(job)


def fewest_servers(job: ElasticJob) -> int:
    """Return the minimum number of servers for the job to run."""
    spec = job.spec.replica_specs.get(SERVER)
    return 0 if spec is None else _fewest(spec)


def _fewest(spec: ReplicaSpec) -> int:
    return min(spec.min_replicas or spec.replicas, spec.replicas)


def _fewest_others(job: ElasticJob) -> int:
    roles = {
        role: spec
        for role, spec in job.spec.replica_specs.items()
        if role not in (MASTER_ROLE, SERVER)
    }
    if not roles:
        return 0
    if any(spec.min_replicas is not None for spec in job.spec.replica_specs.values()):
        return max(1, sum(map(_fewest, roles.values())))
    total = sum(spec.replicas for spec in roles.values())
    worker = roles.get("worker") or next(iter(roles.values()))
    fewest, is_range, _ = options(worker.template).get("nnodes", "").partition(":")
    return max(1, min(total, number(fewest if is_range else "", total)))


def _words(template: Mapping[str, Any]) -> Iterator[str]:
    for container in ((template.get("spec") or {}).get("containers") or ())[:1]:
        for argument in [*(container.get("command") or ()), *(container.get("args") or ())]:
            yield from _split(str(argument))


def _split(text: str) -> list[str]:
    """Return the words of an argument, which may be an entire shell script."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()
