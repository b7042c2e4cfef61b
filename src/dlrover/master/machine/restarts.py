"""Whether a job goes on after a fault: budgets by cause, and the end of hopeless restarts.

Failures of the user's program are bounded by ``--max-restarts`` as with torchrun (default 0). Faults of
the infrastructure have a budget of their own in a sliding window, so that a preempted machine does not
use up what the user allowed for the program. Restarts that lead to no new step end the job.

A failure whose origin is undetermined is tried again, and its repetition is the evidence: the same one at
the same step on another host is the program's; on the same host, whatever node is there by then, it may be that host's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from dlrover.errors import ExitCode
from dlrover.spec.failure import Failure, FailureKind, Origin, Verdict
from dlrover.spec.job import JobSpec


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What interrupted a world."""

    title: str
    origin: Origin
    hopeless: bool
    signature: str
    steps: int
    """Steps that the interrupted round had completed."""
    reached: int = -1
    """The step of the whole training that it had come to; -1 where only ``steps`` is known."""
    seconds: float
    """How long the interrupted round had run."""
    cause: str = ""
    """The name in the table of causes."""
    echo: bool = False
    """It may only follow from another failure that is not known."""
    node: int = -1
    """Where it happened; -1 where that says nothing."""
    host: str = ""
    """The host of the node, which another node may have had before."""

    @property
    def step(self) -> int:
        """How far the training had come, as far as is known."""
        return self.reached if self.reached >= 0 else self.steps

    def is_like(self, other: Cause) -> bool:
        """Whether it is the same failure at the same place of the program."""
        same = self.signature == other.signature and self.step == other.step
        return same and (self.step > 0 or lasted_alike(self.seconds, other.seconds))


def lasted_alike(one: float, other: float) -> bool:
    """Whether two rounds of a program without steps may have come to the same place."""
    longer = max(one, other)
    return longer < UNKNOWN_PROGRESS_SECONDS or abs(one - other) <= SAME_TIME * longer


def cause_of(
    failure: Failure, verdict: Verdict, steps: int, seconds: float, reached: int = -1
) -> Cause:
    """What a failure means for the budgets."""
    lost = failure.kind is FailureKind.NODE
    return Cause(
        title=f"node {failure.node_id} was lost: {failure.message}" if lost else verdict.title,
        origin=verdict.origin,
        hopeless=verdict.hopeless,
        signature="node lost" if lost else verdict.signature,
        steps=steps,
        reached=reached,
        seconds=seconds,
        cause=verdict.cause,
        echo=verdict.echo,
        node=-1 if lost or verdict.echo else failure.node_id,
        host=failure.hostname or f"of node {failure.node_id}",
    )


def hang_cause(place: str, steps: int) -> Cause:
    """What a hang means for the budgets: without a step it got nowhere, however long it took."""
    return Cause(
        title=f"the training hung in {place}",
        origin=Origin.UNKNOWN,
        hopeless=False,
        signature=f"hang in {place}",
        steps=steps,
        seconds=0.0,
        cause="hang",
    )


class Restart(msgspec.Struct, frozen=True):
    """Go on."""

    reason: str
    suspect: int = -1
    """The node on whose host alone the same failure has come back: go on without it, if that can be."""


class Stop(msgspec.Struct, frozen=True):
    """End the job."""

    exit_code: ExitCode
    reason: str


ALIKE_WITHOUT_STEP = 2
"""Failures that look alike before the first step, where an outage looks like a bug, and that do not end a job."""
NO_PROGRESS_IN_THE_END = 3
"""``no_progress_restarts`` times this are all, whatever the origin or whatever the failures look like."""
UNDETERMINED_KEPT = 64
"""Undetermined failures that later ones are compared with."""
SAME_TIME = 0.1
"""Part by which two rounds of a program without steps may differ in length that failed at the same place."""
UNKNOWN_PROGRESS_SECONDS = 60.0
"""A program that reports no steps counts as having progressed when it ran for this long."""


@dataclass
class RestartPolicy:
    """The budgets of one job."""

    job: JobSpec
    #: restarts granted in all
    count: int = 0
    #: restarts granted for failures of the user's program; at most ``job.max_restarts``
    user_restarts: int = 0
    #: times of the restarts granted for other causes, within the window
    infrastructure_times: list[float] = field(default_factory=list)
    #: the same for single causes that have a budget of their own
    cause_times: dict[str, list[float]] = field(default_factory=dict)
    #: restarts in a row without progress; the first round is none
    stalled: int = 0
    #: the same, that a failure at the same step came back, whatever its origin
    repeated: int = 0
    #: the furthest step of the training, and failures in a row that did not come beyond it; kills do not count
    furthest: int = -1
    short_of_it: int = 0
    last_signature: str = ""
    last_step: int = -1
    last_seconds: float = 0.0
    #: undetermined failures and when they came, the latest ones
    undetermined: list[tuple[float, Cause]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = self.count or self.job.earlier_restarts

    def decide(self, cause: Cause, now: float) -> Restart | Stop:
        """Grant a restart after ``cause``, or say why not."""
        stuck = self._count_progress(cause)
        decision = self._decide(cause, stuck, now)
        if isinstance(decision, Restart):
            self.count += 1
        return decision

    def after_trial(self, title: str) -> Restart:
        """Grant a restart for what a trial of the auto-scaler has led to: it costs no budget."""
        self.count += 1
        return Restart(f"{title}; the job goes back to what it had")

    def _decide(self, cause: Cause, stuck: bool, now: float) -> Restart | Stop:
        if cause.hopeless:
            machines = cause.origin is Origin.INFRASTRUCTURE
            code = ExitCode.INFRASTRUCTURE if machines else ExitCode.USER_CODE
            return Stop(code, f"{cause.title}; a restart would fail in the same way.")
        hosts = self._hosts_alike(cause, now)
        if len(set(hosts)) > 1 and (cause.steps > 0 or len(hosts) > ALIKE_WITHOUT_STEP):
            first, other = hosts[0], next(host for host in hosts if host != hosts[0])
            return Stop(
                ExitCode.USER_CODE,
                f"{cause.title}; it failed in the same way at step {cause.step} on the hosts {first} and "
                f"{other}, so the program is the cause.",
            )
        useless = self._useless(cause, stuck)
        if useless:
            return Stop(ExitCode.NO_PROGRESS, f"{cause.title}; the last {useless}.")
        exhausted = self._cause_exhausted(cause, now)
        if exhausted is not None:
            return exhausted
        if cause.origin is Origin.USER:
            return self._user_restart(cause)
        alone = len(hosts) > 1 and len(set(hosts)) == 1 and not self.job.one_host
        return self._infrastructure_restart(cause, cause.node if alone else -1, now)

    def _useless(self, cause: Cause, stuck: bool) -> str:
        """How many restarts led nowhere, if they were too many."""
        most = self.job.limits.no_progress_restarts
        if stuck and self.stalled >= most:
            return f"{most} restarts led to no new step"
        most *= NO_PROGRESS_IN_THE_END
        if self.repeated and self.repeated >= most:
            return f"{most} restarts ended in the same way at step {cause.step}"
        if self.short_of_it and self.short_of_it >= most:
            return f"{most} restarts did not come beyond step {self.furthest}"
        return ""

    def _hosts_alike(self, cause: Cause, now: float) -> list[str]:
        """The hosts of all undetermined failures that look like ``cause``, the latest last."""
        if cause.origin is not Origin.UNKNOWN or cause.node < 0:
            return []
        self.undetermined = [*self.undetermined, (now, cause)][-UNDETERMINED_KEPT:]
        # Without steps chance looks alike, too: the rounds must follow each other.
        rounds = ALIKE_WITHOUT_STEP * cause.seconds
        since = -math.inf if cause.step > 0 else now - self.job.limits.restart_window - rounds
        return [
            other.host for time, other in self.undetermined if time > since and cause.is_like(other)
        ]

    def _cause_exhausted(self, cause: Cause, now: float) -> Stop | None:
        """The end, if the cause has a budget of its own that is used; else one restart is taken off."""
        allowed = self.job.limits.cause_budgets.get(cause.cause)
        if allowed is None:
            return None
        window = self.job.limits.restart_window
        times = [t for t in self.cause_times.get(cause.cause, []) if t > now - window]
        self.cause_times[cause.cause] = times
        if len(times) < allowed:
            times.append(now)
            return None
        code = ExitCode.USER_CODE if cause.origin is Origin.USER else ExitCode.INFRASTRUCTURE
        return Stop(
            code,
            f"{cause.title}; {allowed} restarts for {cause.cause} within {window:g} s are used "
            "(cause_budgets).",
        )

    def _user_restart(self, cause: Cause) -> Restart | Stop:
        allowed = self.job.max_restarts
        if self.user_restarts >= allowed:
            used = f"all {allowed} restarts are used" if allowed else "--max-restarts is 0"
            return Stop(ExitCode.USER_CODE, f"{cause.title}; {used}.")
        self.user_restarts += 1
        return Restart(f"{cause.title} ({self.user_restarts} of {allowed} restarts)")

    def _infrastructure_restart(self, cause: Cause, suspect: int, now: float) -> Restart | Stop:
        limits = self.job.limits
        since = now - limits.restart_window
        self.infrastructure_times = [t for t in self.infrastructure_times if t > since]
        if len(self.infrastructure_times) >= limits.max_infrastructure_restarts:
            return Stop(
                ExitCode.INFRASTRUCTURE,
                f"{cause.title}; {limits.max_infrastructure_restarts} restarts within "
                f"{limits.restart_window:g} s are used.",
            )
        self.infrastructure_times.append(now)
        if suspect < 0:
            return Restart(cause.title)
        return Restart(
            f"{cause.title}; it came back at step {cause.step}, and only on host {cause.host}",
            suspect,
        )

    def _count_progress(self, cause: Cause) -> bool:
        """Whether the interrupted round was without progress."""
        alike = cause.signature == self.last_signature and cause.step == self.last_step
        # The same failure of the program at the same step is deterministic; a kill that strikes twice at
        # one step is chance. Peers that are lost without a cause may have been left by the program.
        telling = cause.origin is not Origin.INFRASTRUCTURE or cause.echo
        if cause.steps > 0:
            stuck = alike and telling
        elif cause.seconds < UNKNOWN_PROGRESS_SECONDS:
            stuck = True
        else:
            stuck = alike and telling and lasted_alike(cause.seconds, self.last_seconds)
        self.stalled = self.stalled + 1 if stuck and self.count else 0
        self.repeated = self.repeated + 1 if alike and cause.steps > 0 else 0
        if cause.reached > self.furthest:
            self.furthest, self.short_of_it = cause.reached, 0
        elif cause.reached >= 0 and telling:
            self.short_of_it += 1
        self.last_signature, self.last_step = cause.signature, cause.step
        self.last_seconds = cause.seconds
        return stuck

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        assert 0 <= self.user_restarts <= self.job.max_restarts, "the user's budget is overdrawn"
        assert len(self.infrastructure_times) <= self.job.limits.max_infrastructure_restarts
        assert self.count >= self.user_restarts
        assert len(self.undetermined) <= UNDETERMINED_KEPT
        budgets = self.job.limits.cause_budgets
        assert all(len(times) <= budgets[cause] for cause, times in self.cause_times.items())
