"""The ladder of responses to a fault: the first rung that applies is taken, and the event says which.

The restart policy (`restarts`) decides before that whether the job goes on at all: a hopeless failure, no progress
or a spent budget ends it. The budgets are ``max_restarts`` for the program's failures, otherwise
``max_infrastructure_restarts`` per ``restart_window``, and ``cause_budgets`` for single causes in addition. Faults
that repeat on one node (``node_fault_limit``) make the node leave, which takes the job to the rungs below NODE.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dlrover.spec.failure import Action, Rung


class FaultFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice of a rung depends on."""

    action: Action
    """Sufficient action after the failure, and after those before it on the node."""
    leaves: bool
    """True if the node is lost, or is given up."""
    survives: bool = False
    """True if the processes that are well can go on."""
    spare: bool = False
    """True if a spare is ready to take the node's place."""
    launched: bool = True
    """True if the platform launches another node in its place."""
    enough: bool = False
    """True if the other nodes are enough for a world."""


LADDER: dict[Rung, Callable[[FaultFacts], bool]] = {
    Rung.IN_PROCESS: lambda f: f.survives,
    Rung.PROCESS: lambda f: not f.leaves and f.action is not Action.RESTART_FRESH,
    Rung.NODE: lambda f: not f.leaves,
    Rung.SPARE: lambda f: f.spare,
    Rung.ELSEWHERE: lambda f: f.launched or not f.enough,
    Rung.SMALLER: lambda f: f.enough,
}
"""The rungs and when each applies, the cheapest first. Below the last one, the job ends."""


def choose(facts: FaultFacts) -> Rung:
    """Return the first rung that applies; `Rung.END` if none does."""
    return next((rung for rung, applies in LADDER.items() if applies(facts)), Rung.END)
