"""Injected node faults, for tests: ``DLROVER_PROBE_FAULTS=NODE:COMPONENT:HOW,...``.

``HOW`` is ``fail``, ``slow`` (five times slower), ``hang`` or ``die`` (kills the check process).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

import msgspec

from dlrover.spec.check import Component, ProbeResult

VARIABLE = "DLROVER_PROBE_FAULTS"
SLOWER = 5.0
"""Slow-down factor of a slow component."""


class Faults:
    """The injected faults of one node; none outside tests."""

    def __init__(self, environ: Mapping[str, str], node: int) -> None:
        items = [item.split(":") for item in environ.get(VARIABLE, "").split(",") if item]
        self._how = {component: how for name, component, how in items if int(name) == node}

    def strike(self, component: Component) -> None:
        """Trigger the component's fault, if one is injected."""
        how = self._how.get(component.value)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "hang":
            threading.Event().wait()
        elif how == "fail":
            raise OSError(5, "injected fault")

    def slowed(self, result: ProbeResult) -> ProbeResult:
        """Return the result as a slow component would give it; unchanged without that fault."""
        if self._how.get(result.component.value) != "slow" or not result.figure:
            return result
        factor = SLOWER if result.unit == "ms" else 1 / SLOWER
        return msgspec.structs.replace(result, figure=result.figure * factor)
