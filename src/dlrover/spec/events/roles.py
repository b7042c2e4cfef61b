"""Roles of a job of several, and their instances."""

from __future__ import annotations

import msgspec


class RolesSubmitted(msgspec.Struct, frozen=True, tag="roles_submitted"):
    """A job of several roles was submitted to its coordinator."""

    name: str
    roles: tuple[str, ...]

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Job {self.name} was submitted; its roles are {', '.join(self.roles)}."


class CoordinatorRecovered(msgspec.Struct, frozen=True, tag="coordinator_recovered"):
    """A coordinator took over from the journal of one that died."""

    inputs: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"The coordinator is back: it replayed {self.inputs} journal entries; all roles kept running."


class RoleStarts(msgspec.Struct, frozen=True, tag="role_starts"):
    """The job of a role is being started."""

    role: str
    attempt: int
    """Number of its starts so far, this one included."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        again = f" (start {self.attempt})" if self.attempt > 1 else ""
        return f"Role {self.role} starts{again}."


class RoleRestarts(msgspec.Struct, frozen=True, tag="role_restarts"):
    """A role stops, if it still runs, and starts again."""

    role: str
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Role {self.role} restarts: {self.reason}."


class RoleEnded(msgspec.Struct, frozen=True, tag="role_ended"):
    """The job of a role has ended."""

    role: str
    exit_code: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Role {self.role} has ended with exit code {self.exit_code}: {self.reason}"


class InstanceStarted(msgspec.Struct, frozen=True, tag="instance_started"):
    """The processes of an instance, such as a server that is a world by itself, are being started."""

    node: int
    role: str
    index: int
    """Index of the instance in its role, from 0."""
    start: int
    """Number of its starts so far, this one included."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        again = f" (start {self.start})" if self.start > 1 else ""
        return f"Instance {self.index} of {self.role} starts on node {self.node}{again}."


class InstanceRestarts(msgspec.Struct, frozen=True, tag="instance_restarts"):
    """An instance failed or lost its node and is to be started again; the rest of the job goes on."""

    node: int
    """Node where it failed."""
    role: str
    index: int
    """Index of the instance in its role, from 0."""
    count: int
    """Restarts of this instance so far."""
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"Instance {self.index} of {self.role} restarts (restart {self.count}): {self.reason}."
        )


class InstanceStuck(msgspec.Struct, frozen=True, tag="instance_stuck"):
    """An instance of a role lives, but made no progress for longer than its phase may take; it is ended."""

    role: str
    index: int
    phase: str
    """``start``, ``work`` or one that the program names; empty if the instance said nothing."""
    seconds: float
    """Seconds without progress, or without a word."""

    def why(self) -> str:
        """Return the reason of its end, as part of a sentence."""
        if not self.phase:
            return f"it had not reported for {self.seconds:.0f} s"
        return f"it had made no progress for {self.seconds:.0f} s in the phase {self.phase}"

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Instance {self.index} of {self.role} is ended: {self.why()}."


class KeeperEnded(msgspec.Struct, frozen=True, tag="keeper_ended"):
    """A process that kept published weights has ended: the job's own keeper of weights, or an instance with its own versions."""

    keeper: str
    """Role and index of the instance; empty for the job's own keeper, which is started again."""
    reason: str
    """Empty if unknown."""
    lost: dict[str, str]
    """Current versions that were lost with it, by the names of the weights."""
    left: dict[str, str]
    """Version of each of these weights that is current now; without one, readers wait for the next."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        why = f": {self.reason}" if self.reason else ""
        parts = [] if self.keeper else ["another one takes its place"]
        for name, version in self.lost.items():
            now = f"readers take version {self.left[name]}" if name in self.left else ""
            parts.append(
                f"version {version} of {name} is lost, {now or 'and readers wait for the next one'}"
            )
        if not self.lost:
            parts.append("no current version is lost")
        who = f"{self.keeper}, which kept weights," if self.keeper else "The keeper of weights"
        return f"{who} has ended{why}; {'; '.join(parts)}."


class InstanceEnded(msgspec.Struct, frozen=True, tag="instance_ended"):
    """An instance of a role has failed or was stopped."""

    role: str
    index: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Instance {self.index} of {self.role} has ended: {self.reason}."
