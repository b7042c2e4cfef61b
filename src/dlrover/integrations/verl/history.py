"""What a verl worker group has been called for, and whether its actors may be made anew. No Ray, no I/O."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dlrover._util import decoding
from dlrover.errors import ConfigurationError
from dlrover.roles.spec import Failover

VARIABLE = "DLROVER_VERL"


class CallKind(str, enum.Enum):
    """What a call does to the actors of a group."""

    SETUP = "setup"
    """It prepares them: new actors get all of these calls again, in their order."""
    WEIGHTS = "weights"
    """It replaces all their weights by its arguments: new actors get the last call of each such method again."""
    PURE = "pure"
    """It changes nothing in them."""
    STATE = "state"
    """It changes them in a way that only a checkpoint brings back; so does every call of an unknown name."""


KEPT = (CallKind.SETUP, CallKind.WEIGHTS)
"""Calls that are kept with their arguments."""
KINDS = {
    **dict.fromkeys(("init_model", "reset", "set_loss_fn"), CallKind.SETUP),
    **dict.fromkeys(
        ("generate_sequences", "compute_log_prob", "compute_ref_log_prob", "compute_values", "compute_rm_score",
         "infer_batch", "to", "start_profile", "stop_profile", "_query_dispatch_info", "_query_collect_info",
         "get_master_addr_port", "get_cuda_visible_devices"),
        CallKind.PURE,
    ),
}  # fmt: skip
"""Calls of verl's own workers, by the names of their methods."""


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from the death of an actor; `repair` reads it from ``DLROVER_VERL``."""

    failover: Failover = Failover.INSTANCE
    """``instance`` or ``role``: all actors of the group are made anew, for it is one collective world. ``job``: none."""
    max_restarts: int = 10
    """Restarts of a group within ``window``."""
    window: float = 3600.0
    """Seconds."""
    wait: float = 600.0
    """Seconds for the cluster to have room for the new actors, and for these to start."""
    calls: dict[str, CallKind] = {}
    """Kinds of the program's own methods; they precede `KINDS`."""


def repair(text: str) -> Repair:
    """Read ``max_restarts=3,window=600,score=pure``: fields of `Repair`, and methods with their kinds.

    Raises:
        ConfigurationError: it is malformed.
    """
    fields: dict[str, Any] = {"calls": {}}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = word.partition("=")
        own = name in Repair.__struct_fields__ and name != "calls"
        (fields if own else fields["calls"])[name] = value
    try:
        read = decoding.convert(fields, Repair, strict=False)
    except msgspec.ValidationError as error:
        kinds = ", ".join(kind.value for kind in CallKind)
        raise ConfigurationError(
            f"{VARIABLE}={text}: {error}; it takes failover={'|'.join(one.value for one in Failover)},"
            f" max_restarts=N, window=SECONDS, wait=SECONDS, and METHOD=KIND with one of the kinds {kinds}."
        ) from error
    if read.max_restarts < 0 or not (0 < read.window < math.inf and 0 < read.wait < math.inf):
        raise ConfigurationError(
            f"{VARIABLE}={text}: max_restarts must be 0 or more, window and wait above 0 and finite."
        )
    return read


@dataclass
class CallHistory:
    """The calls of a group's actors, through all groups of verl that share them."""

    repair: Repair
    prefixes: list[str] = field(default_factory=list)
    """Names of the workers that share each process; their methods begin with them in a colocated group."""
    repeated: list[tuple[CallKind, str, Any]] = field(default_factory=list)
    """The calls that bring new actors to where these are, in their order, with their workers: set-up, and the last weights of each."""
    changed: str = ""
    """Why new actors could not be as these are: the first call that changed them, in words; empty: they could."""
    restarts: list[float] = field(default_factory=list)

    def kind(self, method: str) -> CallKind:
        """Return what a method does."""
        return self._known(method)[0]

    def _known(self, method: str) -> tuple[CallKind, str]:
        """Return the kind, and the prefix that the name of a known method begins with."""
        known = {**KINDS, **self.repair.calls}
        names = {"": method, **{one: method.removeprefix(f"{one}_") for one in self.prefixes}}
        found = ((known[name], prefix) for prefix, name in names.items() if name in known)
        return next(found, (CallKind.STATE, ""))

    def begins(self, method: str, did: str = "has run") -> None:
        """A call begins; one that changes the state counts at once, since it may end half-way."""
        if self.kind(method) is CallKind.STATE and not self.changed:
            self.changed = (
                f"it {did} {method}, so that new actors would not be what these were"
                f" (if they would be, {VARIABLE}={method}=KIND says so)"
            )

    def done(self, method: str, call: object, worker: str = "") -> None:
        """A call has succeeded, or the program itself waits for it; ``worker`` names one of a fused process."""
        kind, prefix = self._known(method)
        worker = worker or prefix
        if kind is CallKind.WEIGHTS:
            self.repeated = [one for one in self.repeated if one[:2] != (CallKind.WEIGHTS, worker)]
        if kind in KEPT:
            self.repeated.append((kind, worker, call))

    def failed(self, method: str) -> None:
        """A call has raised an error of the program, which may have left a set-up half done."""
        if self.kind(method) is not CallKind.PURE and not self.changed:
            self.changed = f"its {method} has failed half-way"

    def refusal(self, now: float) -> str:
        """Return why the group is not made anew at this time; empty if it is, which counts as a restart."""
        if self.repair.failover is Failover.JOB:
            return f"{VARIABLE} has failover=job"
        if self.changed:
            return self.changed
        self.restarts = [at for at in self.restarts if now - at < self.repair.window]
        if len(self.restarts) >= self.repair.max_restarts:
            return f"it was made anew {len(self.restarts)} times within {self.repair.window:g} s"
        self.restarts.append(now)
        return ""
