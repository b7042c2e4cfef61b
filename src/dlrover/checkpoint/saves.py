"""What identifies a save, and which of two saves is the newer one.

A number alone does not do: a step can be saved twice, and a training that went back to step 10 saves steps
that are newer than the step 30 it has abandoned. So every save has a number of its own, greater than all that
were known when its session began, and belongs to a *line*: going back to a stored step begins a new one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class SaveId(msgspec.Struct, frozen=True, order=True):
    """One save of all ranks. The newer one is greater."""

    line: int
    """The number that the last going back had; 0: there was none."""
    number: int
    step: int
    session: int
    """The run of the world that made it: equal on all its ranks, different in each run."""

    @property
    def folder(self) -> str:
        """The part of a file name that no other save has."""
        return f"{self.session:016x}-{self.number}"


class Newest(msgspec.Struct, frozen=True, array_like=True):
    """The greatest line and number that somebody has seen."""

    line: int = 0
    number: int = 0

    def including(self, *saves: SaveId | Newest) -> Newest:
        """The greatest of these, too."""
        return Newest(
            max([self.line, *(save.line for save in saves)]),
            max([self.number, *(save.number for save in saves)]),
        )


class Numbering:
    """Numbers the saves of a session.

    All ranks make the same saves in the same order, so that their numbers agree without a word. What counts is
    the call: also one that keeps nothing, or fails on some rank.
    """

    def __init__(self, session: int, newest: Newest) -> None:
        self._session = session
        self._newest = newest

    def next(self, step: int) -> SaveId:
        """The next save."""
        line, number = self._newest.line, self._newest.number + 1
        self._newest = Newest(line, number)
        return SaveId(line, number, step, self._session)

    def pass_over(self, save: SaveId) -> None:
        """Make all later saves newer than this one."""
        self._newest = self._newest.including(save)

    def go_back(self) -> int:
        """Begin a new line, which is newer than all others; its number."""
        number = self._newest.number + 1
        self._newest = Newest(number, number)
        return number


class Order:
    """Sorts steps that may be without a readable save: such a one is where its step puts it in the newest line."""

    def __init__(self, saves: Iterable[SaveId]) -> None:
        found = list(saves)
        self._line = max((save.line for save in found), default=0)
        self._saves = [save for save in found if save.line == self._line]

    def key(self, step: int, save: SaveId | None) -> tuple[int, int, int, int]:
        """Greater for the newer one."""
        if save is not None:
            return save.line, save.number, 0, step
        before = (known.number for known in self._saves if known.step < step)
        return self._line, max(before, default=0), 1, step
