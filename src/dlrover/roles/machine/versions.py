"""Versions of weights: which are complete, which count, and what a rollback has undone."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.errors import ProtocolError
from dlrover.roles.messages import (
    MemberPlace,
    PartView,
    PublishPart,
    Version,
    VersionView,
    WeightsView,
    weights_in_words,
)

MAX_NAMES = 100
KEPT = 2
"""Complete versions that are kept: the current one, and one more that a rollback may make current."""


@dataclass
class PublishedWeights:
    """Versions of one named weights, which one role publishes."""

    role: str
    rollbacks: list[int] = field(default_factory=list)
    """Step that its publishers went back to at the end of each epoch; the number of them is the epoch."""
    pending: dict[int, PartView] = field(default_factory=dict)
    """Parts of a version that is not complete."""
    pending_of: tuple[int, int] = (-1, 0)
    """Its step and its number of parts."""
    publishers: set[MemberPlace] = field(default_factory=set)
    """The processes that have published these parts."""
    complete: dict[Version, dict[int, PartView]] = field(default_factory=dict)
    """Versions that may be read, oldest first."""
    newest: Version | None = None
    """The newest version of this epoch that was ever complete."""
    lost: Version | None = None
    sources: set[str] = field(default_factory=set)
    """Who has published a part; each of them goes back to a step by itself."""

    def validate(self) -> None:
        """Check the invariants."""
        versions = list(self.complete)
        assert versions == sorted(versions)
        assert len(versions) <= KEPT
        assert all(self.view().valid(version) for version in versions)
        assert all(version.epoch <= self.epoch for version in versions)
        assert self.newest is None or self.newest.epoch == self.epoch
        assert len(self.pending) < max(1, self.pending_of[1])
        for parts in self.complete.values():
            assert sorted(parts) == list(range(len(parts)))

    @property
    def epoch(self) -> int:
        """The number of rollbacks."""
        return len(self.rollbacks)

    @property
    def began(self) -> bool:
        """True once a version was complete."""
        return self.newest is not None or bool(self.rollbacks)

    @property
    def current(self) -> Version | None:
        """The version that counts."""
        return next(reversed(self.complete), None)

    def view(self) -> WeightsView:
        """Return the state as others see it."""
        versions = tuple(
            VersionView(version, tuple(parts[part] for part in sorted(parts)))
            for version, parts in self.complete.items()
        )
        pending = tuple(self.pending[part] for part in sorted(self.pending))
        return WeightsView(self.role, tuple(self.rollbacks), versions, self.lost, pending)

    def publish(self, event: PublishPart, source: str) -> Version:
        """Add a source's part of a version, and return which one it is.

        Raises:
            ProtocolError: The version was published before, or is older than that.
        """
        part = PartView(event.part, event.holder, event.key, event.nbytes)
        version = Version(self.epoch, event.step)
        if self.complete.get(version, {}).get(event.part) == part:
            return version  # a repeated request
        self._check(event)
        if self.pending_of != (event.step, event.parts):
            self._abandon()
            self.pending_of = (event.step, event.parts)
        self.sources.add(source)
        self.pending[event.part] = part
        self.publishers.add(event.place)
        if len(self.pending) < event.parts:
            return version
        self.complete[version] = self.pending
        self._abandon()
        self.newest, self.lost = version, None
        for old in list(self.complete)[:-KEPT]:
            del self.complete[old]
        return version

    def _check(self, event: PublishPart) -> None:
        if event.part >= event.parts:
            raise ProtocolError(
                f"Part {event.part} of {event.name} was published; it has {event.parts} parts."
            )
        if event.place.role != self.role:
            raise ProtocolError(
                f"The {weights_in_words(event.name)} belong to the role {self.role}; {event.place.role} must publish"
                " its own under another name."
            )
        lost = self.lost is not None and self.lost == self.newest and event.step == self.lost.step
        if self.newest is not None and event.step <= self.newest.step and not lost:
            twice = "was published before" if event.step == self.newest.step else "is older"
            raise ProtocolError(
                f"Version {event.step} of the {weights_in_words(event.name)} {twice}: the newest is {self.newest.step}. A"
                " publisher that goes on from an earlier step says so by current_worker().resumed(step)."
            )
        if event.step < self.pending_of[0]:
            raise ProtocolError(
                f"Version {event.step} of the {weights_in_words(event.name)} is late: version {self.pending_of[0]} is being"
                " published."
            )

    def _abandon(self) -> None:
        self.pending, self.pending_of, self.publishers = {}, (-1, 0), set()

    def roll_back(self, step: int, place: MemberPlace) -> None:
        """Undo the versions after a step, as a process says; sources that publish together may all say so."""
        if self.newest is None and not self.complete and not self.pending:
            return
        undone = self.newest is None and bool(self.rollbacks) and self.rollbacks[-1] <= step
        if undone and len(self.sources) > 1 and place not in self.publishers:
            return
        self.rollbacks.append(step)
        self.complete = {v: parts for v, parts in self.complete.items() if v.step <= step}
        self._abandon()
        self.newest = None
        if self.lost is not None and self.lost.step > step:
            self.lost = None

    def release(self, place: MemberPlace) -> None:
        """Forget what a process that has ended has begun to publish, and the versions that it held a part of."""
        current = self.current
        self.complete = {
            version: parts
            for version, parts in self.complete.items()
            if all(part.holder != place for part in parts.values())
        }
        if current is not None and current not in self.complete:
            self.lost = current
        held = any(part.holder == place for part in self.pending.values())
        if held or place in self.publishers:
            self._abandon()
