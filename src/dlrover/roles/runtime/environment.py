"""The environment by which a process finds its place in a job of several roles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrover import config, launched
from dlrover.errors import ConfigurationError, readable
from dlrover.roles.messages import MemberPlace
from dlrover.spec.jobdir import JobDir, TlsFiles


def variables(
    address: str,
    token: Path | str,
    role: str,
    attempt: int,
    *,
    job: str = "",
    settings: Mapping[str, Any] | None = None,
    tls: TlsFiles | None = None,
) -> dict[str, str]:
    """Return the variables for the processes of a role; their agents add index and number of instances.

    Args:
        address: Address of the coordinator's server.
        token: File with the token of the job, with the coordinator's address beside it if that changes; or the token
            itself, for machines without the file.
        role: Name of the role.
        attempt: Number of the start of the role's job.
        job: Name of the job.
        settings: The user's configuration of the role.
        tls: Of the job.
    """
    tls = tls or TlsFiles()
    values = {
        "address": address,
        "token_file" if isinstance(token, Path) else "token": str(token),
        "job": job,
        "role": role,
        "attempt": str(attempt),
        "config": json.dumps(settings or {}),
        "tls_ca": tls.ca,
        "tls_server_name": tls.server_name,
    }
    return {config.ROLE_VARIABLES[field]: value for field, value in values.items()}


def given() -> config.RolePlace:
    """Return the place of this process.

    Raises:
        ConfigurationError: It has none.
    """
    found = config.role_place(config.environ())
    if found is None:
        raise ConfigurationError(
            "This process belongs to no job of several roles; start the job with dlrover roles FILE."
        )
    return found


def credentials(found: config.RolePlace) -> tuple[str, JobDir | None]:
    """Return the job's token, and the directory with the coordinator's address if it has one on this machine.

    Raises:
        ConfigurationError: There is no token.
    """
    if found.token:
        return found.token, None
    path = Path(found.token_file or "DLROVER_ROLES_TOKEN_FILE")
    with readable(str(path)):
        return path.read_text().strip(), JobDir(path.parent)


def place(found: config.RolePlace) -> MemberPlace:
    """Return the life of this instance."""
    return MemberPlace(found.role, found.index, found.attempt, launched.given.round)
