"""Instances: nodes that belong to no common world, so that each starts, fails and returns by itself.

The servers of a job are instances if ``server_failover`` is ``instance``; with a ``chief``, all other nodes are, and
in a job of ``instances`` all nodes. Each is a world of one node, in rounds of its own, which count the starts of its
index. Training goes on meanwhile, and the instances never hold up a round. The restart budgets are those of a job, for
each index its own: an instance has made progress if the training has made a step since its start, or if it lives for
a minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dlrover.master.machine import inputs
from dlrover.master.machine.fleet import Fleet
from dlrover.master.machine.recovery.restarts import Restart, RestartPolicy, Stop, cause_of
from dlrover.master.machine.state import JobState, Node
from dlrover.rpc.messages import AssignWorld, CallToRound, Join
from dlrover.spec import events
from dlrover.spec.failure import Failure
from dlrover.spec.node import WORKER, NodeStatus, Size, is_server
from dlrover.spec.world import Holding, World


@dataclass
class Instances:
    """The instances of a job. Change it only through its methods."""

    state: JobState = field(compare=False, repr=False)
    fleet: Fleet = field(compare=False, repr=False)
    #: latest world of each node; it is over if the node has left
    worlds: dict[int, World] = field(default_factory=dict)
    #: when each of these worlds began
    since: dict[int, float] = field(default_factory=dict)
    #: the job's steps when each of these worlds began
    steps: dict[int, int] = field(default_factory=dict)
    #: starts so far, by wanted rank
    starts: dict[int, int] = field(default_factory=dict)
    #: restart budgets, by wanted rank
    budgets: dict[int, RestartPolicy] = field(default_factory=dict)
    #: nodes whose next start is from processes that have loaded nothing
    fresh: set[int] = field(default_factory=set)

    # ---- queries

    def owns(self, node_id: int) -> bool:
        """Return whether a node is an instance."""
        node = self.state.nodes.get(node_id)
        return node is not None and self.state.is_instance(node)

    @property
    def running(self) -> Size:
        """Number of instances whose processes run."""
        nodes = [self.state.nodes[node_id] for node_id in self.worlds]
        ranks = [node.node_rank for node in nodes if node.status is NodeStatus.RUNNING]
        servers = sum(map(is_server, ranks))
        return Size(len(ranks) - servers, servers)

    @property
    def have_succeeded(self) -> bool:
        """True in a job of instances once all of them have succeeded."""
        # This is asked after each input of any job, so that counting its nodes would be quadratic.
        state = self.state
        if not state.job.instances or state.succeeded < state.scaling.wanted:
            return False
        nodes = state.nodes.values()
        done = {node.node_rank for node in nodes if node.status is NodeStatus.SUCCEEDED}
        return done.issuperset(state.scaling.ranks)

    def next_round(self, node: Node) -> int:
        """Return the number of the round that an instance may join."""
        return self.starts.get(node.node_rank, 0) + 1

    def runs(self, node_id: int, round_: int) -> bool:
        """Return whether a node's processes run in a round."""
        world = self.worlds.get(node_id)
        running = self.state.nodes[node_id].status is NodeStatus.RUNNING
        return world is not None and world.round == round_ and running

    def admitted(self, failure: Failure) -> events.WorkerFailed | None:
        """Return a reported failure as it should be journalled; None if the report changes nothing."""
        if not self.runs(failure.node_id, failure.round):
            return None
        return self.state.table.failed(failure.bounded())

    # ---- changes

    def connected(self, node: Node, running_round: int, held: Holding | None) -> None:
        """Note what a connected instance runs; call it to a new start if that is unknown here."""
        if not running_round or node.id in self.state.scaling.leaving:
            return
        known = self.worlds.get(node.id)
        if known is not None and known.round == running_round:
            return
        world = held.world if held is not None and not held.stopping else None
        if world is None or known is not None or world.round < self.next_round(node):
            self._call(node, "the master knows of another start")
            return
        self._run(node, world, self.state.submitted_at)
        if held is not None and held.succeeded:
            self.state.move(node, NodeStatus.SUCCEEDED)

    def join(self, node: Node, join: Join, now: float) -> None:
        """Start a ready instance; a node that it replaces leaves."""
        state = self.state
        if node.id in state.scaling.leaving or not node.connected:
            return
        if join.round != self.next_round(node):
            self._call(node, f"round {join.round} is over")
            return
        if node.status is not NodeStatus.READY:
            state.move(node, NodeStatus.READY)
        offer, (role, index) = join.offer, state.job.place(node.node_rank)
        world = World(
            round=join.round,
            restart_count=self._budget(node).count,
            node_rank=0,
            node_count=1,
            first_rank=0,
            world_size=offer.nproc,
            store_addr=offer.addr,
            store_port=offer.store_port,
            salt=offer.salt,
            index=index,
            instances=max(self._wanted(role), index + 1),
            instance_role=role,
        )
        self._run(node, world, now)
        state.send(inputs.Say(node.id, AssignWorld(world, node.id in self.fresh)))
        self.fresh.discard(node.id)
        state.emit(events.InstanceStarted(node.id, role, index, join.round))
        migration = self.fleet.migrations.pop(node.id, None)
        if migration is not None:
            self.fleet.drain(state.nodes[migration.node], now)

    def _run(self, node: Node, world: World, now: float) -> None:
        self.state.move(node, NodeStatus.RUNNING)
        node.has_run = True
        self.fleet.failed_starts.pop(node.node_rank, None)
        self.starts[node.node_rank] = world.round
        self.worlds[node.id], self.since[node.id] = world, now
        self.steps[node.id] = self.state.progress.total_steps

    def decide(self, node: Node, report: events.WorkerFailed, now: float) -> Restart | Stop:
        """Ask the instance's budgets about its failure or its loss; its world is over."""
        seconds, total = now - self.since.get(node.id, now), self.state.progress.total_steps
        served = total - self.steps.get(node.id, total)
        for facts in (self.worlds, self.since, self.steps):
            facts.pop(node.id, None)
        cause = cause_of(report.failure, report.verdict, served, seconds)
        decision = self._budget(node).decide(cause, now)
        if isinstance(decision, Restart):
            role, index = self.state.job.place(node.node_rank)
            count = self._budget(node).count
            self.state.emit(events.InstanceRestarts(node.id, role, index, count, decision.reason))
        return decision

    def restart(self, node: Node, reason: str) -> None:
        """Start an instance again on its node."""
        self.state.move(node, NodeStatus.READY)
        self._call(node, reason)

    def _call(self, node: Node, reason: str) -> None:
        if node.connected:
            self.state.send(inputs.Say(node.id, CallToRound(self.next_round(node), reason)))

    def _wanted(self, role: str) -> int:
        return self.state.scaling.of_role(WORKER if self.state.job.instances else role)

    def _budget(self, node: Node) -> RestartPolicy:
        job = msgspec.structs.replace(self.state.job, earlier_restarts=0)
        return self.budgets.setdefault(node.node_rank, RestartPolicy(job))

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        assert self.worlds.keys() == self.since.keys() == self.steps.keys()
        for node_id, world in self.worlds.items():
            node = self.state.nodes[node_id]
            assert self.state.is_instance(node), "a node of the common world has a world by itself"
            assert world.round <= self.starts[node.node_rank], "a start that was not counted"
        for budget in self.budgets.values():
            budget.validate()
