"""Request of a job: its number of nodes, its limits, and the program that each node starts."""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from dlrover.spec.activity import Activity
from dlrover.spec.failure import Rule
from dlrover.spec.node import CHIEF, EVALUATOR, WORKER, index_in_role, is_server, role_of


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time limits and budgets of a job. Times are seconds.

    Set each one by ``--rdzv-conf key=value``, by ``DLROVER_<KEY>`` or in the configuration file.
    """

    join_timeout: float = 600.0
    """Time that a round waits for its minimum number of nodes before the job fails."""
    last_call_timeout: float = 30.0
    """Quiet time after the latest join before a round starts with fewer nodes than the maximum.

    When the master knows which nodes can come, the round starts as soon as all of them have joined. Only a
    first round of nodes that the master does not launch must wait for this time.
    """
    scale_up_delay: float = 1.0
    """Quiet time after a new node joins before the running world is interrupted to include it.

    Training continues meanwhile; nodes that come together then cost one new round, not several.
    """
    heartbeat_interval: float = 15.0
    """Time between two heartbeats of an agent."""
    heartbeat_timeout: float = 60.0
    """Silence after which a node counts as lost although its connection is open (a stopped process)."""
    reconnect_grace: float = 3.0
    """Time without a connection after which a node counts as lost. While other nodes' connections break or come
    back, it begins anew with each of them, for at most ``heartbeat_timeout``."""
    recovery_grace: float = 15.0
    """Time without a connection after which a node counts as lost if the master itself was away."""
    connect_timeout: float = 60.0
    """Time that an agent looks for its master at the start before it gives up. Before that, its launcher
    waits up to the same time for the master's host name."""
    master_timeout: float = 600.0
    """Time that an agent trains on without a master before it gives up."""
    max_infrastructure_restarts: int = 100
    """Restarts allowed per ``restart_window`` for causes outside the user's program."""
    restart_window: float = 3600.0
    """The window of ``max_infrastructure_restarts``, ``cause_budgets`` and ``node_fault_limit``."""
    cause_budgets: dict[str, int] = {}
    """Restarts allowed per ``restart_window`` for single causes, in addition to the other budgets.

    A table in the configuration file; elsewhere ``ecc:2 host_oom:5``, with a blank between two causes.
    """
    node_fault_limit: int = 5
    """Faults of one node within ``restart_window``, not counting the program's, after which the job goes on
    without the node's host; 0: never."""
    exclusion_cooldown: float = 3600.0
    """Time for which a host is excluded after the job gave up one of its nodes because of faults."""
    no_progress_restarts: int = 3
    """Consecutive restarts without a new step, or with the same failure at the same step, that end a job;
    three times as many if the failure is the infrastructure's, or if none gets beyond the furthest step."""
    node_start_attempts: int = 3
    """Number of times that a node's agent may end before its first join; then the job fails. Pods that the cluster
    removes do not count."""
    release_grace: float = 120.0
    """Time that a node that leaves a job may take, beyond the workers' shutdown timeout, to persist what they
    have in memory. Nodes of a job that has succeeded have `end_grace`."""
    end_grace: float = 15.0
    """Time that an ended job's master waits for its nodes to leave, beyond their shutdown timeout."""
    hang_detection: bool = True
    """True: watch the workers' activity for hangs and slow ranks."""
    hang_action: Literal["restart", "report"] = "restart"
    """Response to a hang: ``restart`` the workers, which counts as a restart for a cause outside the program,
    or only ``report`` it. A job that has never made a step is not restarted."""
    hang_factor: float = 5.0
    """Maximum duration of an activity, as a multiple of the longest one of its kind so far in this job; at
    most half an hour above the longest. The limits below are always allowed."""
    hang_step_limit: float = 180.0
    """Duration always allowed for a step, whatever ``hang_factor`` gives."""
    hang_data_limit: float = 180.0
    """Duration always allowed for the wait for a batch."""
    hang_start_limit: float = 1800.0
    """Duration always allowed from the start of the processes to their first step."""
    hang_compile_limit: float = 1800.0
    """Duration always allowed for compiling a model."""
    hang_eval_limit: float = 1800.0
    """Duration always allowed for an evaluation. Also applies to a rank that visibly works outside of a
    step's usual course, since some programs evaluate without reporting it."""
    hang_checkpoint_limit: float = 1800.0
    """Duration always allowed for being blocked by a checkpoint."""
    hang_sample_gap: float = 5.0
    """Time between the two samples of the processes that must agree before a hang is reported."""
    slow_rank_ratio: float = 1.2
    """A rank is slow if its steps, without waits for others, take this multiple of the median rank's time."""
    slow_rank_window: float = 30.0
    """Time over which the ranks' steps are compared."""
    slow_rank_windows: int = 3
    """Consecutive windows after which a rank is reported as slow, or as recovered."""
    hot_server_ratio: float = 1.3
    """An embedding server is hot, and gives hash slots to others, if this multiple of the servers' mean is asked
    of it; 0: never."""
    hot_server_window: float = 30.0
    """Time for which an embedding server must be hot before slots move, and again after they have."""

    check_timeout: float = 180.0
    """Maximum duration of one round of the node check; a third of it is for the network."""
    check_rounds: int = 4
    """Maximum number of rounds in which the node check pairs nodes; open questions are then undetermined."""
    straggler_ratio: float = 2.0
    """Multiple of the median beyond which the node check calls a part of a node slow."""
    clock_offset: float = 1.0
    """Difference between a node's clock and the master's above which the node check reports it."""
    check_after_fault: bool = True
    """True: check a node again after it had a fault, if the job checks its nodes at all (1 or 0)."""

    memory_action: Literal["replace", "report"] = "replace"
    """Response if a node's memory is expected to run out: ``replace`` the node by one with more memory, where
    the platform can start one, or only ``report`` it."""
    memory_horizon: float = 1800.0
    """Time that a node's memory must last; if the forecast is shorter, ``memory_action`` follows."""
    usage_interval: float = 15.0
    """Time between two measurements of a node's memory and cores."""

    autoscale_window: float = 30.0
    """Time over which the auto-scaler measures a world's speed once it is steady; at least ten steps."""
    autoscale_interval: float = 300.0
    """Time between two reviews by the auto-scaler once it has found a size."""
    autoscale_patience: float = 900.0
    """Time limit for measuring the effect of an auto-scaler's change; then the change is rolled back."""
    autoscale_cost: float = 0.5
    """Weight of the nodes' cost for the auto-scaler, 0 to 1: it maximizes ``speed / nodes ** cost``. 0 finds
    the fastest size, 1 the size with the cheapest sample."""

    def hang_limit(self, activity: int) -> float:
        """Return the seconds that an activity may always last."""
        return {
            Activity.START: self.hang_start_limit,
            Activity.STEP: self.hang_step_limit,
            Activity.DATA: self.hang_data_limit,
            Activity.COMPILE: self.hang_compile_limit,
            Activity.EVAL: self.hang_eval_limit,
            Activity.CHECKPOINT: self.hang_checkpoint_limit,
        }[Activity(activity)]


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job as it was submitted. It never changes; the master keeps the current wanted number of nodes."""

    name: str
    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    """A world has a multiple of this many nodes."""
    managed_nodes: int = 0
    """Nodes that the master launches through its platform; 0: nodes come by themselves. Servers are not
    counted, neither here nor in the numbers above."""
    other_nodes: int = 0
    """Number of them with a role other than worker: those with the lowest ranks. It is fixed."""
    servers: int = 0
    """Parameter servers (role ``ps``) that the master launches in addition at the start; 0: no servers."""
    min_servers: int = 0
    """Minimum number of servers in a world."""
    max_servers: int = 0
    """Maximum number of servers of the job, unless a user asks for more."""
    spares: int = 0
    """Spares that the master launches beside the managed nodes: warm nodes without ranks. Each takes the place of a
    lost worker's node at once. They are counted in none of the numbers above."""
    auto_spares: bool = False
    """Choose the number of spares from the measured failure rate and the measured time to replace a node."""
    server_failover: Literal["job", "instance"] = "job"
    """Scope of a server's failure. ``job``: servers belong to the world, and a failure ends its round.
    ``instance``: each server is a world by itself and restarts alone."""
    chief: bool = False
    """The node with the lowest rank is the chief, and it alone forms the job's world. The further ``other_nodes``
    are evaluators. They, the workers and the servers are instances, each a world by itself."""
    instances: str = ""
    """Name of the nodes' role if all nodes are instances, each a world by itself, and the job has no common world; it
    ends when all have succeeded. Empty: the nodes form a world."""
    max_restarts: int = 0
    """Restarts allowed after failures of the user's program."""
    earlier_restarts: int = 0
    """Restarts counted by earlier masters whose journal the job no longer has."""
    shutdown_timeout: float = 30.0
    """Seconds between SIGTERM and SIGKILL for workers."""
    node_check: bool = False
    """Check nodes before they join a world for the first time (``--network-check``)."""
    exclude_stragglers: bool = False
    """Train without nodes that the check finds slow."""
    limits: Limits = Limits()
    diagnosis_rules: tuple[Rule, ...] = ()
    """The user's own rows of the table of causes, as content, so that a job keeps the rows it began with."""
    survive: bool = False
    """Go on with the ranks that are left when one is lost, in their own processes (``--survive``)."""
    auto_scale: bool = False
    """Find the best number of nodes between ``min_nodes`` and ``max_nodes`` while training."""
    first_size: str = ""
    """The Brain's reason for starting with ``managed_nodes``; empty if the Brain did not choose it."""
    one_host: bool = False
    """The platform launches all nodes on one host, so no node's host can be excluded."""
    grows_memory: bool = False
    """The platform can launch a node with more memory than the job requested."""
    most_memory_factor: float = 0.0
    """Largest multiple of the requested memory; 0: the platform does not know it."""
    grows_cpu: bool = False
    """The platform can launch a node with more cores than the job requested."""

    @property
    def world_nodes(self) -> tuple[int, int]:
        """Minimum and maximum number of nodes in a world, without servers."""
        return (1, 1) if self.chief else (self.min_nodes, self.max_nodes)

    def is_instance(self, node_rank: int) -> bool:
        """Return whether the node with this wanted rank belongs to no common world."""
        alone = self.server_failover == "instance" and is_server(node_rank)
        return alone or bool(self.instances) or (self.chief and node_rank != 0)

    def place(self, node_rank: int) -> tuple[str, int]:
        """Return the role of the node with this wanted rank, and its index among the wanted nodes of the role."""
        index = index_in_role(node_rank)
        if self.instances:
            return self.instances, index
        if not self.chief or is_server(node_rank):
            return role_of(node_rank), index
        if index == 0:
            return CHIEF, 0
        if index < self.other_nodes:
            return EVALUATOR, index - 1
        return WORKER, index - self.other_nodes

    @property
    def world_servers(self) -> tuple[int, int]:
        """Minimum and maximum number of servers in a world; zeros if each is a world by itself."""
        common = self.server_failover == "job"
        return (self.min_servers, self.max_servers) if common else (0, 0)


class Entry(str, enum.Enum):
    """Kind of training program on the command line."""

    SCRIPT = "script"
    """``python -u target args``."""
    MODULE = "module"
    """``python -u -m target args`` (``-m``)."""
    RUN_PATH = "run_path"
    """``runpy.run_path(target)`` in the launcher's own interpreter (``--run-path``)."""
    COMMAND = "command"
    """``target args``: any program (``--no-python``)."""


class Std(enum.IntFlag):
    """Selection of a worker's output streams; the numbers are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class StdMap(msgspec.Struct, frozen=True):
    """Stream selection for all local ranks, with exceptions in ``by_rank``."""

    default: int = 0
    by_rank: dict[int, int] = {}

    def of(self, local_rank: int) -> Std:
        """Return the streams selected for ``local_rank``."""
        return Std(self.by_rank.get(local_rank, self.default))


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an agent needs to start one node's workers. Set once per job."""

    entry: Entry
    target: str
    args: tuple[str, ...] = ()
    server_module: str = ""
    """Module that the servers run; empty: the program."""
    embedding: bool = False
    """True if the servers hold embedding tables."""
    python: str = ""
    """Interpreter for Python entries; empty: the launcher's own."""
    nproc_per_node: int = 1
    role: str = "default"
    run_id: str = "none"
    """torchrun's ``--rdzv-id``; the workers see it as ``TORCHELASTIC_RUN_ID``."""
    max_restarts: int = 0
    """Restarts allowed after failures of the user's program (infrastructure has its own budget)."""
    redirects: StdMap = StdMap()
    tee: StdMap = StdMap()
    local_ranks_filter: tuple[int, ...] = ()
    """Local ranks whose output appears on the console; empty: all."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    log_dir: str = ""
    """Directory of the workers' logs; empty: ``logs`` in the job directory."""
    log_line_prefix_template: str = ""
    """``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE``: ``${role_name} ${rank} ${local_rank}``."""
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    shutdown_timeout: float = 30.0
    """Seconds between SIGTERM and SIGKILL when workers are stopped."""
    virtual_local_rank: bool = False
    save_at_breakpoint: bool = False
    """Default of a `Checkpointer`: persist the newest step in memory when a worker dies."""
    survive: bool = False
    """True if the world goes on with the ranks that are left when one is lost."""
    auto_tuning: bool = False
    """Default of an `ElasticDataLoader` and an `ElasticTrainer`: adapt to measurements."""
    numa_binding: str = ""
    """``node``, ``socket``, ``exclusive``, ``core-complex`` or empty for none."""
