"""The record that all ranks of a training once had a save in memory.

::

    <directory>/saved                       that save, a `Record`
    <directory>/.saved.<session>.<rank>.<count>.<size>
                                            until it is written: the saves that one node has, of its ``count``
                                            ranks from ``rank`` on; the world has ``size``

Memory leaves nothing behind when it is lost. A `load` that finds nothing decides by this record whether the
training may begin anew: what an earlier job had in memory only has ended with that job. The saver of each node notes its first saves and compares them with those of the
other nodes; whoever finds one that all nodes have writes the record, once in the life of the directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from dlrover.checkpoint import formats
from dlrover.checkpoint.protocol import Join
from dlrover.checkpoint.saves import SaveId
from dlrover.checkpoint.stores import Store

MOST = 64
"""Saves of a world that are compared; after that many without one in common the saver gives up."""
RETRY = 30.0
"""Seconds before a record that could not be written is tried again."""
RECORD = "saved"
Whose = Literal["none", "earlier", "own"]
"""The job of a record: none, an earlier one, or this one; where jobs cannot be told apart, it is this one."""
_NOTE = re.compile(r"\.saved\.([0-9a-f]{16})\.(\d+)\.(\d+)\.(\d+)")


class Record(msgspec.Struct, frozen=True):
    """What is known of a directory."""

    identity: str
    """The directory's; a record that comes after the directory was removed does not count."""
    save: SaveId
    """One that all ranks had in memory."""
    job: str = ""
    """Whose; empty if its launcher gives it no identifier."""


@dataclass(eq=False)
class FirstSaves:
    """The first saves of a world that all its ranks of this node have published."""

    joined: Join
    whole: list[SaveId] = field(default_factory=list)
    tried: int = 0
    """The saves in ``whole`` that the record was tried with."""
    recorded: bool = False
    problem: str = ""
    """Why the record could not be read or written the last time; empty: it could."""
    _missing: dict[SaveId, set[int]] = field(default_factory=dict)
    """By save: the ranks that have not published it."""

    @property
    def pending(self) -> bool:
        """Whether there are saves that the record has not been tried with, and nothing has failed."""
        return not (self.recorded or self.problem) and self.tried < len(self.whole)

    @property
    def due(self) -> bool:
        """Whether the record is to be tried, for the first time or again."""
        return self.pending or (bool(self.problem) and not self.recorded)

    def publish(self, save: SaveId, rank: int) -> None:
        """A rank has published a save."""
        if self.recorded or len(self.whole) == MOST:
            return
        missing = self._missing.setdefault(save, set(self.joined.ranks))
        missing.discard(rank)
        if not missing:
            self.whole.append(save)
            del self._missing[save]
        if len(self._missing) > MOST:  # of a rank that keeps nothing
            del self._missing[min(self._missing)]

    def note(self, tried: int, *, recorded: bool, problem: str = "") -> None:
        """The record was tried with so many saves."""
        self.tried, self.recorded, self.problem = tried, recorded, problem


def record(store: Store, identity: str, job: str, joined: Join, saves: Iterable[SaveId]) -> bool:
    """Write the record if all nodes have one of these saves; whether it is there.

    Args:
        store: the checkpoint directory.
        identity: its name.
        job: whose saves they are.
        joined: the world, as this node sees it.
        saves: those that all ranks of this node have in memory.

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
        store.write(RECORD, formats.encode(Record(identity, known[min(common)], job)))
        store.sync("")
        _remove_notes(store)
    elif _whose(store, identity, job) == "own":  # by another node, just now
        store.delete(note)
        return True
    return bool(common)


def recorded(store: Store, identity: str, job: str) -> Whose:
    """Whether all ranks of a job once had a save in memory, and of which job.

    Raises:
        OSError: the directory cannot be read.
        OtherFormatError: another version of DLRover has written the record.
    """
    found = _whose(store, identity, job)
    sessions = {int(match[1], 16) for match in map(_NOTE.fullmatch, store.names()) if match}
    return "own" if any(_common(store, session) for session in sessions) else found


def _whose(store: Store, identity: str, job: str) -> Whose:
    try:
        found = formats.decode(store.read(RECORD), Record, store.where(RECORD))
    except FileNotFoundError:
        return "none"
    except msgspec.DecodeError:
        return "own"  # it is damaged, but it was written
    if found.identity != identity:
        return "none"
    return "own" if found.job == job or "" in (found.job, job) else "earlier"


def forget(store: Store) -> None:
    """Delete the record, and what nodes have noted for it.

    Raises:
        OSError: it cannot be deleted.
    """
    store.delete(RECORD)
    _remove_notes(store)


def _common(store: Store, session: int) -> set[int]:
    """The numbers of the saves that all nodes of a world have noted."""
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
        saves = msgspec.json.decode(store.read(note), type=list[SaveId])
    except (FileNotFoundError, msgspec.DecodeError):
        return set()  # another node has written the record meanwhile
    return {save.number for save in saves}


def _remove_notes(store: Store) -> None:
    for name in store.names():
        if _NOTE.fullmatch(name):
            store.delete(name)
