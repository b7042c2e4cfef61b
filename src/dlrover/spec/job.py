"""What a job asks for: how many nodes, and the limits it lives under."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time limits and budgets of a job. Times are seconds.

    Each can be set by ``--rdzv-conf key=value``, by ``DLROVER_<KEY>`` and in the configuration file.
    """

    join_timeout: float = 600.0
    """How long a round waits for its minimum of nodes before the job fails."""
    last_call_timeout: float = 30.0
    """Quiet time after the latest join before a round starts with fewer nodes than the maximum.

    Only the first round of nodes that come by themselves waits for it: whenever it is known who can
    come, the round starts the moment they are all there.
    """
    scale_up_delay: float = 1.0
    """Quiet time after a new node came before the running world is interrupted to take it in.

    Training goes on meanwhile; nodes that come together then cost one new round, not several.
    """
    heartbeat_interval: float = 15.0
    """How often an agent reports that it is alive."""
    heartbeat_timeout: float = 60.0
    """Silence after which a node counts as lost though its connection is open (a stopped process)."""
    reconnect_grace: float = 3.0
    """How long a node may be without a connection before it counts as lost."""
    recovery_grace: float = 15.0
    """The same after the master itself was away; its absence is not the nodes' fault."""
    connect_timeout: float = 60.0
    """How long an agent looks for its master at the start before it gives up."""
    master_timeout: float = 600.0
    """How long an agent trains on without a master before it gives up."""
    max_infrastructure_restarts: int = 100
    """Restarts allowed per ``restart_window`` for causes outside the user's program."""
    restart_window: float = 3600.0
    """The window of ``max_infrastructure_restarts``."""
    no_progress_restarts: int = 3
    """Restarts in a row without a new step, or with the same failure at the same step, that end a job."""
    node_start_attempts: int = 3
    """How often a node's agent may end before it ever joined, until the job fails."""
    end_grace: float = 15.0
    """How long an ended job's master waits for its nodes to leave, beyond their shutdown time-out."""
    check_timeout: float = 180.0
    """How long one round of the node check may take; a third of it is for the network."""
    check_rounds: int = 4
    """Rounds in which nodes meet in the node check, at most; what is open then is undetermined."""
    straggler_ratio: float = 2.0
    """The multiple of the median above which the node check calls a part of a node slow."""
    clock_offset: float = 1.0
    """How far a node's clock may be off the master's before the node check tells it."""
    exclusion_time: float = 600.0
    """How long a machine that the node check left out is refused, if its node came by itself."""
    check_after_fault: bool = True
    """Whether nodes are checked again after a fault of theirs, if the job checks its nodes at all (1 or 0)."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job, as its master knows it. Set when the job is submitted and never changed."""

    name: str
    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    """A world has a multiple of this many nodes."""
    managed_nodes: int = 0
    """Nodes that the master launches through its platform; 0: they come by themselves."""
    max_restarts: int = 0
    """Restarts allowed after failures of the user's program."""
    shutdown_timeout: float = 30.0
    """Seconds that workers get between SIGTERM and SIGKILL."""
    node_check: bool = False
    """Check nodes before they join a world for the first time (``--network-check``)."""
    exclude_stragglers: bool = False
    """Train without nodes that the check finds slow."""
    limits: Limits = Limits()
