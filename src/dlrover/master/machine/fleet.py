"""The nodes of a job: how they are identified, launched, replaced, excluded and drained.

A node that is drained stops its workers and, if the job saves at breakpoint, persists what they have in
memory. It takes part in the end of the running world like all others: the next round waits until it has left,
so that the new workers find the step. The node is not lost: there is no fault, no restart and no replacement.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.rendezvous import UNRANKED
from dlrover.master.machine.state import JobState, Migration, Node, given_up, released
from dlrover.rpc.messages import Dismiss, Hello, StandBy
from dlrover.spec import events
from dlrover.spec.node import SPARE, FoundNode, LaunchNode, NodeStatus, is_server
from dlrover.spec.world import Offer

_USAGE = (ExitCode.USAGE, 126, 127)
"""Exit codes by which an agent, or the shell that starts it, reports that its command is wrong."""


@dataclass
class Fleet:
    """A job's nodes beyond their state. Change it only through its methods."""

    state: JobState = field(compare=False, repr=False)
    #: node by agent process, for all agents that ever connected
    by_uid: dict[str, int] = field(default_factory=dict)
    #: id of the next new node, higher than all before it
    next_id: int = 0
    #: by wanted rank: consecutive launched nodes that ended before they were part of a world
    failed_starts: dict[int, int] = field(default_factory=dict)
    #: migrations by id of the new node
    migrations: dict[int, Migration] = field(default_factory=dict)

    # ---- queries

    def role(self, node_id: int) -> str:
        """Return a node's role as users see it; empty in a job whose nodes all have the same."""
        job, node = self.state.job, self.state.nodes[node_id]
        if self.state.is_spare(node):
            return SPARE
        return job.place(node.node_rank)[0] if job.servers or job.chief or job.instances else ""

    def coming(self) -> list[tuple[int, Migration]]:
        """Return the successors that have not joined yet, with their migrations."""
        joined = self.state.rendezvous.offers
        return [(i, migration) for i, migration in self.migrations.items() if i not in joined]

    def is_enough(self, without: Node | None = None) -> bool:
        """Return whether the nodes that stay, except one, are enough for a world."""
        return self.state.rendezvous.can_form(self._others(without))

    def may_be_enough(self) -> bool:
        """Return whether the nodes that stay are enough, or would be with lost ones that may come by themselves again."""
        nodes = self.state.nodes.values()
        taken = {node.hostname for node in nodes if node.excluded or not node.status.final}
        lost = {
            node.hostname: node.id
            for node in nodes
            if node.status is NodeStatus.LOST and not node.launched and node.hostname not in taken
        }
        return self.state.rendezvous.can_form(self._others(None) | {*lost.values()})

    def _others(self, without: Node | None) -> set[int]:
        leaving = self.state.scaling.leaving
        return {
            node.id
            for node in self.state.nodes.values()
            if not (node.status.final or node.id in leaving or node is without)
            and not (without is not None and node.gone)
            and not self.state.is_outside(node)
        }

    def surplus(self) -> list[Node]:
        """Return the nodes beyond the wanted number that are not drained yet.

        Of two nodes with the same rank the older one leaves, unless it waits for the other to take its place.
        A master without a journal may find two such nodes, too.
        """
        scaling = self.state.scaling
        kept = {migration.node for _, migration in self.coming()}
        staying = self.staying()
        latest = {node.node_rank: node for node in sorted(staying, key=lambda node: node.id)}
        return [
            node
            for node in staying
            if not scaling.wants(node.node_rank)
            or (latest[node.node_rank] is not node and node.id not in kept)
        ]

    def staying(self) -> list[Node]:
        """Return the launched nodes that neither have left nor are drained."""
        leaving = self.state.scaling.leaving
        return [
            node
            for node in self.state.nodes.values()
            if node.launched and not node.status.final and node.id not in leaving
        ]

    def farewell(self, node: Node) -> Dismiss:
        """Return the order to leave for a node that is drained."""
        replaced = any(migration.node == node.id for migration in self.migrations.values())
        return released(node, replaced=replaced)

    # ---- newcomers

    def add(self, node_rank: int, node_id: int | None = None) -> Node:
        """Add a node that is being started."""
        node = Node(id=self.next_id if node_id is None else node_id, node_rank=node_rank)
        self.next_id = max(self.next_id, node.id + 1)
        self.state.nodes[node.id] = node
        if self.state.job.world_servers[1] and is_server(node_rank):
            self.state.rendezvous.servers.add(node.id)
        return node

    def add_found(self, found: FoundNode, now: float) -> None:
        """Take over a node that the platform started for an earlier master."""
        node = self.add(found.node_rank, found.node_id)
        node.launched, node.handle = True, found.handle
        node.memory_factor, node.cpu_factor = found.memory_factor, found.cpu_factor
        self.state.lost_at[node.id] = now + self.state.job.limits.recovery_grace

    def node_of(self, event: Hello) -> Node:
        """Return the node of an agent process, if necessary a new one.

        An unknown process is a new node unless it names a node that awaits its agent. So is one whose node is
        lost, unless the platform had launched that node. While a round may be adopted, a new node keeps the
        id that an earlier master gave it, if that is free.
        """
        nodes = self.state.nodes
        known = self.by_uid.get(event.uid)
        if known is None and event.node_id in nodes and not nodes[event.node_id].uid:
            known = event.node_id
        node = nodes.get(known) if known is not None else None
        if node is None or (node.status.final and not node.launched):
            claims = event.held is not None and not self.state.adoption.over
            free = 0 <= event.node_id < UNRANKED and event.node_id not in nodes
            node = self.add(event.node_rank, event.node_id if claims and free else None)
        node.uid = event.uid
        self.by_uid[event.uid] = node.id
        return node

    def launch(
        self,
        node_rank: int,
        now: float,
        replaces: Node | None = None,
        factors: tuple[float, float] | None = None,
    ) -> int:
        """Launch a node and return its id; by default it has the resources of the node that it replaces."""
        node = self.add(node_rank)
        node.launched = True
        if replaces is not None:
            node.cpu_factor, node.memory_factor = replaces.cpu_factor, replaces.memory_factor
        if factors is not None:
            node.cpu_factor, node.memory_factor = factors
        replaced = replaces.id if replaces is not None else -1
        self.state.emit(
            events.NodeLaunched(
                node.id, replaced, node.cpu_factor, node.memory_factor, self.role(node.id)
            )
        )
        self.order(node, now)
        return node.id

    def order(self, node: Node, now: float) -> None:
        """Order a node from the platform."""
        self.state.spares.ordered[node.id] = now
        avoid = self.state.faults.excluded(now)
        self.state.send(
            LaunchNode(node.id, node.node_rank, avoid, node.memory_factor, node.cpu_factor)
        )

    def refuse(self, node: Node, now: float) -> bool:
        """Dismiss a newcomer from an excluded host if the job can do without it; return whether it did so."""
        state = self.state
        refusal = state.faults.refusal(node.hostname, now)
        newcomer = node.status is NodeStatus.PENDING and not node.launched
        if not refusal or not newcomer or state.has_ended() or not self.is_enough(without=node):
            return False
        node.reason = refusal.rstrip(".")
        self.bury(node)
        state.send(inputs.Say(node.id, given_up(node)))
        return True

    # ---- losses

    def bury(self, node: Node) -> None:
        """Record that a node is lost."""
        state = self.state
        state.spares.failures += node.status is not NodeStatus.PENDING
        state.move(node, NodeStatus.LOST)
        self._forget_spare(node)
        state.emit(events.NodeLost(node.id, node.reason, self.role(node.id)))
        if node.handle:
            state.send(inputs.KillNode(node.id))

    def replace(self, node: Node, now: float) -> None:
        """Let a spare take the place of a lost node that the platform had launched, or launch another node."""
        wanted = node.launched and self.state.scaling.wants(node.node_rank)
        if self._keeps_rank(node) or not wanted or self.take_spare(node, now):
            return
        if self._can_start(node, now):
            self.launch(node.node_rank, now, replaces=node)

    def _can_start(self, node: Node, now: float) -> bool:
        """Return whether another node may start in place of one; without it the job may end."""
        state, spare = self.state, self.state.is_spare(node)
        if node.refused:
            if state.is_instance(node) or not (spare or self.is_enough()):
                state.end(ExitCode.USAGE, f"node {node.id} cannot be made: {node.reason}.", now)
            failed = True
        else:
            failed = self._failed_too_often(node)
        if failed and spare:  # the job does without it, and tries again later
            state.spares.retry_at = now + state.job.limits.restart_window
            self.failed_starts.pop(node.node_rank, None)
        elif failed and not (node.refused or (node.excluded and self.is_enough())):
            attempts = self.failed_starts[node.node_rank]
            state.end(
                ExitCode.USAGE if node.exit_code in _USAGE else ExitCode.INFRASTRUCTURE,
                f"node {node.id} could not be started in {attempts} attempts: {node.reason}.",
                now,
            )
        return not failed

    def _failed_too_often(self, node: Node) -> bool:
        """Count a node that ended before it was part of a world; return whether it was one too many."""
        if node.has_run or node.removed:
            return False
        attempts = self.failed_starts.get(node.node_rank, 0) + 1
        self.failed_starts[node.node_rank] = attempts
        return attempts >= self.state.job.limits.node_start_attempts

    # ---- spares

    def spare_for(self, lost: Node, now: float, *, on_its_host: bool = True) -> int:
        """Return the spare that takes the place of a node of the world if it is lost; -1 if there is none.

        Without ``on_its_host``, the spare must run on another host.
        """
        state = self.state
        if state.is_outside(lost) or is_server(lost.node_rank):
            return -1
        if not lost.launched:
            return min(state.spares.standing - {lost.id}, default=-1)
        avoid = set(state.faults.excluded(now))
        if not (on_its_host or state.job.one_host):
            avoid.add(lost.hostname)
        best = state.spares.best(state.nodes, lost, state.checks.passed, avoid)
        return -1 if best is None else best.id

    def take_spare(self, lost: Node, now: float) -> bool:
        """Let a spare take the place of a lost node, and launch another spare; return False if there is none."""
        state, found = self.state, self.spare_for(lost, now)
        if found < 0 or found in state.spares.standing or state.has_ended():
            return False
        spare = state.nodes[found]
        offer = state.spares.take(spare.id)
        spare.node_rank, freed = lost.node_rank, spare.node_rank
        state.checks.recheck(spare.id)
        state.rendezvous.join(spare.id, offer, now)
        state.emit(events.SpareTakesPlace(spare.id, lost.id))
        if state.scaling.wants(freed):
            self.launch(freed, now)
        return True

    def fill_places(self) -> set[int]:
        """Give free places to spares that the platform runs, the oldest first; return these places.

        A master without a journal knows the nodes from their platform, which knows as what each was launched:
        if a place is free, a spare has taken it.
        """
        state, nodes = self.state, self.state.nodes.values()
        taken = {node.node_rank for node in nodes}
        free = [rank for rank in range(state.scaling.wanted) if rank not in taken]
        spares = sorted((n for n in nodes if state.is_spare(n)), key=lambda node: node.id)
        filled = list(zip(spares, free, strict=False))
        for node, rank in filled:
            node.node_rank = rank
        return {rank for _, rank in filled}

    def keep_places(self, members: Collection[int]) -> None:
        """Let spares that are members of a running world have the places of nodes outside it, which are spares then.

        A master that has lost that a spare took a place has started another node for it.
        """
        state, nodes = self.state, self.state.nodes
        outside = [
            node
            for node in self.staying()
            if not (node.id in members or state.is_outside(node) or is_server(node.node_rank))
        ]
        spares = [nodes[i] for i in members if state.is_spare(nodes[i])]
        for spare, other in zip(spares, outside, strict=False):
            spare.node_rank, other.node_rank = other.node_rank, spare.node_rank
            offer = state.rendezvous.offers.get(other.id)
            if offer is not None:
                state.rendezvous.withdraw(other.id)
                self.stand_by(other, offer)

    def stand_by(self, node: Node, offer: Offer) -> None:
        """Keep the offer of a launched spare until it takes a place."""
        if self.state.spares.stand_by(node.id, offer):
            self.state.emit(events.SpareReady(node.id))
        self.state.send(inputs.Say(node.id, StandBy()))

    def decide_spares(self, now: float) -> None:
        """Choose the number of spares anew where that is automatic."""
        state, scaling = self.state, self.state.scaling
        decided = state.spares.decide(scaling.spares, scaling.wanted, now)
        if decided is not None:
            state.emit(decided)
            scaling.spares, scaling.due = decided.spares, True

    def _forget_spare(self, node: Node) -> None:
        self.state.spares.drop(node.id)
        self.state.spares.ordered.pop(node.id, None)

    def give_up(self, node: Node, reason: str, now: float) -> None:
        """Continue without a node that is still there; replace it if the platform had launched it."""
        state = self.state
        state.faults.forget(node.id)
        if node.status.final or state.leaves(node.id):
            return
        node.reason = reason
        state.lost_at.pop(node.id, None)
        state.rendezvous.drop(node.id)
        if node.connected and not node.launched:
            state.send(inputs.Say(node.id, given_up(node)))
        node.connected = False
        self.bury(node)
        self.replace(node, now)

    def exclude(self, node: Node, reason: str, now: float) -> None:
        """Keep a node's host out of the job for some time."""
        state = self.state
        if node.hostname and not state.job.one_host:
            seconds = state.job.limits.exclusion_cooldown
            state.faults.exclude(node.hostname, reason, now)
            state.emit(events.HostExcluded(node.hostname, seconds, reason))

    # ---- nodes that leave because the job needs fewer

    def drain(self, node: Node, now: float) -> None:
        """Ask a node to leave; release it at once if its agent never came or has ended."""
        if node.status is NodeStatus.PENDING or node.gone:
            self.release(node, "it had not started" if not node.gone else "its workers had ended")
            return
        state = self.state
        until = now + state.job.shutdown_timeout + state.job.limits.release_grace
        state.scaling.leaving[node.id] = until
        state.spares.drop(node.id)
        if not state.is_outside(node):
            state.rendezvous.let_go(node.id)
        if node.connected:
            state.send(inputs.Say(node.id, self.farewell(node)))
        else:
            state.lost_at[node.id] = until
        state.send(*state.checks.lose(node.id, now))

    def release(self, node: Node, how: str) -> None:
        """Complete the release of a node that the job does not need."""
        state = self.state
        state.scaling.leaving.pop(node.id, None)
        state.lost_at.pop(node.id, None)
        state.rendezvous.drop(node.id)
        self.failed_starts.pop(node.node_rank, None)
        state.faults.forget(node.id)
        node.connected = False
        node.reason = how
        self._keeps_rank(node)
        self._forget_spare(node)
        state.move(node, NodeStatus.RELEASED)
        state.emit(events.NodeReleased(node.id, how, self.role(node.id)))
        if node.handle:
            state.send(inputs.KillNode(node.id))

    def _keeps_rank(self, node: Node) -> bool:
        """Drop the lost node's migration; return True if its counterpart keeps the rank."""
        migration = self.migrations.pop(node.id, None)
        if migration is not None:
            other = self.state.nodes[migration.node]
            stays = not (other.status.final or other.id in self.state.scaling.leaving)
            if stays:
                self.state.emit(events.MigrationEnded(other.id, node.id, node.reason))
            return stays
        for successor in [i for i, m in self.migrations.items() if m.node == node.id]:
            del self.migrations[successor]
            return True
        return False

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        state, nodes, scaling = self.state, self.state.nodes, self.state.scaling
        assert self.next_id > max(nodes, default=-1), "an id would be given twice"
        assert all(node_id in nodes for node_id in self.by_uid.values())
        for node_id in scaling.leaving:
            assert nodes[node_id].launched, "a node is drained that came by itself"
            status = nodes[node_id].status
            assert status not in (NodeStatus.PENDING, NodeStatus.LOST), "nothing is to leave"
        ranks = [node.node_rank for node in self.staying() if node.id not in self.migrations]
        settled = not (state.has_ended() or scaling.due)
        assert not settled or len(ranks) == len(set(ranks)), "two nodes are to have the same rank"
        assert not settled or all(scaling.wants(rank) for rank in ranks), "a node too many"
        leave = [migration.node for migration in self.migrations.values()]
        assert len(leave) == len(set(leave)), "two nodes are to take the same place"
        assert not self.migrations.keys() & set(leave), "a node comes and goes"
        for successor, migration in self.migrations.items() if not state.has_ended() else ():
            pair = nodes[successor], nodes[migration.node]
            assert not any(node.status.final for node in pair), "a migration without a node"
            assert pair[0].node_rank == pair[1].node_rank, "another place is taken"
