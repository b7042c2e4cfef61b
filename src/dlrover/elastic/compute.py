"""How long a step takes this rank alone, without waiting for the others.

In a synchronous training all ranks' steps take equally long: the fast ones wait for the slow ones. What
differs is when a rank's last gradient is ready, from which on it waits for the others' gradients. So the
time from the end of a step to that moment is measured. A hook on one parameter tells of the moment: on
the one whose gradient came last in a step in which all parameters had one.

On an accelerator the program's calls run ahead of the device; there events in the device's own queue
tell the times, and are read when they have passed.

Where no parameter's gradient can be watched the whole step counts, and no rank stands out.
"""

from __future__ import annotations

import collections
import sys
import time
from typing import Any, Protocol

from dlrover.elastic.tracker import guarded

OUTLIER = 3
"""A step counts as so many times the usual one at most: it may wait for another rank's evaluation."""
SMOOTHING = 10
"""Steps over which the usual time of a step is averaged."""
UNSEEN_STEPS = 3
"""Steps without a sign of the last gradient after which it is looked for again."""
SEARCHES = 5
"""How often it is looked for."""
PENDING_EVENTS = 64
"""Steps of a device that may run behind; what is beyond is not counted."""


class Listener(Protocol):
    """Who is told of the time, as `Tracker` is."""

    @property
    def apart(self) -> int:
        """Nanoseconds so far that belong to no step."""
        ...

    def computed(self, nanoseconds: int) -> None:
        """All steps so far took so long."""
        ...


class ComputeTime:
    """Measures the steps of one optimizer. `step` is to be called at the end of each."""

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
        """A step has ended at ``now`` (monotonic nanoseconds)."""
        apart = self._tracker.apart
        if self._ended:
            self._count(now, apart - self._apart)
        self._look_for_last_gradient(optimizer)
        self._ended, self._apart = now, apart
        if self._device is not None:
            self._device.step_ended()

    def stop(self) -> None:
        """Take the hooks away, and count nothing more."""
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
        """A step has passed since the search began: watch on only the gradient that came last."""
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
    """Times on an accelerator, from pairs of events in its queue."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._start: Any = None
        self._ready: Any = None
        self._spare: list[Any] = []
        self._pairs: collections.deque[tuple[Any, Any, int]] = collections.deque()

    @classmethod
    def of(cls, parameter: Any) -> _Device | None:
        """For the device that ``parameter`` is on; None on the host."""
        kind = parameter.device.type
        module = None if kind == "cpu" else getattr(sys.modules["torch"], kind, None)
        return cls(module) if hasattr(module, "is_current_stream_capturing") else None

    def step_ended(self) -> None:
        """The step's last work is in the queue."""
        self._start = self._event()

    def gradient_ready(self) -> None:
        """The last gradient is ready when the queue gets here; with several in a step the last counts."""
        if self._ready is not None:
            self._spare.append(self._ready)
        self._ready = self._event()

    def note(self, apart: int) -> None:
        """The step is complete; ``apart`` nanoseconds of it do not belong to it."""
        if self._start is not None and self._ready is not None:
            self._pairs.append((self._start, self._ready, apart))
            if len(self._pairs) > PENDING_EVENTS:
                self._spare.extend(self._pairs.popleft()[:2])
        self._start = self._ready = None

    def passed(self) -> list[int]:
        """Nanoseconds of the steps that the device has done since."""
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
