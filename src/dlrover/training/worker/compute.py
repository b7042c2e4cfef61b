"""The compute time of a rank's steps, without waiting for other ranks.

In synchronous training, all ranks' steps take equally long: fast ranks wait for slow ones. Ranks differ in
the moment at which their last gradient is ready; from then on they wait for the others' gradients. So the
measured time runs from the end of a step to that moment. A hook on one parameter marks the moment: the
parameter whose gradient came last in a step in which all parameters had hooks.

On an accelerator, the program's calls run ahead of the device. There, events in the device's own queue
give the times; they are read once they have passed.

If no parameter's gradient can be watched, the whole step counts, and no rank stands out.
"""

from __future__ import annotations

import collections
import sys
import time
from typing import Any, Protocol

from dlrover.training.worker.tracker import guarded

OUTLIER = 3
"""Maximum counted time of a step, in usual step times: a step may wait for another rank's evaluation."""
SMOOTHING = 10
"""Steps over which the usual step time is averaged."""
UNSEEN_STEPS = 3
"""Steps without the last gradient's hook after which the search for the last gradient restarts."""
SEARCHES = 5
"""Maximum number of searches for the last gradient."""
PENDING_EVENTS = 64
"""Maximum unread steps of a device; the oldest beyond it are not counted."""


class Listener(Protocol):
    """The receiver of the compute time, such as `Tracker`."""

    @property
    def apart(self) -> int:
        """Nanoseconds so far outside of steps."""
        ...

    def computed(self, nanoseconds: int) -> None:
        """Receive the total compute time of all steps so far."""
        ...


class ComputeTime:
    """A meter for the steps of one optimizer; call `step` at the end of each step."""

    def __init__(self, tracker: Listener) -> None:
        self._tracker = tracker
        self._total = 0
        self._usual = 0
        self._ended = 0
        self._apart = 0
        self._ready = 0
        self._last: Any = None
        self._hooks: list[Any] = []
        self._parameters = 0
        self._searching = False
        self._searches = 0
        self._unseen = 0
        self._device: _Device | None = None

    def step(self, optimizer: Any, now: int) -> None:
        """Count a step that ended at ``now`` (monotonic nanoseconds)."""
        apart = self._tracker.apart
        if self._ended:
            self._count(now, apart - self._apart)
        self._look_for_last_gradient(optimizer)
        self._ended, self._apart = now, apart
        if self._device is not None:
            self._device.step_ended()

    def stop(self) -> None:
        """Remove the hooks and forget the current step."""
        self._remove_hooks()
        self._ended = 0

    def _count(self, now: int, apart: int) -> None:
        if self._device is not None:
            for nanoseconds in self._device.passed():
                self._add(nanoseconds)
            self._device.note(apart)
            return
        seen = self._ready > self._ended
        self._unseen = 0 if seen else self._unseen + 1
        self._add((self._ready if seen else now) - self._ended - apart)

    def _add(self, nanoseconds: int) -> None:
        usual = self._usual or nanoseconds
        counted = max(0, min(nanoseconds, OUTLIER * usual))
        self._usual = usual + (counted - usual) // SMOOTHING
        self._total += counted
        self._tracker.computed(self._total)

    # ---- the last gradient

    def _look_for_last_gradient(self, optimizer: Any) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._searching:
            self._settle()
        elif count != self._parameters or (self._hooks and self._unseen > UNSEEN_STEPS):
            self._parameters = count
            self._search(optimizer)

    def _search(self, optimizer: Any) -> None:
        self._remove_hooks()
        self._unseen = 0
        self._searches += 1
        if self._searches > SEARCHES:
            return
        self._searching, self._last = True, None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.is_leaf:
                    self._watch(parameter)

    def _settle(self) -> None:
        """End the search after one step: watch only the gradient that came last."""
        self._searching = False
        last, self._last = self._last, None
        self._remove_hooks()
        if last is not None:
            self._device = _Device.of(last)
            self._watch(last)

    def _watch(self, parameter: Any) -> None:
        hook = guarded(self._on_gradient, self.stop)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _on_gradient(self, parameter: Any) -> None:
        if self._searching:
            self._last = parameter
        elif self._device is not None:
            self._device.gradient_ready()
        self._ready = time.monotonic_ns()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._device = None


class _Device:
    """A timer for an accelerator's steps, with pairs of events in its queue."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._start: Any = None
        self._ready: Any = None
        self._spare: list[Any] = []
        self._pairs: collections.deque[tuple[Any, Any, int]] = collections.deque()

    @classmethod
    def of(cls, parameter: Any) -> _Device | None:
        """Return a timer for the device of ``parameter``; None for the CPU."""
        kind = parameter.device.type
        module = None if kind == "cpu" else getattr(sys.modules["torch"], kind, None)
        return cls(module) if hasattr(module, "is_current_stream_capturing") else None

    def step_ended(self) -> None:
        """Mark the end of a step in the queue."""
        self._start = self._event()

    def gradient_ready(self) -> None:
        """Mark a ready last gradient in the queue; the latest mark of a step counts."""
        if self._ready is not None:
            self._spare.append(self._ready)
        self._ready = self._event()

    def note(self, apart: int) -> None:
        """Store the events of a complete step; ``apart`` nanoseconds of it do not count."""
        if self._start is not None and self._ready is not None:
            self._pairs.append((self._start, self._ready, apart))
            if len(self._pairs) > PENDING_EVENTS:
                self._spare.extend(self._pairs.popleft()[:2])
        self._start = self._ready = None

    def passed(self) -> list[int]:
        """Return the nanoseconds of the steps that the device has finished since the last call."""
        found = []
        while self._pairs and self._pairs[0][1].query():
            start, ready, apart = self._pairs.popleft()
            found.append(int(start.elapsed_time(ready) * 1e6) - apart)
            self._spare += (start, ready)
        return found

    def _event(self) -> Any:
        if self._module.is_current_stream_capturing():
            return None
        event = self._spare.pop() if self._spare else self._module.Event(enable_timing=True)
        event.record()
        return event
