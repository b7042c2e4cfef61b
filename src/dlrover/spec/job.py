"""What a job asks for: how many nodes, and the limits it lives under."""

from __future__ import annotations

from typing import Literal

import msgspec

from dlrover.spec.activities import Activity
from dlrover.spec.rules import Rule


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
    """How long an agent looks for its master at the start before it gives up, and how long before that its
    launcher waits for the name of the master's host."""
    master_timeout: float = 600.0
    """How long an agent trains on without a master before it gives up."""
    max_infrastructure_restarts: int = 100
    """Restarts allowed per ``restart_window`` for causes outside the user's program."""
    restart_window: float = 3600.0
    """The window of ``max_infrastructure_restarts``, ``cause_budgets`` and ``node_fault_limit``."""
    cause_budgets: dict[str, int] = {}
    """Restarts allowed per ``restart_window`` for single causes, beside the other budgets.

    A table in the configuration file; elsewhere ``ecc:2 host_oom:5``, with a blank between two causes.
    """
    node_fault_limit: int = 5
    """Faults of one node within ``restart_window``, other than the program's, that make the job go on
    without its host; 0 for never."""
    exclusion_cooldown: float = 3600.0
    """How long a host is kept out of the job after one of its nodes was given up for its faults."""
    no_progress_restarts: int = 3
    """Restarts in a row without a new step, or with the same failure at the same step, that end a job. Three times as many end
    it whose failure at the same step is the infrastructure's, or that do not come beyond the furthest step."""
    node_start_attempts: int = 3
    """How often a node's agent may end before it ever joined, until the job fails."""
    release_grace: float = 120.0
    """How long a node that the job no longer needs may take to store what its workers have in memory, beyond
    their shutdown time-out."""
    end_grace: float = 15.0
    """How long an ended job's master waits for its nodes to leave, beyond their shutdown time-out."""
    hang_detection: bool = True
    """Whether the workers' activity is watched for hangs and slow ranks."""
    hang_action: Literal["restart", "report"] = "restart"
    """What follows a hang: ``restart`` the workers, which counts as a restart for a cause outside of the
    program, or only ``report`` it. A job that has never made a step is not restarted."""
    hang_factor: float = 5.0
    """An activity may last so many times as long as the longest one of its kind so far in this job, but no
    more than half an hour longer."""
    hang_step_limit: float = 180.0
    """How long a step may last, whatever was learned."""
    hang_data_limit: float = 180.0
    """How long the wait for a batch may last, whatever was learned."""
    hang_start_limit: float = 1800.0
    """The same from the start of the processes to their first step."""
    hang_compile_limit: float = 1800.0
    """The same for compiling a model."""
    hang_eval_limit: float = 1800.0
    """The same for an evaluation. It is also what a rank gets that is seen to work outside of a step's
    usual course: some evaluate without telling."""
    hang_checkpoint_limit: float = 1800.0
    """The same for being blocked by a checkpoint."""
    hang_sample_gap: float = 5.0
    """Time between the two looks at the processes that have to agree before a hang counts as one."""
    slow_rank_ratio: float = 1.2
    """A rank is slow whose steps, without waiting for others, take so many times as long as the median rank's."""
    slow_rank_window: float = 30.0
    """Time over which the ranks' steps are compared."""
    slow_rank_windows: int = 3
    """Windows in a row that name a rank as slow, and that clear it again."""

    check_timeout: float = 180.0
    """How long one round of the node check may take; a third of it is for the network."""
    check_rounds: int = 4
    """Rounds in which nodes meet in the node check, at most; what is open then is undetermined."""
    straggler_ratio: float = 2.0
    """The multiple of the median above which the node check calls a part of a node slow."""
    clock_offset: float = 1.0
    """How far a node's clock may be off the master's before the node check tells it."""
    check_after_fault: bool = True
    """Whether nodes are checked again after a fault of theirs, if the job checks its nodes at all (1 or 0)."""

    memory_action: Literal["replace", "report"] = "replace"
    """What follows when a node's memory is foreseen to run out: ``replace`` it by one with more, where the platform
    can start one, or only ``report`` it."""
    memory_horizon: float = 1800.0
    """For how long a node's memory must last; nearer than that it is foreseen to run out."""
    usage_interval: float = 15.0
    """How often a node looks at what it uses of its memory and its cores."""

    autoscale_window: float = 30.0
    """Time over which the auto-scaler measures a world's speed, once it is steady; ten steps at least."""
    autoscale_interval: float = 300.0
    """Time between two looks of the auto-scaler once it has found a size."""
    autoscale_patience: float = 900.0
    """How long a change of the auto-scaler may take until its effect is measured; then it is taken back."""
    autoscale_cost: float = 0.5
    """How much nodes cost the auto-scaler, 0 to 1: it looks for the largest ``speed / nodes ** cost``.
    With 0 it is the fastest size, with 1 the one with the cheapest sample."""

    def hang_limit(self, activity: int) -> float:
        """Seconds that an activity may last at least."""
        return {
            Activity.START: self.hang_start_limit,
            Activity.STEP: self.hang_step_limit,
            Activity.DATA: self.hang_data_limit,
            Activity.COMPILE: self.hang_compile_limit,
            Activity.EVAL: self.hang_eval_limit,
            Activity.CHECKPOINT: self.hang_checkpoint_limit,
        }[Activity(activity)]


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job, as it was submitted. Never changed; how many nodes it is to have meanwhile is its master's."""

    name: str
    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    """A world has a multiple of this many nodes."""
    managed_nodes: int = 0
    """Nodes that the master launches through its platform; 0: they come by themselves. Servers do not count,
    here and in the numbers above."""
    other_nodes: int = 0
    """How many of them are of other roles than worker: those of the lowest ranks. Their number is fixed."""
    servers: int = 0
    """Parameter servers (role ``ps``) that the master launches beside them at the start; 0: the job has none."""
    min_servers: int = 0
    """Servers that a world needs."""
    max_servers: int = 0
    """Servers that the job may have unless a user asks for more."""
    max_restarts: int = 0
    """Restarts allowed after failures of the user's program."""
    earlier_restarts: int = 0
    """Restarts that earlier masters have counted, of which the job has no journal any more."""
    shutdown_timeout: float = 30.0
    """Seconds that workers get between SIGTERM and SIGKILL."""
    node_check: bool = False
    """Check nodes before they join a world for the first time (``--network-check``)."""
    exclude_stragglers: bool = False
    """Train without nodes that the check finds slow."""
    limits: Limits = Limits()
    diagnosis_rules: tuple[Rule, ...] = ()
    """The user's own rows of the table of causes: their content, so that a job keeps what it began with."""
    auto_scale: bool = False
    """Find the best number of nodes between ``min_nodes`` and ``max_nodes`` while training."""
    first_size: str = ""
    """Why it starts with ``managed_nodes``, if the Brain has said so."""
    one_host: bool = False
    """The platform launches all nodes on one host: none of them can be kept out."""
    grows_memory: bool = False
    """The platform can launch a node with more memory than the job asked for."""
    most_memory_factor: float = 0.0
    """With how many times as much at most; 0: the platform does not know."""
    grows_cpu: bool = False
    """The platform can launch a node with more cores than the job asked for."""
