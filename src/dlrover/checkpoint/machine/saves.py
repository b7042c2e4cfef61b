"""Identity and order of saves.

A step number alone does not suffice: a step can be saved twice, and a training that went back to step 10
saves steps that are newer than the abandoned step 30. So every save has its own number, greater than all
known ones when its session began, and belongs to a *line*: going back to a stored step begins a new line.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class SavePlace(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Where the ranks of a program were at a save, if they survive losses: a rank that returns goes on from there."""

    round: int = 0
    """Identifier of the job and its round; 0: the place is unknown."""
    reductions: int = 0
    steps: int = 0
    """Optimizer steps in this round."""


NOWHERE = SavePlace()


class SaveId(msgspec.Struct, frozen=True, order=True):
    """Identifier of one save of all ranks. The newer save is greater."""

    line: int
    """Number of the line: that of the last return to a stored step; 0 if there was none."""
    number: int
    step: int
    session: int
    """Identifier of the world's run that made the save: equal on all ranks, different in each run."""
    place: SavePlace = NOWHERE

    @property
    def folder(self) -> str:
        """Part of a file name that is unique to this save."""
        return f"{self.session:016x}-{self.number}"


class Newest(msgspec.Struct, frozen=True, array_like=True):
    """The greatest line and number that a process or directory knows."""

    line: int = 0
    number: int = 0

    def including(self, *saves: SaveId | Newest) -> Newest:
        """Return the greatest line and number of these and the given saves."""
        return Newest(
            max([self.line, *(save.line for save in saves)]),
            max([self.number, *(save.number for save in saves)]),
        )


class Numbering:
    """Numbering of the saves of a session.

    All ranks make the same saves in the same order, so their numbers agree without communication. Every call
    counts, even one that keeps nothing or fails on some rank.
    """

    def __init__(self, session: int, newest: Newest) -> None:
        self._session = session
        self._newest = newest

    @property
    def newest(self) -> Newest:
        """The greatest line and number so far."""
        return self._newest

    def next(self, step: int, place: SavePlace = NOWHERE) -> SaveId:
        """Return the identifier of the next save, at ``step``."""
        line, number = self._newest.line, self._newest.number + 1
        self._newest = Newest(line, number)
        return SaveId(line, number, step, self._session, place)

    def pass_over(self, save: SaveId) -> None:
        """Make all later saves newer than this one."""
        self._newest = self._newest.including(save)

    def go_back(self) -> int:
        """Begin a new line, newer than all others; return its number."""
        number = self._newest.number + 1
        self._newest = Newest(number, number)
        return number


class StepOrder:
    """Sort order of steps. A step without a readable save is placed by its number in the newest line."""

    def __init__(self, saves: Iterable[SaveId]) -> None:
        found = list(saves)
        self._line = max((save.line for save in found), default=0)
        self._saves = [save for save in found if save.line == self._line]

    def key(self, step: int, save: SaveId | None) -> tuple[int, int, int, int]:
        """Return a sort key, greater for the newer step."""
        if save is not None:
            return save.line, save.number, 0, step
        before = (known.number for known in self._saves if known.step < step)
        return self._line, max(before, default=0), 1, step
