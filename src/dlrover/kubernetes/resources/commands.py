"""The ``dlrover-run`` commands of containers, and the options in a role's command that the master follows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dlrover.kubernetes.resources.names import MAIN_CONTAINER, MASTER_ROLE
from dlrover.kubernetes.resources.types import ElasticJob, Manifest, ReplicaSpec
from dlrover.spec.node import SERVER

SWITCHES = (
    "module no-python run-path virtual-local-rank standalone help",
    "chief instances auto-scale network-check exclude-straggler save-at-breakpoint survive auto-config auto-tunning "
    "auto-tuning comm-perf-test numa-affinity version",
)
"""Options of ``dlrover-run`` without a value: those of torchrun, whose abbreviations come first, and its own."""
VALUES = (
    "role start-method numa-binding nnodes nproc-per-node node-rank rdzv-backend rdzv-endpoint rdzv-id rdzv-conf "
    "master-addr master-port local-addr max-restarts monitor-interval signals-to-handle shutdown-timeout "
    "event-log-handler log-dir redirects tee local-ranks-filter duplicate-stdout-filters duplicate-stderr-filters "
    "logs-specs",
    "local-nodes node-memory node-cpu node-unit spares servers server-failover server-module embedding-servers "
    "evaluators job-dir config dashboard lifeline-fd output accelerator platform ray-address ray-resources ray-env "
    "ray-working-dir precheck membind-policy training-port ucp-device-type",
)
"""Options with a value, likewise."""
SHORT = {"m": "module", "h": "help", "r": "redirects", "t": "tee"}
_OPTIONS = [
    (*switches.split(), *values.split()) for switches, values in zip(SWITCHES, VALUES, strict=True)
]
_SWITCHES = {*SWITCHES[0].split(), *SWITCHES[1].split()}
_LAUNCHERS = ("dlrover-run", "dlrover.trainer.torch.elastic_run")
"""The command, and the original's module, which is the same."""
_ABOUT = {"echo", "printf", "which", "type", "command", "hash", "pip", "ls", "test", "["}
"""Commands that may name the launcher without running it."""
_MARKS = "();<>|&\n"
"""Characters between the commands of a shell script."""


class LaunchCommand(NamedTuple):
    """A ``dlrover-run`` of a container."""

    words: list[str]
    """Its arguments; variables are as in the manifest."""
    in_shell: bool
    """Whether a shell replaces variables; Kubernetes replaces ``$(NAME)`` anyway."""


def main(template: Mapping[str, Any]) -> Manifest:
    """Return the container that runs ``dlrover-run``: ``main`` if there is one, else the first.

    A pod that was made of the template names it where it is not ``main``.
    """
    found: list[Manifest] = (template.get("spec") or {}).get("containers") or [{}]
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    name = annotations.get(MAIN_CONTAINER, "main")
    return next((one for one in found if one.get("name") == name), found[0])


def launched(template: Mapping[str, Any]) -> list[str]:
    """Return the arguments of the ``dlrover-run`` in a template's main container; empty if there is none."""
    found = [launch.words for launch in launches(main(template))]
    return next((words for words in found if divided(words)[1]), (found or [[]])[0])


def options(template: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a template's ``dlrover-run`` by name, as ``network-check``; a value may be empty.

    What follows the program is the program's. The arguments of an image's own command count as ``dlrover-run``'s.
    """
    container = main(template)
    of_image = [] if container.get("command") else list(map(str, container.get("args") or ()))
    found: dict[str, str] = {}
    for words in divided(launched(template) or of_image)[0]:
        name, _, value = _named(words[0])
        found[name] = value if len(words) == 1 else words[1]
    return found


def launches(container: Mapping[str, Any]) -> list[LaunchCommand]:
    """Return each ``dlrover-run`` that a container's command is, or that its shell script runs."""
    words = [str(one) for key in ("command", "args") for one in container.get(key) or ()]
    for index, word in enumerate(words):
        if _launches(words[:index], word):
            return [LaunchCommand(words[index + 1 :], in_shell=False)]
    return [
        LaunchCommand(command[index + 1 :], in_shell=True)
        for word in words
        for command in _commands(word)
        for index, one in enumerate(command)
        if _launches(command[:index], one)
    ]


def divided(words: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Return the options of a ``dlrover-run``, each as its one or two words, and the program with its arguments."""
    found, rest = [], list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        name, has_value, _ = _named(rest[0])
        length = 1 if has_value or name in _SWITCHES else 2
        found.append(rest[:length])
        rest = rest[length:]
    return found, rest


def takes(option: str) -> bool:
    """Return whether ``dlrover-run`` has an option, as ``--nnodes=2``."""
    name = _named(option)[0]
    return any(name in known for known in _OPTIONS)


def _named(word: str) -> tuple[str, bool, str]:
    """Return an option's name in full, whether its value is in the same word, and that value."""
    if not word.startswith("--"):
        return SHORT.get(word[1], word[1:]), len(word) > 2, word[2:]
    given, equals, value = word[2:].partition("=")
    given = given.replace("_", "-")
    for known in _OPTIONS:
        alike = [name for name in known if name.startswith(given)]
        if given not in alike and len(alike) == 1:
            return alike[0], bool(equals), value
    return given, bool(equals), value


def _launches(before: Sequence[str], word: str) -> bool:
    return word.rpartition("/")[2] in _LAUNCHERS and not _ABOUT.intersection(before)


def _commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell script."""
    command: list[str] = []
    words = iter(_split(re.sub(r"(?m)^\s*#.*$", "", script.replace("\\\n", " "))))
    for word in words:
        if not word or set(word).difference(_MARKS):
            command.append(word)
        elif set(word).intersection("<>"):
            next(words, "")  # the file of a redirection
        else:
            yield command
            command = []
    yield command


def _split(script: str) -> list[str]:
    lexer = shlex.shlex(script, posix=True, punctuation_chars=_MARKS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        return list(lexer)
    except ValueError:  # a quote without its end
        marks = re.escape(_MARKS)
        return re.findall(rf"[{marks}]+|[^\s{marks}]+", re.sub("[\"']", "", script))


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
