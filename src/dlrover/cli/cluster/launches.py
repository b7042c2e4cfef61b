"""The check of the ``dlrover-run`` commands in an ElasticJob's pods, with the launcher's own parser."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping

from dlrover.cli.run import arguments
from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine import nodes
from dlrover.kubernetes.platform import job as elastic_job
from dlrover.kubernetes.resources import commands
from dlrover.kubernetes.resources.commands import LaunchCommand
from dlrover.kubernetes.resources.names import MASTER_ROLE
from dlrover.kubernetes.resources.types import ElasticJob, Manifest

_OF_NODE = {"DLROVER_MASTER_ADDR": "master:50001"}
"""What every node's main container has, besides its number of nodes."""
_ANY_PROGRAM = "program"


def check(job: ElasticJob) -> None:
    """Refuse a job whose pods could not start, or whose master could not read their options.

    Raises:
        ConfigurationError: the first command with an option or a value that ``dlrover-run`` does not take.
    """
    for role, replica in job.spec.replica_specs.items():
        if role == MASTER_ROLE:
            continue
        main = commands.main(replica.template)
        for container in (replica.template.get("spec") or {}).get("containers") or ():
            environ = _environ(job, container, is_main=container is main)
            try:
                for launch in commands.launches(container):
                    _parse(launch, environ)
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"spec.replicaSpecs.{role}.template: dlrover-run in container {container.get('name', 'main')} "
                    f"would not start: {error}"
                ) from error
    if not job.spec.roles:
        elastic_job.request(job)


def _environ(job: ElasticJob, container: Manifest, *, is_main: bool) -> Mapping[str, str]:
    """Return the variables of a container whose values the manifest has."""
    given = {one.name: one.value for one in job.spec.envs.values() if one.value_from is None}
    for one in container.get("env") or ():
        given.pop(one["name"], None)
        if not one.get("valueFrom"):
            given[one["name"]] = str(one.get("value") or "")
    known = {name: value for name, value in given.items() if "$(" not in value}
    return {**known, **(_OF_NODE | {"NODE_NUM": str(nodes.count(job))} if is_main else {})}


def _parse(launch: LaunchCommand, environ: Mapping[str, str]) -> None:
    """Parse a command as far as it is known before variables are replaced.

    Raises:
        ConfigurationError: an option or a value is wrong.
    """
    options, program = commands.divided(launch.words)
    known = [words for words in options if _is_known(words, launch)]
    words = [word for option in known for word in option]
    if program[:1] and _varies(program[0], launch):
        program = [_ANY_PROGRAM]  # it may be options, too
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):  # --help
        if known == options and program != [_ANY_PROGRAM]:
            arguments.parse_elsewhere([*words, *program], environ, lambda _devices: 1)
        else:
            arguments.build_parser(environ).parse_args([*words, *(program or [_ANY_PROGRAM])])


def _is_known(option: list[str], launch: LaunchCommand) -> bool:
    """Return whether an option can be checked; a misspelt one can, whatever its value."""
    return not commands.takes(option[0]) or not any(_varies(word, launch) for word in option)


def _varies(word: str, launch: LaunchCommand) -> bool:
    """Return whether a variable stands in a word."""
    return "$(" in word or (launch.in_shell and ("$" in word or "`" in word))
