"""``--servers``: the range of parameter servers."""

from __future__ import annotations

import re

from dlrover.errors import ConfigurationError


def bounds(text: str, local_nodes: int) -> tuple[int, int]:
    """Return the least and the most number of parameter servers; zeros if ``text`` is empty.

    Args:
        text: ``MAX`` or ``MIN:MAX``.
        local_nodes: Value of ``--local-nodes``; 0 if not given.

    Raises:
        ConfigurationError: ``text`` is malformed, or DLRover could not start the servers.
    """
    if not text:
        return 0, 0
    if not re.fullmatch(r"([0-9]{1,6}:)?[0-9]{1,6}", text):
        raise ConfigurationError(
            f"--servers {text}: must be a whole number of servers, or two as MIN:MAX."
        )
    numbers = [int(part) for part in text.split(":")]
    least, most = numbers[0], numbers[-1]
    if least < 1:
        raise ConfigurationError(
            f"--servers {text}: must be 1 or more; leave it out for no servers."
        )
    if least > most:
        raise ConfigurationError(
            f"--servers {text}: the minimum, {least}, is greater than the maximum, {most}."
        )
    if not local_nodes:
        raise ConfigurationError(
            f"--servers {text}: DLRover must be able to start nodes; give --local-nodes N, the number of "
            "workers' nodes on this machine, or name the servers in spec.replicaSpecs.ps of an ElasticJob on "
            "Kubernetes."
        )
    return least, most
