"""Restart policy: budgets by cause, and the end of hopeless restarts.

Failures of the user's program are bounded by ``--max-restarts``, as with torchrun (default 0). Infrastructure
faults have a separate budget in a sliding window, so that a preempted machine does not use up the program's
restarts. Restarts that lead to no new step end the job.

After a failure of undetermined origin, the job is restarted, and a repetition is the evidence. The same
failure at the same step on another host is the program's. On the same host, whatever node runs there by then,
it may be the host's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from dlrover.errors import ExitCode
from dlrover.spec.failure import Failure, FailureKind, Origin, Verdict
from dlrover.spec.job import JobSpec


class RestartCause(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of an interruption of a world."""

    title: str
    origin: Origin
    hopeless: bool
    signature: str
    steps: int
    """Steps that the interrupted round had completed."""
    reached: int = -1
    """Step of the whole training that the round had reached; -1 if only ``steps`` is known."""
    seconds: float
    """How long the interrupted round had run."""
    cause: str = ""
    """Name in the table of causes."""
    echo: bool = False
    """True if the failure may only follow from another, unknown one."""
    node: int = -1
    """Node where it happened; -1 if that says nothing about the cause."""
    host: str = ""
    """Host of the node; an earlier node may have run on the same host."""
    rank: int = -1
    """Rank that is lost while the others go on; -1: all start again."""
    on_way: bool = False
    """True if it was started again before and has not come to the others since: it repeats the failure before."""

    @property
    def step(self) -> int:
        """How far the training had come, as far as known."""
        return self.reached if self.reached >= 0 else self.steps

    def is_like(self, other: RestartCause) -> bool:
        """Return whether this is the same failure at the same place of the program."""
        same = self.signature == other.signature and self.step == other.step
        return same and (self.step > 0 or lasted_alike(self.seconds, other.seconds))


def lasted_alike(one: float, other: float) -> bool:
    """Return whether two rounds of a program without steps may have reached the same place."""
    longer = max(one, other)
    return longer < UNKNOWN_PROGRESS_SECONDS or abs(one - other) <= SAME_TIME * longer


def cause_of(
    failure: Failure, verdict: Verdict, steps: int, seconds: float, reached: int = -1
) -> RestartCause:
    """Return a failure as a cause for the budgets."""
    lost = failure.kind is FailureKind.NODE
    return RestartCause(
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


def hang_cause(verdict: Verdict, steps: int) -> RestartCause:
    """Return a hang as a cause for the budgets; without a step it made no progress, however long it took."""
    return RestartCause(
        title=verdict.title,
        origin=verdict.origin,
        hopeless=verdict.hopeless,
        signature=verdict.signature,
        steps=steps,
        seconds=0.0,
        cause=verdict.cause,
    )


class Restart(msgspec.Struct, frozen=True):
    """Continue the job."""

    reason: str
    suspect: int = -1
    """Node on whose host alone the same failure recurred; the job should continue without it, if possible."""


class Stop(msgspec.Struct, frozen=True):
    """End the job."""

    exit_code: ExitCode
    reason: str


ALIKE_WITHOUT_STEP = 2
"""Similar failures before the first step, where an outage looks like a bug, that do not end a job."""
NO_PROGRESS_IN_THE_END = 3
"""Factor on ``no_progress_restarts`` for the limit that ignores the origin or the looks of failures."""
UNDETERMINED_KEPT = 64
"""Number of undetermined failures kept for comparison with later ones."""
SAME_TIME = 0.1
"""Maximum relative difference in length of two rounds without steps that failed at the same place."""
UNKNOWN_PROGRESS_SECONDS = 60.0
"""Run time after which a program that reports no steps counts as having made progress."""


@dataclass
class RestartPolicy:
    """The restart budgets of one job."""

    job: JobSpec
    #: restarts granted in total
    count: int = 0
    #: restarts granted for failures of the user's program; at most ``job.max_restarts``
    user_restarts: int = 0
    #: times of the restarts granted for other causes, within the window
    infrastructure_times: list[float] = field(default_factory=list)
    #: times of the restarts granted for causes with a separate budget, within the window
    cause_times: dict[str, list[float]] = field(default_factory=dict)
    #: consecutive restarts without progress; the first round does not count
    stalled: int = 0
    #: consecutive failures that repeat the one before at the same step, whatever the origin
    repeated: int = 0
    #: furthest step of the training, and failures since then that did not get beyond it; kills do not count
    furthest: int = -1
    short_of_it: int = 0
    last_signature: str = ""
    last_step: int = -1
    last_rank: int = -1
    last_seconds: float = 0.0
    #: latest undetermined failures with their times
    undetermined: list[tuple[float, RestartCause]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = self.count or self.job.earlier_restarts

    def decide(self, cause: RestartCause, now: float) -> Restart | Stop:
        """Grant a restart after ``cause``, or return why not."""
        if cause.on_way and self.last_step > 0 and cause.rank == self.last_rank:
            cause = msgspec.structs.replace(cause, steps=self.last_step)
        stuck = self._count_progress(cause)
        decision = self._decide(cause, stuck, now)
        if isinstance(decision, Restart):
            self.count += 1
        return decision

    def after_trial(self, title: str) -> Restart:
        """Grant a restart after a failed trial of the auto-scaler, which costs no budget."""
        self.count += 1
        return Restart(f"{title}; the job goes back to what it had")

    def _decide(self, cause: RestartCause, stuck: bool, now: float) -> Restart | Stop:
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

    def _useless(self, cause: RestartCause, stuck: bool) -> str:
        """Return the useless restarts in words if they were too many; otherwise empty."""
        most = self.job.limits.no_progress_restarts
        if stuck and self.stalled >= most:
            return f"{most} restarts led to no new step"
        most *= NO_PROGRESS_IN_THE_END
        if self.repeated and self.repeated >= most:
            return f"{most} restarts ended in the same way at step {cause.step}"
        if self.short_of_it and self.short_of_it >= most:
            return f"{most} restarts did not come beyond step {self.furthest}"
        return ""

    def _hosts_alike(self, cause: RestartCause, now: float) -> list[str]:
        """Return the hosts of all undetermined failures that look like ``cause``, the latest last."""
        if cause.origin is not Origin.UNKNOWN or cause.node < 0:
            return []
        self.undetermined = [*self.undetermined, (now, cause)][-UNDETERMINED_KEPT:]
        # Without steps, unrelated failures look alike, too, so the rounds must follow each other.
        rounds = ALIKE_WITHOUT_STEP * cause.seconds
        since = -math.inf if cause.step > 0 else now - self.job.limits.restart_window - rounds
        return [
            other.host for time, other in self.undetermined if time > since and cause.is_like(other)
        ]

    def _cause_exhausted(self, cause: RestartCause, now: float) -> Stop | None:
        """Return a stop if the cause's separate budget is used up; otherwise charge one restart to it."""
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

    def _user_restart(self, cause: RestartCause) -> Restart | Stop:
        allowed = self.job.max_restarts
        if self.user_restarts >= allowed:
            used = f"all {allowed} restarts are used" if allowed else "--max-restarts is 0"
            return Stop(ExitCode.USER_CODE, f"{cause.title}; {used}.")
        self.user_restarts += 1
        return Restart(f"{cause.title} ({self.user_restarts} of {allowed} restarts)")

    def _infrastructure_restart(
        self, cause: RestartCause, suspect: int, now: float
    ) -> Restart | Stop:
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

    def _count_progress(self, cause: RestartCause) -> bool:
        """Return whether the interrupted round made no progress, and update the counters."""
        here = cause.signature, cause.rank
        alike = here == (self.last_signature, self.last_rank) and cause.step == self.last_step
        # The same failure of the program at the same step is deterministic; two kills at one step are chance.
        # Peers lost without a known cause may have been abandoned by the program.
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
        self.last_rank, self.last_seconds = cause.rank, cause.seconds
        return stuck

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        assert 0 <= self.user_restarts <= self.job.max_restarts, "the user's budget is overdrawn"
        assert len(self.infrastructure_times) <= self.job.limits.max_infrastructure_restarts
        assert self.count >= self.user_restarts
        assert len(self.undetermined) <= UNDETERMINED_KEPT
        budgets = self.job.limits.cause_budgets
        assert all(len(times) <= budgets[cause] for cause, times in self.cause_times.items())
