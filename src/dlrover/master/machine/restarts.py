"""Whether a job goes on after a fault: budgets by cause, and the end of hopeless restarts.

Failures of the user's program are bounded by ``--max-restarts`` as with torchrun (default 0). Faults of
the infrastructure have a budget of their own in a sliding window, so that a preempted machine does not
use up what the user allowed for the program. Restarts that lead to no new step end the job.
"""

from __future__ import annotations

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
    seconds: float
    """How long the interrupted round had run."""
    cause: str = ""
    """The name in the table of causes."""


def cause_of(failure: Failure, verdict: Verdict, steps: int, seconds: float) -> Cause:
    """What a failure means for the budgets."""
    lost = failure.kind is FailureKind.NODE
    return Cause(
        title=f"node {failure.node_id} was lost: {failure.message}" if lost else verdict.title,
        origin=verdict.origin,
        hopeless=verdict.hopeless,
        signature="node lost" if lost else verdict.signature,
        steps=steps,
        seconds=seconds,
        cause=verdict.cause,
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


class Stop(msgspec.Struct, frozen=True):
    """End the job."""

    exit_code: ExitCode
    reason: str


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
    last_signature: str = ""
    last_steps: int = -1

    def decide(self, cause: Cause, now: float) -> Restart | Stop:
        """Grant a restart after ``cause``, or say why not."""
        stuck = self._count_progress(cause)
        decision = self._decide(cause, stuck, now)
        if isinstance(decision, Restart):
            self.count += 1
        return decision

    def _decide(self, cause: Cause, stuck: bool, now: float) -> Restart | Stop:
        limits = self.job.limits
        if cause.hopeless:
            return Stop(ExitCode.USER_CODE, f"{cause.title}; a restart would fail in the same way.")
        if stuck and self.stalled >= limits.no_progress_restarts:
            return Stop(
                ExitCode.NO_PROGRESS,
                f"{cause.title}; the last {limits.no_progress_restarts} restarts led to no new step.",
            )
        exhausted = self._cause_exhausted(cause, now)
        if exhausted is not None:
            return exhausted
        if cause.origin is Origin.USER:
            return self._user_restart(cause)
        return self._infrastructure_restart(cause, now)

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

    def _infrastructure_restart(self, cause: Cause, now: float) -> Restart | Stop:
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
        return Restart(cause.title)

    def _count_progress(self, cause: Cause) -> bool:
        """Whether the interrupted round was without progress."""
        repeated = cause.signature == self.last_signature and cause.steps == self.last_steps
        if cause.steps > 0:
            # The same failure of the program at the same step is deterministic; a kill that strikes
            # twice at one step is chance.
            stuck = repeated and cause.origin is not Origin.INFRASTRUCTURE
        else:
            stuck = cause.seconds < UNKNOWN_PROGRESS_SECONDS
        self.stalled = self.stalled + 1 if stuck and self.count else 0
        self.last_signature, self.last_steps = cause.signature, cause.steps
        return stuck

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        assert 0 <= self.user_restarts <= self.job.max_restarts, "the user's budget is overdrawn"
        assert len(self.infrastructure_times) <= self.job.limits.max_infrastructure_restarts
        assert self.count >= self.user_restarts
        budgets = self.job.limits.cause_budgets
        assert all(len(times) <= budgets[cause] for cause, times in self.cause_times.items())
