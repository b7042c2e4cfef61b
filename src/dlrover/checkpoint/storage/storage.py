"""Checkpoints in a directory: their names, and the choice of usable ones.

::

    <directory>/
    ├── checkpoint-id          the identity of the directory; a new directory gets a new one
    ├── latest                 the `SaveId` of the newest stored step (JSON)
    ├── step-40/               one checkpoint: the files that DCP reads, and
    │   ├── manifest.json      a `Manifest`; written last
    │   └── rank-0.index       a `RankIndex`: the place and checksum of each tensor of a rank
    ├── step-30.bad/           a damaged step
    └── .step-50.<session>-<number>/    a save that is being written

Stores that cannot rename use a slightly different layout, see `dlrover.checkpoint.storage.remote`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable

import msgspec

from dlrover.checkpoint.machine.policies import Policy, StepInfo
from dlrover.checkpoint.machine.saves import Newest, SaveId, StepOrder
from dlrover.checkpoint.storage import faults, formats
from dlrover.checkpoint.storage.formats import OtherFormatError
from dlrover.checkpoint.storage.stored_step import read_manifest
from dlrover.checkpoint.storage.stores import (
    IDENTITY,
    MANIFEST,
    TRACKER,
    Draft,
    StorageAwayError,
    Store,
    explained,
    failure,
    join,
    step_folder,
)  # fmt: skip
from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)

IDENTITY_BYTES = 16
IDENTITY_WAIT = 10.0
"""Seconds in which another process completes the identity that it has begun to write."""
GIVEN_UP, BREAKPOINT_GIVEN_UP = "given-up", "given-up.breakpoint"
"""Mark files of a given-up save: for the training's attempt, and for the last one, at the breakpoint.

Each request of a user is an attempt of its own, whose mark is `requested`."""
_STEP = re.compile(r"step-(\d{1,19})")  # no more than a step's number can have


class _Saved(msgspec.Struct):
    """The part of a manifest that identifies the save."""

    save: SaveId


_DAMAGED = SaveId(0, 0, -1, 0)


# ---- identity


def identity(store: Store, *, create: bool = True) -> str:
    """Return the identity of this directory, made at its first use; every process gets the same one.

    Without ``create``, write nothing, and return an empty text for a directory that has no identity yet.

    Raises:
        InfrastructureError: the directory cannot be read or written, or its identity is incomplete.
    """
    with explained(f"The checkpoint directory {store.location} cannot be used"):
        if not store.exists(IDENTITY):
            if not create:
                return ""
            store.write_once(IDENTITY, secrets.token_hex(IDENTITY_BYTES).encode())
        return _whole_identity(store)


def _whole_identity(store: Store) -> str:
    """Read the identity; wait for a process that is writing it, as some file systems show files half written."""
    until = time.monotonic() + IDENTITY_WAIT
    while len(found := store.read(IDENTITY).decode(errors="replace").strip()) < 2 * IDENTITY_BYTES:
        if time.monotonic() > until:
            raise InfrastructureError(
                f"{store.where(IDENTITY)} is incomplete: the process that wrote it has died. Delete it."
            )
        threading.Event().wait(store.poll)
    return found


def check_identity(store: Store, expected: str) -> None:
    """Refuse a directory without the expected identity, for example because its disk was unmounted.

    Raises:
        OSError: the identity is missing or differs, or cannot be read.
    """
    try:
        found = store.read(IDENTITY).decode(errors="replace").strip()
    except FileNotFoundError:
        found = ""
    if found != expected:
        raise OSError(errno.ESTALE, "it is not the directory any more that it was", store.location)


# ---- what is there


def steps(store: Store) -> list[int]:
    """Return the steps that look complete, newest first."""
    return list(saves(store))


def saves(store: Store) -> dict[int, SaveId | None]:
    """Return the steps that look complete, newest first, with the save of each.

    The save is None if the manifest is damaged, or was written by another version of DLRover.

    Raises:
        OSError: the steps cannot be read.
    """
    matches = map(_STEP.fullmatch, store.names())
    found: dict[int, SaveId | None] = {}
    for match in matches:
        if match:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found[int(match[1])] = _saved_here(store, int(match[1]))
    order = StepOrder(save for save in found.values() if save is not None)
    return dict(sorted(found.items(), key=lambda item: order.key(*item), reverse=True))


def save_of(store: Store, step: int) -> SaveId | None:
    """Return the save of a stored step; None if there is no such step, or its manifest is damaged.

    Raises:
        OSError: the step cannot be read.
        OtherFormatError: another version of DLRover has written it.
    """
    try:
        return _saved(store, step)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _saved(store: Store, step: int) -> SaveId | None:
    try:
        data = store.read(join(step_folder(step), MANIFEST))
        return formats.decode(data, _Saved, store.where(step_folder(step))).save
    except msgspec.DecodeError:
        return None


def _saved_here(store: Store, step: int) -> SaveId | None:
    try:
        return _saved(store, step)
    except OtherFormatError:
        return None


def is_published(store: Store, save: SaveId) -> bool:
    """Return True if a save is stored, or a later save of the same step and session.

    Raises:
        OSError: the step cannot be read.
        OtherFormatError: another version of DLRover has stored the step.
    """
    known = save_of(store, save.step)
    return known is not None and known.session == save.session and known.number >= save.number


def newest(store: Store) -> Newest:
    """Return the greatest line and number that the directory knows.

    Raises:
        InfrastructureError: the directory cannot be read.
    """
    last = tracked(store)
    with explained(f"{store.location} cannot be read"):
        known = [save for save in saves(store).values() if save is not None]
    return Newest().including(*known, *([last] if last is not None else []))


def begin_line(store: Store, step: int, line: int) -> None:
    """Move a step, and the steps that led to it, to a new line; newer steps are thereby abandoned.

    Raises:
        OSError: a manifest or the tracker cannot be written.
        InfrastructureError: the manifest of a step is damaged.
    """
    known = saves(store)
    last = known.get(step)
    if last is None or last.line > line:
        return
    for other, save in sorted(known.items(), key=lambda item: item[0] == step):  # step itself last
        if save is not None and save.line == last.line and save.number <= last.number:
            manifest = read_manifest(store, step_folder(other))
            moved = msgspec.structs.replace(save, line=line)
            renewed = msgspec.structs.replace(manifest, save=moved)
            store.write(join(step_folder(other), MANIFEST), formats.encode(renewed))
    track(store, msgspec.structs.replace(last, line=line))


def tracked(store: Store) -> SaveId | None:
    """Return the newest save ever stored; None if none was, a save of step -1 if the tracker is damaged.

    Raises:
        InfrastructureError: the tracker cannot be read, or another version of DLRover has written it.
    """
    try:
        return _tracked(store)
    except (OSError, MemoryError) as error:
        raise failure(error, f"{store.where(TRACKER)} cannot be read") from error


def _tracked(store: Store) -> SaveId | None:
    try:
        return formats.decode(store.read(TRACKER), SaveId, store.where(TRACKER))
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        return _DAMAGED


def track(store: Store, save: SaveId) -> None:
    """Record a save as the newest stored one, unless a newer one is recorded.

    Raises:
        OSError: the record cannot be read or written; the call can be retried.
        OtherFormatError: another version of DLRover has written it.
    """
    last = _tracked(store)
    if last is None or last <= save:
        store.write(TRACKER, formats.encode(save))
        store.sync("")


def quarantine(store: Store, step: int, manifest: bytes | None = None) -> None:
    """Withdraw a damaged step, unless its manifest no longer equals ``manifest``."""
    try:
        if manifest is None or store.read(join(step_folder(step), MANIFEST)) == manifest:
            logger.warning("Step %d is damaged and is now %s", step, store.quarantine(step))
    except OSError as error:
        logger.warning("Step %d is damaged and stays in its place: %s", step, error)


def prune(store: Store, policy: Policy, guard: Callable[[], None] = lambda: None) -> None:
    """Delete the steps that the policy does not keep.

    Args:
        store: the directory.
        policy: the policy that chooses the steps to keep.
        guard: called before each deletion; raises if the deletion is not allowed.

    Raises:
        OSError: a step cannot be deleted.
        StorageAwayError: the data that the policy needs cannot be read now.
    """
    with explained(f"{store.location} cannot be read"):
        stored = {step: save for step, save in saves(store).items() if save is not None}
    kept = policy.kept([_info(store, save, policy) for save in stored.values()])
    for step in stored:
        if step in kept:
            continue
        faults.point("prune.begun")
        guard()
        store.remove_step(step)


def _info(store: Store, save: SaveId, policy: Policy) -> StepInfo:
    metrics: dict[str, float] = {}
    if policy.uses_metrics:
        try:
            metrics = read_manifest(store, step_folder(save.step)).metrics
        except StorageAwayError:
            raise
        except InfrastructureError:
            pass  # damaged: its metrics are not known
    return StepInfo(save.step, save.line, save.number, metrics)


def requested(request: str) -> str:
    """Return the mark file of the attempt that a user's request makes."""
    return f"{GIVEN_UP}.{request}"


def give_up(store: Store, identity: str, save: SaveId, mark: str = GIVEN_UP) -> None:
    """Mark a save as given up, for all its writers in this attempt, present and future.

    Raises:
        OSError: the mark cannot be written, or the directory does not have the ``identity``.
    """
    if identity:
        check_identity(store, identity)
    store.give_up(save, mark)


def is_given_up(store: Store, draft: Draft, mark: str = GIVEN_UP) -> bool:
    """Return True if a writer of a save has given it up, or the save has been published.

    At a breakpoint and on request, only a mark made there counts: a save that failed before is retried.

    Raises:
        OSError: the marks cannot be read.
    """
    marks = {mark, BREAKPOINT_GIVEN_UP} if mark == GIVEN_UP else {mark}
    return store.is_given_up(draft) or any(store.exists(join(draft.marks, each)) for each in marks)


def remove_marks(store: Store, draft: Draft) -> None:
    """Delete the marks of earlier attempts, which would otherwise become part of the step."""
    for name in store.names(draft.marks):
        if name.startswith(GIVEN_UP):
            store.delete(join(draft.marks, name))


def remove_unfinished(store: Store, session: int, idle: float = 0.0) -> None:
    """Delete unfinished saves of worlds other than ``session``, which no process may still be writing.

    Only saves unchanged for ``idle`` seconds are deleted. If a deletion fails, the save stays.
    """
    store.adopt()
    for left in store.leftovers():
        if f"{session:016x}" not in left.name and (
            time.time() - store.modified(left.folder) >= idle
        ):
            with contextlib.suppress(OSError):
                store.remove(left.folder)


def remove_given_up(store: Store, session: int, before: int | None = None) -> None:
    """Delete this world's unfinished saves with numbers below ``before``: it stores one save after the other.

    Without ``before``, all are deleted. If a deletion fails, the save stays.
    """
    store.adopt()
    for left in store.leftovers():
        match = re.search(f"{session:016x}-(\\d+)", left.name)
        if match and (before is None or int(match[1]) < before):
            with contextlib.suppress(OSError):
                store.remove(left.folder)


def adopt(store: Store) -> None:
    """Restore steps whose replacement was cut short, if possible; log a failure."""
    try:
        store.adopt()
    except OSError as error:
        logger.warning("What a saver left in %s stays: %s", store.location, error)
