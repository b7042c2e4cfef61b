"""The versions that a job has: `latest` waits for one and opens its parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from dlrover._util import decoding
from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.roles.messages import (
    WEIGHTS,
    JobView,
    PartView,
    UseVersion,
    Version,
    VersionView,
    weights_in_words,
)
from dlrover.roles.runtime.memory import PartReader
from dlrover.roles.runtime.weights.holders import holders
from dlrover.roles.runtime.weights.publishing import WAIT
from dlrover.roles.runtime.weights.reading import Weights
from dlrover.roles.runtime.worker import RoleWorker, current_worker

logger = logging.getLogger(__name__)


def latest(
    *,
    name: str = WEIGHTS,
    wait: bool = True,
    newer_than: Version | Sequence[int] | None = None,
    timeout: float = WAIT,
) -> Weights | None:
    """Return the current version of weights; None without ``wait`` if there is none that is wanted.

    After a rollback of the role that publishes, the current version is the newest that is still valid, and any later
    one counts as newer. A version that was rolled back is never returned, and never holds up what came before it.

    Args:
        name: Name of the weights.
        wait: False: do not wait.
        newer_than: Return a version only if it is newer than this one, or if this one was rolled back. The list that a
            queue, a call or the cursor makes of a version is taken, too.
        timeout: Seconds to wait.

    Raises:
        ConfigurationError: ``newer_than`` is no version.
        InfrastructureError: There was no such version in time.
    """
    worker = current_worker()
    than = _version(newer_than) if newer_than is not None else None
    _declare(worker, name)
    until = time.monotonic() + (timeout if wait else 0.0)
    seen = -1
    while True:
        view = _awaited_view(worker, name, than, seen, until) if wait else worker.link.view
        if _wanted(view, name, than) is None:
            return None
        weights = _opened(worker, name, view)
        if weights is not None or not wait:
            return weights
        seen = view.number  # what it lists has gone: the next one says what is there


def _awaited_view(
    worker: RoleWorker, name: str, newer_than: Version | None, seen: int, until: float
) -> JobView:
    """Wait for a view with a version that is wanted, and return it."""

    def found(view: JobView) -> JobView | None:
        fresh = view.number != seen and _wanted(view, name, newer_than) is not None
        return view if fresh else None

    left = max(0.0, until - time.monotonic())
    view: JobView = worker.link.wait(found, left, lambda now: _awaited(now, name, newer_than))
    return view


def versions(name: str = WEIGHTS) -> list[Version]:
    """Return the versions that can be read now, oldest first; the last is the current one."""
    found = current_worker().link.view.weights.get(name)
    return [one.version for one in found.versions] if found is not None else []


def is_valid(version: Version | Sequence[int], name: str = WEIGHTS) -> bool:
    """Return whether a version is still one of the role's history: no rollback has undone it.

    Args:
        version: The version, or the list that a queue, a call or the cursor makes of it.
        name: Name of the weights.

    Raises:
        ConfigurationError: It is no version.
    """
    asked = _version(version)
    found = current_worker().link.view.weights.get(name)
    return found is not None and found.valid(asked)


def _version(value: Version | Sequence[int]) -> Version:
    try:
        return decoding.convert(value, Version)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"version {value!r:.100}: it must be a Version, or its epoch and step as a list."
        ) from error


def _wanted(view: JobView, name: str, newer_than: Version | None) -> VersionView | None:
    weights = view.weights.get(name)
    if weights is None or not weights.versions:
        return None
    current = weights.versions[-1]
    newer = newer_than is None or current.version > newer_than or not weights.valid(newer_than)
    return current if newer else None


def _awaited(view: JobView, name: str, newer_than: Version | None) -> str:
    """Return what `latest` waits for, in words."""
    weights = view.weights.get(name)
    than = f" newer than {newer_than}" if newer_than is not None else ""
    if weights is None:
        return f"a version of the {weights_in_words(name)}{than}: no role has published any"
    lost = (
        f"; version {weights.lost} was lost with the process that kept it, and {weights.role} may publish it again"
        if weights.lost
        else ""
    )
    now = (
        f"the current one is {weights.versions[-1].version}"
        if weights.versions
        else "there is none now"
    )
    return f"a version of the {weights_in_words(name)}{than} from {weights.role}: {now}{lost}"


def _opened(worker: RoleWorker, name: str, view: JobView) -> Weights | None:
    """Return the current version of a view; None if a part of it has gone."""
    weights = view.weights[name]
    current = weights.versions[-1]
    readers = []
    for part in current.parts:
        reader = _reader(worker, view, part)
        if reader is None:
            return None
        readers.append(reader)
    if weights.lost is not None:
        logger.warning(
            "Version %s of %s was lost with the process that kept it; version %s is the newest there is",
            weights.lost, name, current.version,
        )  # fmt: skip
    return Weights(worker, name, current.version, readers)


def _reader(worker: RoleWorker, view: JobView, part: PartView) -> PartReader | None:
    holder = view.member(part.holder.role, part.holder.index)
    if holder is None or holder.place != part.holder:
        return None
    try:
        return holders.connection(worker, holder.place, holder.address).read(part.key)
    except (OSError, ProtocolError) as error:  # another process may have its port by now
        logger.debug("%s keeps no weights any more: %s", holder.place, error)
        holders.drop(holder.place)
    except ConfigurationError as error:
        logger.debug("%s", error)
    return None


def _declare(worker: RoleWorker, name: str) -> None:
    """Say that this role works with the weights: from now on a member of it serves only with a current version."""
    known = worker.link.view.weights.get(name)
    if name not in holders.declared(worker) and (known is None or known.role != worker.role):
        worker.link.ask(UseVersion(worker.place, name, None))
    holders.declared(worker).add(name)
