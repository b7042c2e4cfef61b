"""Schedules of disturbances for a job of replicas: what is lost, when, and after what."""

from __future__ import annotations

import random
from typing import NamedTuple

PROGRAMS = "replicas", "ddp", "hsdp"
FEWEST, MOST = 2, 4
"""Disturbances of a job."""
JOIN = 0.15
"""Most seconds after a rank's return is known at which a disturbance hits it or the source of its state."""


class Disturbance(NamedTuple):
    """A disturbance.

    ``kind`` is one of

    - ``kill``, ``stop``: a replica loses a rank by SIGKILL, or one by SIGSTOP,
    - ``two``: two replicas are lost at once,
    - ``agent``, ``master``: the agent of a node, or the master, is killed,
    - ``returning``: a rank that was lost is lost again on its way to the others,
    - ``other``: another replica is lost while one returns,
    - ``source``: the replica is lost from which a returning rank takes the state,
    - ``agent later``, ``master later``: the same as without ``later``, while a replica returns.
    """

    kind: str
    delay: float
    """Seconds after its time: all train, or a rank is lost, or the return of one is known (``source``)."""
    choice: int
    """A number by which to choose who is hit."""
    early: bool
    """True if it does not wait until all train, but comes while the ranks of the one before are away."""


class Plan(NamedTuple):
    """A job and its disturbances."""

    program: str
    replicas: int
    row: int
    """Ranks of a replica."""
    nodes: int
    disturbances: list[Disturbance]

    @property
    def ranks(self) -> int:
        """The ranks of the job."""
        return self.replicas * self.row


LATER = "returning", "other", "source", "agent later", "master later"
"""Kinds that come while a replica is away."""


def plan(seed: int) -> Plan:
    """Return the job of a seed: the same one for the same seed."""
    chance = random.Random(seed)
    program = PROGRAMS[seed % len(PROGRAMS)]
    row = 2 if program == "hsdp" else 1
    replicas = chance.choice((2, 3) if row == 2 else (2, 3, 3, 4))
    shapes = {1, replicas} | ({4} if row == 2 and replicas == 2 else set())
    nodes = chance.choice(sorted(shapes))
    kinds = ["kill", "stop", "master", "returning", "master later"]
    kinds += ["agent"] if nodes > 1 else []
    kinds += ["two", "other", "source"] if replicas > 2 else []
    kinds += ["agent later"] if replicas > 2 and nodes > 1 else []
    found = []
    for kind in chance.sample(kinds, chance.randint(FEWEST, MOST)):
        most = JOIN if kind == "source" else 2.0 if kind in LATER else 1.0
        early = bool(found) and kind not in LATER and replicas > 2 and chance.random() < 0.3
        found.append(Disturbance(kind, chance.uniform(0, most), chance.randrange(1 << 16), early))
    return Plan(program, replicas, row, nodes, found)
