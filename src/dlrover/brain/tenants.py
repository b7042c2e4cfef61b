"""Tenants: each has its own ids, whatever names it gives its jobs, plans and requests.

The id ``bert`` of the tenant ``vision`` is ``vision bert`` in the database. No client can send a blank in an
id, so neither a tenant nor a job without one can name another tenant's jobs. The operator decides what a
tenant's jobs may claim of the cluster: their priority and their queue.
"""

from __future__ import annotations

import hmac
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dlrover._util import decoding
from dlrover.errors import ConfigurationError, ProtocolError, kind_of
from dlrover.spec import brain

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,18}[A-Za-z0-9])?")
"""Pattern of a tenant's name, which has at most 20 characters."""
LEAST_TOKEN = 16
"""Minimum length of a tenant's token, in characters."""
MOST_ID = 100
"""Maximum length of an id in the database, the tenant's name included, in characters."""
_IDS = ("request", "job", "plan_id")
_NOT_A_TENANTS = (brain.ReportCluster, brain.SetQuota, brain.AskCluster, brain.AskDivision)


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant as in its file: the token in the first line, the other fields below it, as TOML."""

    token: Annotated[str, Meta(min_length=LEAST_TOKEN)]
    priority: Annotated[float, Meta(gt=0)] = 1.0
    """Highest priority that a job may have."""
    queues: tuple[brain.Id, ...] = ()
    """Queues that a job may name; the first is the default. Empty: the queue with the tenant's name."""


def read_tenants(folder: str, operator: str) -> dict[str, Tenant]:
    """Return the tenants by name. Each has a file with its name, as in a mounted Secret.

    Args:
        folder: The directory; empty: there are no tenants.
        operator: The token of the Brain's operator, which no tenant may have.

    Raises:
        ConfigurationError: The directory cannot be read, or a name, a token or a limit is wrong.
    """
    found: dict[str, Tenant] = {}
    for path in sorted(Path(folder).iterdir()) if folder and _readable(folder) else ():
        if path.name.startswith("."):
            continue
        if not NAME.fullmatch(path.name):
            raise ConfigurationError(
                f"--tenants {folder} has a file {path.name}: the name of a tenant has 1 to 20 letters, digits, "
                "'-', '_' and '.', and begins and ends with a letter or a digit."
            )
        try:
            token, _, limits = path.read_text().strip().partition("\n")
            token = token.strip()
        except (OSError, UnicodeDecodeError) as error:
            raise kind_of(error)(
                f"The token of the tenant {path.name} cannot be read: {error}."
            ) from error
        if len(token) < LEAST_TOKEN:
            raise ConfigurationError(
                f"The token of the tenant {path.name} has {len(token)} characters: it must have at least "
                f"{LEAST_TOKEN} that cannot be guessed (openssl rand -hex 32)."
            )
        tokens = {name: tenant.token for name, tenant in found.items()}
        for other, known in {"the operator": operator, **tokens}.items():
            if hmac.compare_digest(known.encode(), token.encode()):
                raise ConfigurationError(
                    f"The token of the tenant {path.name} is that of {other}: each must have its own."
                )
        found[path.name] = _limited(path.name, token, limits)
    return found


def _limited(name: str, token: str, limits: str) -> Tenant:
    """Return a tenant with the limits below its token."""
    try:
        return decoding.convert({**msgspec.toml.decode(limits), "token": token}, Tenant)
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"The file of the tenant {name} is wrong below its token: {error}; it takes priority (a number above"
            " 0) and queues (a list of names)."
        ) from error


def _readable(folder: str) -> bool:
    if not Path(folder).is_dir():
        raise ConfigurationError(
            f"--tenants {folder} is not a directory: it has a file per tenant."
        )
    return True


def own(message: Any, tenant: str, limits: Tenant | None = None) -> Any:
    """Return a message with its ids as in the database, and within what the tenant may claim.

    Raises:
        ProtocolError: a tenant may not say or ask this, or an id is too long.
    """
    if not tenant:
        return message
    if isinstance(message, _NOT_A_TENANTS):
        raise ProtocolError(
            f"The tenant {tenant} may speak of its own jobs only; this takes the operator's token."
        )
    names = {key: f"{tenant} {getattr(message, key)}" for key in _IDS if hasattr(message, key)}
    for key, name in names.items():
        if len(name) > MOST_ID:
            raise ProtocolError(
                f"{key} has {len(name)} characters with the tenant's name: {MOST_ID} are the most."
            )
    if isinstance(message, brain.RegisterJob) and limits is not None:
        message = msgspec.structs.replace(
            message, description=_within(message.description, tenant, limits)
        )
    return msgspec.structs.replace(message, **names)


def _within(description: brain.Description, tenant: str, limits: Tenant) -> brain.Description:
    """Return a job's description, with the queue that it counts to."""
    if description.priority > limits.priority:
        raise ProtocolError(
            f"priority is {description.priority:g}: a job of the tenant {tenant} may have {limits.priority:g} at most."
        )
    queues = limits.queues or (tenant,)
    queue = description.queue or queues[0]
    if queue not in queues:
        raise ProtocolError(
            f"queue is {queue}: a job of the tenant {tenant} may name {' or '.join(queues)}."
        )
    return msgspec.structs.replace(description, queue=queue)


def shown(answer: Any, tenant: str) -> Any:
    """Return an answer with the ids that the caller knows."""
    if not tenant:
        return answer
    changes: dict[str, Any] = {
        key: getattr(answer, key).removeprefix(f"{tenant} ")
        for key in _IDS
        if isinstance(getattr(answer, key, None), str)
    }
    if isinstance(answer, brain.Jobs):
        changes["jobs"] = tuple(shown(row, tenant) for row in answer.jobs)
    if isinstance(answer, brain.Story):
        changes["job"] = shown(answer.job, tenant)
        changes["plans"] = tuple(shown(plan, tenant) for plan in answer.plans)
    return msgspec.structs.replace(answer, **changes)
