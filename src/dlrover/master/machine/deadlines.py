"""Times at which nodes are given up. Pure."""

from __future__ import annotations

import heapq


class Deadlines(dict[int, float]):
    """Times by node id. Set them with ``deadlines[node] = time`` only; remove them with `pop`.

    The earliest is asked for after every input: a search would cost the return of n nodes n * n steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int]] = []
        """Every time that was set; those that no longer hold are dropped once they come first."""

    def __setitem__(self, node: int, at: float) -> None:
        heapq.heappush(self._heap, (at, node))
        super().__setitem__(node, at)

    def earliest(self) -> float | None:
        """Return the earliest time; None if there is none."""
        while self._heap and self.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
