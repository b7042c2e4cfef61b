"""The record that all ranks of a training once had a save in memory.

::

    <directory>/saved                       that save, a `FirstSave`
    <directory>/.saved.<session>.<rank>.<count>.<size>
                                            until the record is written: the saves of one node, which has the
                                            ``count`` ranks from ``rank`` on; the world has ``size`` ranks

Memory leaves no trace when it is lost. A `load` that finds nothing uses this record to decide whether the
training may start from scratch: saves that an earlier job had only in memory ended with that job. Each node's
saver notes its first saves and compares them with those of the other nodes. The first saver that finds a save
common to all nodes writes the record, once in the life of the directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from dlrover._util import decoding
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver.protocol import JoinSaver
from dlrover.checkpoint.storage import formats
from dlrover.checkpoint.storage.stores import Store

MOST = 64
"""Number of a world's first saves that are compared; the saver gives up if no save is common."""
RETRY = 30.0
"""Seconds between attempts to write a record after a failure."""
RECORD = "saved"
Whose = Literal["none", "earlier", "own"]
"""The job of a record: none, an earlier one, or this one (also if jobs cannot be distinguished)."""
_NOTE = re.compile(r"\.saved\.([0-9a-f]{16})\.(\d+)\.(\d+)\.(\d+)")


class FirstSave(msgspec.Struct, frozen=True):
    """The content of the record."""

    identity: str
    """The directory's identity; a record written after the directory was removed does not count."""
    save: SaveId
    """A save that all ranks had in memory."""
    job: str = ""
    """The job that made the save; empty if its launcher sets no identifier."""


@dataclass(eq=False)
class FirstSaves:
    """The first saves of a world that all its ranks on this node have committed."""

    joined: JoinSaver
    whole: list[SaveId] = field(default_factory=list)
    tried: int = 0
    """The number of saves in ``whole`` that were tried for the record."""
    recorded: bool = False
    problem: str = ""
    """Failure of the last attempt to read or write the record; empty if it succeeded."""
    _missing: dict[SaveId, set[int]] = field(default_factory=dict)
    """By save: the ranks that have not committed it."""

    @property
    def pending(self) -> bool:
        """True if saves await their first try for the record and nothing has failed."""
        return not (self.recorded or self.problem) and self.tried < len(self.whole)

    @property
    def due(self) -> bool:
        """True if the record should be tried, for the first time or again."""
        return self.pending or (bool(self.problem) and not self.recorded)

    def note_part(self, save: SaveId, rank: int) -> None:
        """Note that a rank has committed its part of a save."""
        if self.recorded or len(self.whole) == MOST:
            return
        missing = self._missing.setdefault(save, set(self.joined.ranks))
        missing.discard(rank)
        if not missing:
            self.whole.append(save)
            del self._missing[save]
        if len(self._missing) > MOST:  # from a rank that keeps nothing
            del self._missing[min(self._missing)]

    def note(self, tried: int, *, recorded: bool, problem: str = "") -> None:
        """Note an attempt at the record with ``tried`` saves."""
        self.tried, self.recorded, self.problem = tried, recorded, problem


def record(
    store: Store, identity: str, job: str, joined: JoinSaver, saves: Iterable[SaveId]
) -> bool:
    """Write the record if all nodes have one of these saves; return whether it exists.

    Args:
        store: the checkpoint directory.
        identity: its name.
        job: the job that made the saves.
        joined: the world, as this node sees it.
        saves: the saves that all ranks of this node have in memory.

    Raises:
        OSError: the directory cannot be read or written.
        OtherFormatError: another version of DLRover has written the record.
    """
    if _whose(store, identity, job) == "own":
        return True
    known = {save.number: save for save in saves}
    common = set(known)
    note = f".saved.{joined.session:016x}.{joined.ranks[0]}.{len(joined.ranks)}.{joined.world_size}"
    if len(joined.ranks) < joined.world_size:
        store.write(note, msgspec.json.encode(sorted(known.values())))
        common &= _common(store, joined.session)
    if common:
        store.write(RECORD, formats.encode(FirstSave(identity, known[min(common)], job)))
        store.sync("")
        _remove_notes(store)
    elif _whose(store, identity, job) == "own":  # another node just wrote it
        store.delete(note)
        return True
    return bool(common)


def recorded(store: Store, identity: str, job: str) -> Whose:
    """Return whose save all ranks once had in memory: none, an earlier job's, or this job's.

    Raises:
        OSError: the directory cannot be read.
        OtherFormatError: another version of DLRover has written the record.
    """
    found = _whose(store, identity, job)
    sessions = {int(match[1], 16) for match in map(_NOTE.fullmatch, store.names()) if match}
    return "own" if any(_common(store, session) for session in sessions) else found


def _whose(store: Store, identity: str, job: str) -> Whose:
    try:
        found = formats.decode(store.read(RECORD), FirstSave, store.where(RECORD))
    except FileNotFoundError:
        return "none"
    except msgspec.DecodeError:
        return "own"  # damaged, but it was written
    if found.identity != identity:
        return "none"
    return "own" if found.job == job or "" in (found.job, job) else "earlier"


def forget(store: Store) -> None:
    """Delete the record and the nodes' notes for it.

    Raises:
        OSError: they cannot be deleted.
    """
    store.delete(RECORD)
    _remove_notes(store)


def _common(store: Store, session: int) -> set[int]:
    """Return the numbers of the saves that all nodes of a world have noted."""
    notes = {}
    for match in map(_NOTE.fullmatch, store.names()):
        if match and int(match[1], 16) == session:
            notes[int(match[2])] = match
    if not notes:
        return set()
    size = int(next(iter(notes.values()))[4])
    if sum(int(match[3]) for match in notes.values()) < size:
        return set()
    return set.intersection(*(_read(store, match[0]) for match in notes.values()))


def _read(store: Store, note: str) -> set[int]:
    try:
        saves = decoding.json(store.read(note), list[SaveId])
    except (FileNotFoundError, msgspec.DecodeError):
        return set()  # another node has written the record meanwhile
    return {save.number for save in saves}


def _remove_notes(store: Store) -> None:
    for name in store.names():
        if _NOTE.fullmatch(name):
            store.delete(name)
