"""Client of a training process; a thread fetches shards ahead, so that no step waits for them."""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from dlrover._util import backoff
from dlrover.data.machine.spans import Spans
from dlrover.data.services import ShardService
from dlrover.errors import ConfigurationError, InfrastructureError, UserCodeError
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.shards import (
    MAX_ERROR,
    MAX_SETTLED,
    MAX_SPANS,
    MAX_WANT,
    DataSpec,
    ExtendShards,
    FailedSpan,
    ForgetWorker,
    Incarnation,
    OpenShards,
    SettleShards,
    ShardReply,
    ShardRequest,
    Span,
    TakeShards,
)

logger = logging.getLogger(__name__)

AHEAD = 5.0
"""Seconds of samples to fetch ahead: longer than the restart of a master takes."""
FEWEST = 2
"""Initial number of shards to fetch ahead; doubled whenever the training had to wait for shards."""
AT_ONCE = 4096
"""Maximum number of samples that the training takes at a time."""
REPORT_INTERVAL = 1.0
"""Seconds between two reports of acknowledged samples while nothing needs to be fetched."""
POLL = 0.2
"""Seconds between two checks whether other workers have finished."""
FIRST_LOOK = 0.02
"""Seconds until the training speed is first measured; later measurements are `POLL` apart."""
RENEWALS = 4
"""Minimum number of reports that a worker sends within the timeout of its shards."""
RENEWAL_WAIT = 30.0
"""Seconds that a checkpoint waits for a report if the last one is older than the timeout."""
RETRY = 0.05, 1.0
"""Seconds until the first retry after the master could not be reached, and between later ones."""
WARN_AFTER = 10.0
"""Seconds of waiting for shards before a warning is logged."""
CLOSE_WAIT = 2.0
"""Maximum seconds for the last report."""
_SMOOTHING = 0.5


class Reader(NamedTuple):
    """What a reader is to the service."""

    name: str
    report_interval: float = REPORT_INTERVAL
    """Seconds between two reports: if it dies, what it has not reported is dealt again."""


class ShardClient:
    """One worker's shards of one dataset. Made by one thread, used by one thread at a time."""

    def __init__(
        self,
        spec: DataSpec,
        service: ShardService,
        rank: int,
        incarnation: Incarnation,
        base: bytes = b"",
        ahead: float = AHEAD,
        reader: Reader | None = None,
    ) -> None:
        self._spec = spec
        self._seconds_ahead = ahead
        self._service = service
        self._name, self._report_interval = reader or Reader(f"{rank}-{uuid.uuid4().hex[:12]}")
        self.incarnation = incarnation
        self._changed = threading.Condition()
        # ---- _changed guards all of the following
        # claimed: neither acknowledged nor put back; settled: not among this worker's acknowledged ones any more
        self._acknowledged, self._claimed, self._settled = Spans(), Spans(), b""
        self._ready, self._lent = deque[Span](), deque[Span]()
        """Leased samples that are not taken yet, and taken samples that are not claimed yet."""
        # quiet looks: reports of the stream's ends that showed nothing new
        self._ahead, self._fewest, self._quiet_looks = 0, FEWEST, 0
        self._unreported = Spans()
        self._failed: list[FailedSpan] = []
        self._between = False  # between two loops: no more reading of its epoch
        self._exhausted = self._complete = self._closing = self._patient = False
        self._starving = self._resting = self._others_starve = False
        self._flushing = self._reporting = False
        self._error: Exception | None = None
        self._away_since: float | None = None
        self._count = 0
        self._rate = self._moved_at = 0.0
        self.skipped = 0
        """Samples skipped after this worker's attempt."""
        self._unread = 0  # leased, and not yet handed to the training
        self._enough = math.inf  # no fetching while more than this is unread
        self._gap: Span | None = None
        self._grown, self._known = tuple[int, ...](), tuple[int, ...]()
        self._ended = spec.size >= 0
        # ---- used by the thread only
        self._seq = 0
        self._asked_at = time.monotonic()
        self._counted = (self._asked_at, 0)
        self._renewed = _now()
        opened = self._insist(OpenShards(spec, self._name, incarnation, base))
        if self._error is not None:
            raise self._error
        assert opened is not None
        self.first_epoch = self._epoch = opened.epoch
        self.spec = self._spec = opened.spec or spec
        """The dataset; for a stream, as the first worker found it."""
        self._thread = threading.Thread(target=self._run, name="dlrover-shards", daemon=True)
        self._thread.start()

    # ---- the training

    def enter(self, epoch: int) -> None:
        """Read this epoch from now on."""
        with self._changed:
            if epoch != self._epoch:
                self._epoch = epoch
                self._exhausted = self._complete = False
            self._changed.notify_all()

    def take(self, *, patient: bool = False, idle: float | None = None) -> list[Span]:
        """Return the next samples, up to `AT_ONCE`; empty if nothing of the epoch is left.

        Claim them in their order; return unclaimed ones with `leave_unclaimed`.

        Args:
            patient: wait until others have acknowledged their leased samples, since these may come back.
            idle: seconds without samples after which a stream has ended for this worker.

        Raises:
            InfrastructureError: this worker's shards were leased to others.
            UserCodeError: too many samples cannot be read.
        """
        began = time.monotonic()
        warn_at = began + WARN_AFTER
        with self._changed:
            self._patient, self._resting, self._between = patient, False, False
            looks = self._quiet_looks
            while True:
                if self._error is not None:
                    raise self._error
                if self._ready:
                    return self._taken()
                if self._closing:
                    return []
                over = self._complete if patient else self._exhausted
                waited = idle is not None and time.monotonic() - began > idle
                quiet = waited and self._quiet_looks > looks  # a slow broker has answered
                if over and (self._ended or quiet) and not self._failed:
                    self._between = self._spec.size >= 0
                    return []
                self._starving = True
                self._changed.notify_all()
                self._changed.wait(POLL)
                self._starving = False
                if time.monotonic() > warn_at:
                    warn_at = float("inf")
                    logger.warning("Waiting for samples of %s%s", self._spec.name, self._why())

    def _taken(self) -> list[Span]:
        """Return the first ready samples; spans of a stream stay whole, since they may hold few messages."""
        spans, room = [], AT_ONCE
        while self._ready and room > 0:
            span = self._ready.popleft()
            if self._spec.size >= 0 and span.stop - span.start > room:
                middle = span.start + room
                self._ready.appendleft(Span(span.partition, middle, span.stop))
                span = Span(span.partition, span.start, middle)
            spans.append(span)
            room -= span.stop - span.start
        self._ahead -= _size(spans)
        self._lent.extend(spans)
        self._moved_at = time.monotonic()
        if self._short():
            self._changed.notify_all()
        return spans

    def claim(self, span: Span) -> bool:
        """Claim the next taken samples; return False if they now belong to a worker that lacked samples."""
        with self._changed:
            first = self._lent[0] if self._lent else None
            if first is None or (first.partition, first.start) != (span.partition, span.start):
                return False
            if first.stop < span.stop:
                return False
            self._lent.popleft()
            if span.stop < first.stop:
                self._lent.appendleft(Span(span.partition, span.stop, first.stop))
            self._claimed.add(span)
            self._moved_at = time.monotonic()
            return True

    def leave_unclaimed(self) -> None:
        """Put samples that were taken and not claimed back to the front."""
        with self._changed:
            self._ahead += _size(self._lent)
            self._ready.extendleft(reversed(self._lent))
            self._lent.clear()

    def leave_all(self) -> None:
        """Put all samples that were taken and are not acknowledged back to the front, for another loop."""
        with self._changed:
            self.leave_unclaimed()
            self.put_back(list(self._claimed))

    def rest(self) -> None:
        """Pause until the next `take`; unclaimed samples become available to others."""
        with self._changed:
            self._resting = True
            self._changed.notify_all()

    def _why(self) -> str:
        if self._away_since is not None:
            return ": the master cannot be reached"
        return " from others" if self._spec.size >= 0 else " that have not been sent yet"

    def wait_for_need(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until nothing of a stream is left to take; return False if over."""
        with self._changed:
            self._changed.wait_for(lambda: self._exhausted or self._over, timeout)
            return not self._over

    def wait_for_close(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds; return True as soon as this client is closed or has failed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over, timeout)

    @property
    def _over(self) -> bool:
        return self._closing or self._error is not None

    def extend(self, ends: tuple[int, ...], *, final: bool = False) -> None:
        """Note the new ends of the stream's partitions, to be sent to the service; ``final``: none follow."""
        with self._changed:
            if ends != self._known:
                self._grown = ends
            else:
                self._quiet_looks += 1
                self._ended = self._ended or final  # the service knows these ends
            self._changed.notify_all()

    def break_off(self, error: Exception) -> None:
        """End reading with an error, which is raised in the training."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def put_back(self, spans: Iterable[Span]) -> None:
        """Put claimed samples that did not reach the training back to the front; ignore others."""
        with self._changed:
            for span in reversed(list(spans)):
                if span.start < span.stop and self._claimed.covers(span):
                    self._claimed.remove(span)
                    self._ready.appendleft(span)
                    self._ahead += span.stop - span.start

    def acknowledge(self, spans: Iterable[Span]) -> None:
        """Mark claimed samples as handed to the training.

        Raises:
            ConfigurationError: they were put back, or claimed before the last restore.
        """
        with self._changed:
            for span in spans:
                if not self._claimed.covers(span):
                    raise ConfigurationError(
                        f"Samples {span.start} to {span.stop} of partition {span.partition} of the data set"
                        f" {self._spec.name} belong to a loop that has ended; begin a new loop after a restore."
                    )
                self._claimed.remove(span)
                self._acknowledged.add(span)
                self._unreported.add(span)
                self._count += self._weight(span)
                self._unread -= span.stop - span.start
            if self._short():
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all that is acknowledged is reported.

        Raises:
            InfrastructureError: this worker's shards were leased to others.
        """
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or not (self._unreported or self._reporting))
            self._flushing = False
            if self._error is not None:
                raise self._error

    def _weight(self, span: Span) -> int:
        """Return how many positions of a span count for the speed; for a gap in a stream, at most a shard."""
        size = span.stop - span.start
        return min(size, self._spec.shard) if self._spec.size < 0 else size

    def leave_empty(self, gap: Span) -> None:
        """Note a gap in the stream; the service leases it as one shard."""
        with self._changed:
            self._gap = gap

    def fail(self, partition: int, position: int, error: str) -> None:
        """Note that a sample cannot be read."""
        failed = FailedSpan(Span(partition, position, position + 1), error[:MAX_ERROR])
        with self._changed:
            self._claimed.remove(failed.span)
            self._failed.append(failed)
            self._unread -= 1
            self._exhausted = self._complete = self._between = False
            self._changed.notify_all()

    @property
    def spans(self) -> int:
        """Number of spans of samples that this worker has handed to the training and has to save."""
        with self._changed:
            return self._acknowledged.spans

    def settle(self, acknowledged: bytes) -> None:
        """Report what a stored checkpoint of this incarnation contains: packed `Spans`. For another thread."""
        if len(acknowledged) > MAX_SETTLED:
            return
        asking = self._service.another()
        try:
            reply = asking.ask(SettleShards(self._spec.name, self.incarnation, acknowledged))
        finally:
            asking.close()
        if isinstance(reply, Unanswered):  # the next stored checkpoint will do
            logger.debug("A checkpoint is not settled: %s", reply.refused or reply.away)

    def acknowledged(self) -> tuple[bytes, bytes]:
        """Return what this worker has handed to the training, and what is settled for all workers, packed.

        Raises:
            InfrastructureError: its shards were leased to others, or may have been after a long silence.
        """
        with self._changed:
            # After this worker or the master was stopped, the next report shows if the leases still hold.
            self._changed.wait_for(lambda: self._error or self._silent() < 1, RENEWAL_WAIT)
            if self._error is not None:
                raise self._error
            if self._silent() > 1:
                raise InfrastructureError(
                    f"The master was not reached for {_now() - self._renewed:.0f} s; the shards of"
                    f" {self._spec.name} that this worker has may belong to others by now."
                )
            return self._acknowledged.packed(), self._settled

    def _silent(self) -> float:
        """Return the time since the last answered report was first sent, as a fraction of the timeout."""
        return (_now() - self._renewed) / self._spec.timeout

    def close(self) -> None:
        """Report what is acknowledged, return the rest, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_WAIT)
        self._service.close()

    # ---- the thread

    def _run(self) -> None:
        pause = min(self._report_interval, self._spec.timeout / (2 * RENEWALS))
        while True:
            with self._changed:
                self._changed.wait_for(self._due, pause)
                closing = self._closing
                grown = self._extension()
                asks = grown is None and (closing or self._wanted())
                request = self._request() if asks else None
            if grown is not None:
                self._note_extended(grown, self._insist(grown))
            elif request is not None:
                sent = _now()
                self._take_in(request, self._insist(request), sent)
            if closing:
                self._service.ask(ForgetWorker(self._name))
                return
            if self._error is not None:
                return

    def _due(self) -> bool:
        leaves = self._resting and bool(self._ready)
        flushes = self._flushing and bool(self._unreported)
        due = self._closing or bool(self._failed) or bool(self._grown)
        return due or leaves or flushes or self._short()

    def _short(self) -> bool:
        """Return whether to fetch more samples."""
        if self._resting:
            return False
        if self._exhausted or (self._unread > self._enough and not self._starving):
            return False
        return self._ahead < self._target() / 2

    def _target(self) -> float:
        return max(self._fewest * self._spec.shard, self._rate * self._seconds_ahead)

    def _wanted(self) -> bool:
        """Return whether a request is due, for samples or to report that this worker is alive."""
        # Samples leased to others may come back; in a stream, others may wait for samples of this worker.
        waiting = (self._patient and self._exhausted) or self._spec.size < 0
        waiting = waiting and not self._complete
        return self._due() or waiting or bool(self._unreported) or self._silent() * RENEWALS > 1

    def _extension(self) -> ExtendShards | None:
        """Return the report of the stream's growth, if it has grown."""
        if not self._grown or self._closing:
            return None
        ends, self._grown = self._grown, ()
        return ExtendShards(self._spec.name, self.incarnation, ends)

    def _note_extended(self, request: ExtendShards, reply: ShardReply | None) -> None:
        limits = self._spec.limits
        with self._changed:
            if reply is None:
                return
            self._known = request.ends
            self._ended = bool(limits) and all(
                end >= limit for end, limit in zip(request.ends, limits, strict=True)
            )
            if not self._failed:
                self._exhausted, self._complete = reply.exhausted, reply.complete
            self._enough = math.inf
            self._changed.notify_all()

    def _request(self) -> TakeShards:
        now = time.monotonic()
        since, count = self._counted
        if now - since > (POLL if self._rate else FIRST_LOOK):
            rate = (self._count - count) / (now - since)
            self._rate = rate if not self._rate else self._rate + _SMOOTHING * (rate - self._rate)
            self._counted = (now, self._count)
        # The step may wait for a worker without samples, while the remaining ones are here.
        still = not self._starving and now - self._moved_at > REPORT_INTERVAL
        stuck = still and self._others_starve
        returned = self._leave_to_others(stuck)
        wanted = self._target() - self._ahead
        want = max(int(self._starving), -(-int(wanted) // self._spec.shard))
        ends = self._exhausted and not self._patient and self._spec.size >= 0
        if self._closing or self._resting or stuck or ends:
            want = 0  # a loop that ends must not fetch returned samples for the next loop
        acknowledged = list(self._unreported)
        self._reporting = bool(acknowledged)
        self._unreported = Spans(acknowledged[MAX_SPANS:])
        failed, self._failed = self._failed[:MAX_WANT], self._failed[MAX_WANT:]
        gap, self._gap = self._gap, None
        self._seq += 1
        return TakeShards(
            self._spec.name,
            self._name,
            self.incarnation,
            self._seq,
            self._epoch + self._between,
            min(want, MAX_WANT),
            tuple(acknowledged[:MAX_SPANS]),
            tuple(failed),
            self._starving,
            gap,
            returned,
        )

    def _leave_to_others(self, stuck: bool) -> tuple[Span, ...]:
        """Give up unclaimed samples: all while the training rests, half while it is stuck.

        The other half is for the next step, which needs samples on this worker, too.
        """
        left = _size(self._lent) + _size(self._ready)
        if not self._resting:
            left = -(-left // 2) if stuck else 0
        surplus: list[Span] = []
        while left > 0 and len(surplus) < MAX_SPANS:
            unclaimed = self._ready or self._lent
            last = unclaimed.pop()
            middle = max(last.start, last.stop - left)
            if last.start < middle:
                unclaimed.append(Span(last.partition, last.start, middle))
            size = last.stop - middle
            left -= size
            self._unread -= size
            self._ahead -= size if unclaimed is self._ready else 0
            surplus.append(Span(last.partition, middle, last.stop))
        return tuple(surplus)

    def _take_in(self, request: TakeShards, reply: ShardReply | None, sent: float) -> None:
        with self._changed:
            self._reporting = False
            if reply is None:
                self._changed.notify_all()
                return
            self._renewed = sent
            got = _size(reply.spans)
            self._ready.extend(reply.spans)
            self._ahead += got
            self._unread += got
            as_wanted = got >= request.want * self._spec.shard
            if got and request.starving:
                self._starving = False
                if as_wanted:
                    self._fewest = min(2 * self._fewest, MAX_WANT)
            if request.want:
                # Fewer samples than requested are its share of the rest; ask again when almost used up.
                self._enough = math.inf if as_wanted else self._unread / 4
            if request.epoch == self._epoch and not self._failed:
                self._exhausted, self._complete = reply.exhausted, reply.complete
            self._others_starve = reply.others_starve
            if reply.settled:
                self._settled = reply.settled
                for span in Spans.unpacked(reply.settled):
                    self._acknowledged.remove(span)
            for skipped in reply.skipped:
                self._note_skipped(skipped.span, skipped.error)
            self._changed.notify_all()

    def _note_skipped(self, span: Span, error: str) -> None:
        self.skipped += span.stop - span.start
        logger.warning(
            "A sample of the data set %s is skipped after %d attempts (partition %d, position %d): %s",
            self._spec.name, self._spec.attempts, span.partition, span.start, error,
        )  # fmt: skip
        if self.skipped > self._spec.max_skipped:
            self._error = UserCodeError(
                f"{self.skipped} samples of the data set {self._spec.name} could not be read, more than"
                f" max_skipped ({self._spec.max_skipped}); the last one: {error}"
            )

    def _insist(self, request: ShardRequest) -> ShardReply | None:
        """Ask until there is an answer; None if the request is refused, or this client is closed before."""
        delays = backoff.delays(*RETRY)
        while isinstance(reply := self._service.ask(request), Unanswered) and reply.away:
            with self._changed:
                if self._away_since is None:
                    self._away_since = time.monotonic()
                if self._closing:
                    return None
                self._changed.wait_for(lambda: self._closing, next(delays))
        with self._changed:
            self._away_since = None
            if isinstance(reply, ShardReply):
                return reply
            refused = reply if isinstance(reply, Unanswered) else Unanswered()
            kind = ConfigurationError if refused.wrong else InfrastructureError
            self._error = kind(refused.refused or "The master's answer is not one about shards.")
            self._changed.notify_all()
        return None


def _now() -> float:
    """Return seconds including those in suspension, during which the master's clock continued."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _size(spans: Iterable[Span]) -> int:
    return sum(span.stop - span.start for span in spans)
