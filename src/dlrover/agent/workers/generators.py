"""Random generators created by a zygote's imports: its forks must not draw the same numbers.

A generator seeded by the system gets a new seed in each fork, as in a new process. A generator with an
explicit seed keeps its state, as a new process would have the same.

Only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

CHOSEN = 1 << 48
"""Seeds below this bound were set explicitly; the system's seeds have 64 bits or more."""


class Generators:
    """The generators created while `watched`; call `find` afterwards, and `renew` in each fork."""

    def __init__(self) -> None:
        self._unseeded: weakref.WeakSet[random.Random] = weakref.WeakSet()
        self._global_state: Any = None
        self._renewals: list[Callable[[], object]] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Record which of the standard library's generators are seeded, and how."""
        seed, seed_global = random.Random.seed, random.seed

        def noted(instance: random.Random, a: Any = None, version: int = 2) -> None:
            seed(instance, a, version)
            (self._unseeded.add if a is None else self._unseeded.discard)(instance)

        def noted_global(a: Any = None, version: int = 2) -> None:
            seed_global(a, version)
            chosen.append(a is not None)

        chosen: list[bool] = []
        random.Random.seed, random.seed = noted, noted_global  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            random.Random.seed, random.seed = seed, seed_global  # type: ignore[method-assign]
            if chosen[-1:] == [True]:
                self._global_state = random.getstate()

    def find(self) -> None:
        """Find the generators to renew, those of numpy and PyTorch included."""
        self._renewals = [instance.seed for instance in self._unseeded]
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            kind = numpy_random.BitGenerator
            # By type: reading an object's `__class__` may run its own code.
            for each in [each for each in gc.get_objects() if issubclass(type(each), kind)]:
                entropy = getattr(each.seed_seq, "entropy", 0)
                if isinstance(entropy, int) and entropy >= CHOSEN:  # a list is an explicit seed
                    self._renewals.append(each.__init__)
        torch = sys.modules.get("torch")
        if torch is not None and torch.default_generator.initial_seed() >= CHOSEN:
            self._renewals.append(torch.default_generator.seed)

    def renew(self) -> None:
        """Reseed the system-seeded generators, so that this process draws its own numbers."""
        for renewal in self._renewals:
            renewal()
        if self._global_state is not None:  # the standard library has reseeded it at the fork
            random.setstate(self._global_state)
