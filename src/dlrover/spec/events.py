"""Typed events of a job: the content of ``events.jsonl`` and the output of ``dlrover events``.

An event is written once, when its decision is made, and reads as one sentence.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dlrover.spec.failure import Action, Failure, Rung, Verdict
from dlrover.spec.node import SERVER, Size
from dlrover.spec.plan import Effect, ScaleKind
from dlrover.spec.words import counted


class JobSubmitted(msgspec.Struct, frozen=True, tag="job_submitted"):
    """A job was submitted to its master."""

    name: str
    min_nodes: int
    max_nodes: int
    min_servers: int = 0
    max_servers: int = 0

    def sentence(self) -> str:
        """Return the event as one sentence."""
        nodes = _span(self.min_nodes, self.max_nodes, "node")
        if self.max_servers:
            nodes += f" and {_span(self.min_servers, self.max_servers, 'server')}"
        return f"Job {self.name} was submitted; it runs on {nodes}."


def _span(least: int, most: int, noun: str) -> str:
    return counted(most, noun) if least == most else f"{least} to {counted(most, noun)}"


def _node(number: int, role: str) -> str:
    return f"Node {number} ({role})" if role else f"Node {number}"


class MasterRecovered(msgspec.Struct, frozen=True, tag="master_recovered"):
    """A master took over from the journal of one that died."""

    inputs: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"The master is back: it replayed {self.inputs} journal entries; workers kept running."
        )


class MasterAdopted(msgspec.Struct, frozen=True, tag="master_adopted"):
    """A master without a journal took over a running round from the reports of its nodes."""

    round: int
    nodes: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"The master is back without its journal: it adopted round {self.round} from "
            f"{self.nodes} nodes; workers kept running. The restart budgets start again from zero."
        )


class NodeLaunched(msgspec.Struct, frozen=True, tag="node_launched"):
    """The platform starts a node."""

    node: int
    replaces: int = -1
    cpu_factor: float = 1.0
    """Cores of the node as a multiple of the job's request."""
    memory_factor: float = 1.0
    """Memory of the node as a multiple of the job's request."""
    role: str = ""
    """``worker`` or ``ps``; empty in a job without servers."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        replaced = f" in place of node {self.replaces}" if self.replaces >= 0 else ""
        sizes = (("cores", self.cpu_factor), ("memory", self.memory_factor))
        other = [f"{factor:.3g} times the {what}" for what, factor in sizes if factor != 1.0]
        size = f" with {' and '.join(other)} that the job requested" if other else ""
        return f"{_node(self.node, self.role)} is being started{replaced}{size}."


class SparesDecided(msgspec.Struct, frozen=True, tag="spares_decided"):
    """The number of spares changes, since the failure rate or the time to replace a node has (``--spares auto``)."""

    before: int
    spares: int
    nodes: int
    """Nodes of the job."""
    rate: float
    """Failures per node and day."""
    seconds: float
    """Seconds from the order of a node to its readiness."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"The job is to have {counted(self.spares, 'spare')}, not {self.before}: {self.rate:.2g} failures per "
            f"node and day, and {self.seconds:.0f} s to replace one of {counted(self.nodes, 'node')}."
        )


class SpareReady(msgspec.Struct, frozen=True, tag="spare_ready"):
    """A node is ready to take the place of a lost one."""

    node: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Node {self.node} is a spare: it is ready to take the place of a lost node."


class SpareTakesPlace(msgspec.Struct, frozen=True, tag="spare_takes_place"):
    """A spare becomes a node of the world in place of a lost one."""

    node: int
    lost: int
    """The lost node; -1 if the world did not have all its nodes before."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        place = f"the place of node {self.lost}" if self.lost >= 0 else "a free place"
        return f"Spare node {self.node} takes {place}."


class NodeWaits(msgspec.Struct, frozen=True, tag="node_waits"):
    """A node cannot be started yet; without a reason, as the platform reports it: nothing hinders it any more."""

    node: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Node {self.node} is not started yet: {self.reason}."


class NodeConnected(msgspec.Struct, frozen=True, tag="node_connected"):
    """An agent connected for the first time."""

    node: int
    hostname: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Node {self.node} connected from {self.hostname}."


class NodeLost(msgspec.Struct, frozen=True, tag="node_lost"):
    """A node is permanently gone."""

    node: int
    reason: str
    role: str = ""
    """``worker`` or ``ps``; empty in a job without servers."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"{_node(self.node, self.role)} is lost: {self.reason}."


class JobScaled(msgspec.Struct, frozen=True, tag="job_scaled"):
    """The wanted number of nodes has changed."""

    before: int
    nodes: int
    source: str
    """``user`` or ``plan``."""
    reason: str
    role: str = ""
    """Role of these nodes; empty if they are all of the job's nodes."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        role = f"{self.role} " if self.role else ""
        count = f"{self.nodes} {role}node{'s' if self.nodes > 1 else ''}"
        return f"The job is to have {count} instead of {self.before}: {self.reason}."


class NodeReleased(msgspec.Struct, frozen=True, tag="node_released"):
    """A node that the job no longer needs has left."""

    node: int
    reason: str
    """How the node ended."""
    role: str = ""
    """``worker`` or ``ps``; empty in a job without servers."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"{_node(self.node, self.role)} is released: {self.reason}."


class RoundOpened(msgspec.Struct, frozen=True, tag="round_opened"):
    """The master called nodes to a new rendezvous round."""

    round: int
    reason: str
    awaited: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        verb = "is" if self.awaited == 1 else "are"
        return f"Round {self.round} opened ({self.reason}); {counted(self.awaited, 'node')} {verb} awaited."


class NodeCheckStarted(msgspec.Struct, frozen=True, tag="node_check_started"):
    """Nodes are being checked before they join a world."""

    nodes: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        count = "1 node is" if self.nodes == 1 else f"{self.nodes} nodes are"
        return f"{count} being checked: {self.reason}."


class NodeCheckFinding(msgspec.Struct, frozen=True, tag="node_check_finding"):
    """The node check found something."""

    kind: str
    """``fault``, ``slow``, ``link``, ``undetermined``, ``untested`` or ``note``."""
    nodes: tuple[int, ...]
    component: str
    message: str
    excluded: tuple[int, ...] = ()
    """Those of the nodes that the job goes on without."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        named = ", ".join(map(str, self.nodes[:NODES_NAMED]))
        more = "..." if len(self.nodes) > NODES_NAMED else ""
        who = f"node{'s' if len(self.nodes) > 1 else ''} {named}{more}"
        kind = "" if self.kind == "note" else f" ({self.kind})"
        rest = "; the job goes on without it" if self.excluded else ""
        if len(self.excluded) > 1 or (self.excluded and len(self.nodes) > 1):
            rest = f"; the job goes on without {', '.join(map(str, self.excluded))}"
        return f"Node check, {who}: {self.component}{kind}: {self.message}{rest}."


class NodeCheckFinished(msgspec.Struct, frozen=True, tag="node_check_finished"):
    """The node check is over."""

    nodes: int
    excluded: int
    rounds: int
    seconds: float

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"The node check took {self.seconds:.2f} s in {counted(self.rounds, 'round')}: "
            f"{self.nodes - self.excluded} of {self.nodes} nodes go on."
        )


NODES_NAMED = 8
"""Maximum number of nodes that a sentence names."""


class RoundCompleted(msgspec.Struct, frozen=True, tag="round_completed"):
    """A world was formed."""

    round: int
    nodes: int
    world_size: int
    seconds: float
    servers: int = 0
    """Number of its processes that are servers."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        servers = f", {counted(self.servers, 'server')}" * bool(self.servers)
        return (
            f"Round {self.round} is complete after {self.seconds:.2f} s: "
            f"{counted(self.nodes, 'node')}, {counted(self.world_size - self.servers, 'worker')}{servers}."
        )


class WorkerFailed(msgspec.Struct, frozen=True, tag="worker_failed"):
    """A worker ended in failure."""

    failure: Failure
    verdict: Verdict

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"{self.verdict.title} ({self.verdict.origin.value})."


class InstanceStarted(msgspec.Struct, frozen=True, tag="instance_started"):
    """The processes of an instance, such as a server that is a world by itself, are being started."""

    node: int
    role: str
    index: int
    """Index of the instance in its role, from 0."""
    start: int
    """Number of its starts so far, this one included."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        again = f" (start {self.start})" if self.start > 1 else ""
        return f"Instance {self.index} of {self.role} starts on node {self.node}{again}."


class InstanceRestarts(msgspec.Struct, frozen=True, tag="instance_restarts"):
    """An instance failed or lost its node and is to be started again; the rest of the job goes on."""

    node: int
    """Node where it failed."""
    role: str
    index: int
    """Index of the instance in its role, from 0."""
    count: int
    """Restarts of this instance so far."""
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"Instance {self.index} of {self.role} restarts (restart {self.count}): {self.reason}."
        )


class RestartDecided(msgspec.Struct, frozen=True, tag="restart_decided"):
    """The job restarts its workers after a fault."""

    restart: int
    reason: str
    cause: str = ""
    action: Action = Action.RESTART
    node: int = -1
    rung: Rung = Rung.PROCESS
    """Rung of the ladder of responses."""
    successor: int = -1
    """Node that takes the place of ``node`` at once; -1 if none does."""
    ranks: tuple[int, ...] = ()
    """The ranks that start again, if the others go on."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        done = {
            Action.RESTART_FRESH: f"; node {self.node} starts its workers afresh",
            Action.RELAUNCH: f"; the job goes on without node {self.node}",
            Action.MORE_MEMORY: f"; node {self.node} needs more memory",
        }
        then = {
            Rung.IN_PROCESS: f"; the others go on in their processes; {_ranks(self.ranks)} started again",
            Rung.SPARE: f"; spare node {self.successor} takes the place of node {self.node}",
            Rung.ELSEWHERE: f"; another node is to take the place of node {self.node}",
            Rung.SMALLER: "; the job has fewer nodes from now on",
        }
        return f"Restart {self.restart}: {self.reason}{done.get(self.action, '')}{then.get(self.rung, '')}."


def _ranks(ranks: tuple[int, ...]) -> str:
    named = ", ".join(map(str, ranks))
    return f"rank {named} is" if len(ranks) == 1 else f"ranks {named} are"


class ReplicaJoined(msgspec.Struct, frozen=True, tag="replica_joined"):
    """A rank that was started again trains with the others."""

    rank: int
    members: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Rank {self.rank} trains again, with {counted(self.members - 1, 'other')}."


class HostExcluded(msgspec.Struct, frozen=True, tag="host_excluded"):
    """A host is excluded from the job for some time."""

    hostname: str
    seconds: float
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Host {self.hostname} is kept out for {self.seconds:g} s: {self.reason}."


class HangFound(msgspec.Struct, frozen=True, tag="hang_found"):
    """No rank makes progress, and its processes show that none will."""

    round: int
    ranks: tuple[int, ...]
    """The ranks that the others wait for; empty if nothing distinguishes them."""
    place: str
    """Place of these ranks."""
    groups: str
    """Places of all ranks."""
    seconds: float
    """Time without progress."""
    evidence: str = ""
    """File with the stacks in the job directory; empty if it could not be written."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        where = f"; see {self.evidence}" if self.evidence else ""
        return f"The training hangs, for {self.seconds:.0f} s now: {self.groups}{where}."


class SlowRank(msgspec.Struct, frozen=True, tag="slow_rank"):
    """A rank holds up the others."""

    rank: int
    node: int
    factor: float
    """Its own time per step as a multiple of the median rank's."""
    cause: str
    """``data``: it waits for its batches; ``compute``: anything else."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        why = "waits for its data" if self.cause == "data" else "computes"
        return (
            f"Rank {self.rank} on node {self.node} is slow: it {why}, and takes {self.factor:.2f} "
            f"times as long for a step as the median rank."
        )


class SlowRankRecovered(msgspec.Struct, frozen=True, tag="slow_rank_recovered"):
    """A slow rank is as fast as the others again."""

    rank: int
    node: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Rank {self.rank} on node {self.node} is no longer slow."


class SamplesSkipped(msgspec.Struct, frozen=True, tag="samples_skipped"):
    """Samples of a dataset are skipped: they could not be read, or workers died of them."""

    data: str
    partition: int
    """The epoch, or the partition of a stream."""
    start: int
    """The first position or offset."""
    stop: int
    """The position or offset after the last."""
    error: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        count = self.stop - self.start
        what = "A sample" if count == 1 else f"{count} samples"
        is_or_are = "is" if count == 1 else "are"
        return f"{what} of the data set {self.data} {is_or_are} skipped: {self.error}."


class StrategyChosen(msgspec.Struct, frozen=True, tag="strategy_chosen"):
    """The parallel strategy of a round, chosen for its number of ranks."""

    round: int
    ranks: int
    strategy: str
    """The strategy in words."""
    step_seconds: float
    """Predicted duration of a step."""
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        ranks = counted(self.ranks, "rank")
        return f"Round {self.round} trains with {self.strategy} on {ranks}: {self.reason}."


class Recovered(msgspec.Struct, frozen=True, tag="recovered"):
    """The first new step after a fault: the incident is over."""

    round: int
    seconds: float
    survived: bool = False
    """True if other ranks trained meanwhile."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        what = "All ranks train" if self.survived else "Training steps"
        return f"{what} again, {self.seconds:.2f} s after the fault was seen."


class StepStored(msgspec.Struct, frozen=True, tag="step_stored"):
    """The newest memory checkpoint was to be stored, as a user asked for."""

    directory: str
    step: int
    """The stored step; -1 if none is."""
    reason: str
    problem: str = ""
    """Why none is stored, in one sentence."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        if self.problem:
            return f"Nothing new is stored in {self.directory} ({self.reason}): {self.problem}"
        return f"Step {self.step} is stored in {self.directory}: {self.reason}."


class StepsUndone(msgspec.Struct, frozen=True, tag="steps_undone"):
    """A round began with an earlier step than the last one that the job had reached."""

    round: int
    reached: int
    first_step: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        again = self.reached - self.first_step
        steps = "1 step is" if again == 1 else f"{again} steps are"
        return f"Step {self.reached} -> {self.first_step}: {steps} done again."


class NodeSucceeded(msgspec.Struct, frozen=True, tag="node_succeeded"):
    """All workers of a node ended with exit code 0."""

    node: int
    role: str = ""
    """``worker`` or ``ps``; empty in a job without servers."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        if self.role == SERVER:
            return f"The server of node {self.node} ended by itself, with exit code 0."
        return f"All workers of node {self.node} succeeded."


class JobEnded(msgspec.Struct, frozen=True, tag="job_ended"):
    """The job is over."""

    exit_code: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"The job ended with exit code {self.exit_code}: {self.reason}"


GIB = 1 << 30
MINUTE = 60.0
"""Seconds per minute."""


def size(amount: int) -> str:
    """Return a number of bytes in words: ``1.5 GiB``, ``512 MiB``."""
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount >> 20} MiB"


class RolesSubmitted(msgspec.Struct, frozen=True, tag="roles_submitted"):
    """A job of several roles was submitted to its coordinator."""

    name: str
    roles: tuple[str, ...]

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Job {self.name} was submitted; its roles are {', '.join(self.roles)}."


class CoordinatorRecovered(msgspec.Struct, frozen=True, tag="coordinator_recovered"):
    """A coordinator took over from the journal of one that died."""

    inputs: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"The coordinator is back: it replayed {self.inputs} journal entries; all roles kept running."


class RoleStarts(msgspec.Struct, frozen=True, tag="role_starts"):
    """The job of a role is being started."""

    role: str
    attempt: int
    """Number of its starts so far, this one included."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        again = f" (start {self.attempt})" if self.attempt > 1 else ""
        return f"Role {self.role} starts{again}."


class RoleRestarts(msgspec.Struct, frozen=True, tag="role_restarts"):
    """A role stops, if it still runs, and starts again."""

    role: str
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Role {self.role} restarts: {self.reason}."


class InstanceStuck(msgspec.Struct, frozen=True, tag="instance_stuck"):
    """An instance of a role lives, but made no progress for longer than its phase may take; it is ended."""

    role: str
    index: int
    phase: str
    """``start``, ``work`` or one that the program names; empty if the instance said nothing."""
    seconds: float
    """Seconds without progress, or without a word."""

    def why(self) -> str:
        """Return the reason of its end, as part of a sentence."""
        if not self.phase:
            return f"it had not reported for {self.seconds:.0f} s"
        return f"it had made no progress for {self.seconds:.0f} s in the phase {self.phase}"

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Instance {self.index} of {self.role} is ended: {self.why()}."


class InstanceEnded(msgspec.Struct, frozen=True, tag="instance_ended"):
    """An instance of a role has failed or was stopped."""

    role: str
    index: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Instance {self.index} of {self.role} has ended: {self.reason}."


class RoleEnded(msgspec.Struct, frozen=True, tag="role_ended"):
    """The job of a role has ended."""

    role: str
    exit_code: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Role {self.role} has ended with exit code {self.exit_code}: {self.reason}"


class PlanMade(msgspec.Struct, frozen=True, tag="plan_made"):
    """The auto-scaler begins to carry out a plan: other nodes, servers or batches."""

    number: int
    """1 for a job's first plan."""
    kind: ScaleKind
    nodes: int
    """Wanted number of nodes."""
    before: int
    """Current number of nodes."""
    reason: str
    effect: Effect | None = None
    unit: str = "samples/s"
    """Unit of the throughputs."""
    plan_id: str = ""
    """The Brain's id of the plan; empty if the job's master made it."""
    servers: int = 0
    """Wanted number of parameter servers; ``nodes`` then have the role worker."""
    servers_before: int = 0
    batch: int = 0
    """Wanted samples per step of all workers; 0: unchanged."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        expected = ""
        if self.effect is not None:
            expected = f"; {self.effect.throughput:.3g} {self.unit} are expected"
        whose = " of the Brain" if self.plan_id else ""
        return f"Plan {self.number}{whose}, {self.kind.value}: {self.reason}{expected}."


class FirstSize(msgspec.Struct, frozen=True, tag="first_size"):
    """The Brain chose the number of nodes with which the job starts."""

    nodes: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"The job starts with {counted(self.nodes, 'node')}, as the Brain says: {self.reason}."
        )


class PlanMeasured(msgspec.Struct, frozen=True, tag="plan_measured"):
    """A plan was carried out and its effect measured."""

    number: int
    nodes: int
    throughput: float
    """Measured throughput."""
    error: float
    """Relative difference of the measured throughput from the predicted one."""
    within: bool
    """True if it lies in the predicted interval."""
    short: bool
    """True if the throughput is less than its nodes are worth; the change is then rolled back."""
    unit: str = "samples/s"
    """Unit of the throughput."""
    plan_id: str = ""
    """As in the plan."""
    servers: int = 0
    """As in the plan."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        where = "within" if self.within else "outside of"
        short = "; that does not pay" if self.short else ""
        nodes = Size(self.nodes, self.servers).in_words()
        return (
            f"Plan {self.number} brought {self.throughput:.3g} {self.unit} on {nodes}, "
            f"{self.error:+.0%} from what was predicted and {where} its interval{short}."
        )


class PlanDropped(msgspec.Struct, frozen=True, tag="plan_dropped"):
    """A plan was given up before its effect could be measured."""

    number: int
    reason: str
    plan_id: str = ""
    """As in the plan."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Plan {self.number} is given up: {self.reason}."


class SizeSettled(msgspec.Struct, frozen=True, tag="size_settled"):
    """No other number of nodes is worth a change."""

    nodes: int
    throughput: float
    tried: int
    """Number of sizes that were measured."""
    unit: str = "samples/s"
    """Unit of the throughput."""
    servers: int = 0
    """Parameter servers; ``nodes`` then have the role worker."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        nodes = Size(self.nodes, self.servers).in_words()
        return (
            f"The job stays at {nodes} with {self.throughput:.3g} {self.unit}: of {self.tried} "
            "measured sizes none is worth a change, and no other is expected to be."
        )


class MemoryGrows(msgspec.Struct, frozen=True, tag="memory_grows"):
    """A node's memory use grows and is expected to exceed the node's memory."""

    node: int
    needed: int
    """Bytes that the node is expected to need."""
    limit: int
    """Bytes that the node has."""
    seconds: float
    """Time until then, at most."""
    ordered: bool = False
    """True if another node with more memory takes its place before that."""
    given: int = 0
    """Bytes of the other node; 0 if unknown."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        more = size(self.given) if self.given else "more"
        then = f"; a node with {more} takes its place" if self.ordered else ""
        return f"Node {self.node} is {self.need()}{then}."

    def need(self) -> str:
        """Return the forecast as the end of a sentence."""
        long = self.seconds >= 2 * MINUTE
        soon = f"{self.seconds / MINUTE:.0f} min" if long else f"{self.seconds:.0f} s"
        return f"expected to need {size(self.needed)} of memory within {soon}, and has {size(self.limit)}"


class MemoryBound(msgspec.Struct, frozen=True, tag="memory_bound"):
    """A node needs more memory than the platform can give it."""

    node: int
    factor: float
    """Memory of the node as a multiple of the job's request."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        has = f", {self.factor:.3g} times the requested amount" if self.factor != 1.0 else ""
        return f"Node {self.node} has all the memory that it can be given{has}: it gets no more."


class NodeMigrates(msgspec.Struct, frozen=True, tag="node_migrates"):
    """A node trains on until another one takes its place."""

    node: int
    successor: int
    """The node that takes its place."""
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Node {self.node} trains on until node {self.successor} takes its place: {self.reason}."


class MigrationEnded(msgspec.Struct, frozen=True, tag="migration_ended"):
    """A node stays because the node that should take its place is gone."""

    node: int
    successor: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"Node {self.node} stays: node {self.successor} does not take its place: {self.reason}."
        )


class AutoScalingEnded(msgspec.Struct, frozen=True, tag="auto_scaling_ended"):
    """A user set the number of nodes, which overrules the auto-scaler."""

    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Auto-scaling ends: {self.reason}."


EventBody: TypeAlias = (
    JobSubmitted
    | MasterRecovered
    | MasterAdopted
    | RolesSubmitted
    | CoordinatorRecovered
    | RoleStarts
    | RoleRestarts
    | RoleEnded
    | NodeLaunched
    | SparesDecided
    | SpareReady
    | SpareTakesPlace
    | NodeWaits
    | NodeConnected
    | NodeLost
    | JobScaled
    | NodeReleased
    | RoundOpened
    | NodeCheckStarted
    | NodeCheckFinding
    | NodeCheckFinished
    | RoundCompleted
    | WorkerFailed
    | InstanceStarted
    | InstanceRestarts
    | InstanceStuck
    | InstanceEnded
    | RestartDecided
    | ReplicaJoined
    | HostExcluded
    | HangFound
    | SlowRank
    | SlowRankRecovered
    | SamplesSkipped
    | StrategyChosen
    | Recovered
    | StepsUndone
    | StepStored
    | NodeSucceeded
    | FirstSize
    | MemoryGrows
    | MemoryBound
    | NodeMigrates
    | MigrationEnded
    | PlanMade
    | PlanMeasured
    | PlanDropped
    | SizeSettled
    | AutoScalingEnded
    | JobEnded
)


class Event(msgspec.Struct, frozen=True):
    """An event with its place in the job's history."""

    seq: int
    """Number of the event, from 1 without gaps."""
    time: float
    """Seconds since the epoch."""
    body: EventBody

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return self.body.sentence()
