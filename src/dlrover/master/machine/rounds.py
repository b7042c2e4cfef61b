"""The rounds of a job: how one opens, completes or is adopted, and the world that it forms."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from dlrover.master.machine import inputs
from dlrover.master.machine.fleet import Fleet
from dlrover.master.machine.recovery.incident import Incident
from dlrover.master.machine.state import JobState, Node
from dlrover.rpc.messages import AssignWorld, CallToRound, StandBy
from dlrover.spec import events
from dlrover.spec.node import NodeStatus, Size
from dlrover.spec.world import Holding, Offer, World

_BUSY = (NodeStatus.RUNNING, NodeStatus.SUCCEEDED)


@dataclass
class Rounds:
    """The last completed round and what follows it. Change it only through its methods."""

    state: JobState = field(compare=False, repr=False)
    fleet: Fleet = field(compare=False, repr=False)
    #: world sent to each member of the last completed round
    worlds: dict[int, World] = field(default_factory=dict)
    #: when that world was formed
    since: float = 0.0
    #: a node, and the round in which its workers start from processes that have loaded nothing
    fresh: tuple[int, int] | None = None
    #: when the running world is interrupted to include newcomers
    grow_at: float | None = None

    # ---- queries

    @property
    def world_size(self) -> int:
        """Number of processes of the last completed round, servers included; 0 before the first."""
        return next(iter(self.worlds.values())).world_size if self.worlds else 0

    @property
    def workers(self) -> int:
        """Number of processes of the last completed round without servers; 0 before the first."""
        return next(iter(self.worlds.values())).workers if self.worlds else 0

    def training(self) -> list[int]:
        """Return the nodes of the running world whose workers train."""
        rdzv, running = self.state.rendezvous, NodeStatus.RUNNING
        return [
            i
            for i in rdzv.members
            if i not in rdzv.servers and self.state.nodes[i].status is running
        ]

    @property
    def can_grow(self) -> bool:
        """True if a new round would form a larger world than the running one."""
        rdzv = self.state.rendezvous
        if self.state.adoption.pending or self.is_about_to_end or self.fitting():
            return False
        running, joined = rdzv.size, rdzv.joined
        larger = Size(running.workers + joined.workers, running.servers + joined.servers)
        return rdzv.usable(larger).nodes > running.nodes

    def fitting(self) -> dict[int, Offer]:
        """Return the offers of the nodes that can take lost ones' places, once they have passed their checks."""
        membership, offers = self.state.membership, self.state.rendezvous.offers
        if not membership.holes:
            return {}
        return {i: o for i, o in offers.items() if membership.vacancy(o.nproc) is not None}

    @property
    def is_about_to_end(self) -> bool:
        """True if some workers of the running world have finished."""
        state = self.state
        return not state.rendezvous.collecting and state.succeeded > 0 and any(self._finished())

    @property
    def has_succeeded(self) -> bool:
        """True if all workers of the running world have finished."""
        state, rdzv = self.state, self.state.rendezvous
        least = len(rdzv.members) - len(rdzv.servers) - len(state.membership.holes)
        ends = not rdzv.collecting and bool(rdzv.members) and state.succeeded >= least
        return ends and all(self._finished())

    def _finished(self) -> Iterator[bool]:
        """Yield for each worker node of the world that is there whether it has finished; servers never end alone."""
        rdzv, holes = self.state.rendezvous, self.state.membership.holes
        for node_id in rdzv.members:
            if node_id not in rdzv.servers and node_id not in holes:
                yield self.state.nodes[node_id].status is NodeStatus.SUCCEEDED

    # ---- changes

    def open_first(self, now: float) -> None:
        """Collect the nodes that come by themselves, or those that the platform starts."""
        launched = [node.id for node in self._members() if node.launched]
        self._collect(launched, "the job starts", fixed=bool(launched), now=now)

    def open(self, reason: str, now: float) -> None:
        """Call every living node to a new round."""
        self.grow_at = None
        state, fleet = self.state, self.fleet
        state.membership.end()
        for node in fleet.surplus():
            fleet.drain(node, now)
        for node in [n for n in self._members() if n.gone]:
            fleet.bury(node)
            fleet.replace(node, now)
        if any(state.nodes[i].status.final for i in state.rendezvous.members):
            for node_id in state.spares.standing:
                state.checks.recheck(node_id)
        living = self._members()
        awaited = [n.id for n in living if n.status is not NodeStatus.PENDING]
        self._collect(awaited, reason, fixed=True, now=now)
        self.call_all(reason)

    def call_all(self, reason: str) -> None:
        """Call the nodes at work to the next round; if others leave, also those that have stopped their workers."""
        called = (*_BUSY, NodeStatus.READY) if self._stores else _BUSY
        for node in self._members():
            if node.status in called and node.id not in self.state.rendezvous.leaving:
                self.call(node, reason)

    @property
    def _stores(self) -> bool:
        """True if a member leaves on purpose: the others store what they have in memory with it."""
        return bool(self.state.rendezvous.leaving)

    def goes_on_without(self, node: Node) -> bool:
        """Return whether the running world has formed without a node."""
        return not self.state.rendezvous.collecting and node.id not in self.worlds

    def _members(self) -> list[Node]:
        """Return the living nodes that a world may have as members."""
        state = self.state
        return [
            node
            for node in state.nodes.values()
            if not (node.status.final or state.is_outside(node))
        ]

    def _collect(self, awaited: list[int], reason: str, *, fixed: bool, now: float) -> None:
        rdzv = self.state.rendezvous
        collected = rdzv.round if rdzv.collecting else 0
        rdzv.open(awaited, fixed=fixed, now=now)
        if self.fresh is not None and self.fresh[1] == collected:
            self.fresh = self.fresh[0], rdzv.round
        count = len(rdzv.missing) + len(rdzv.offers)
        self.state.emit(events.RoundOpened(rdzv.round, reason, count))

    def call(self, node: Node, reason: str) -> None:
        """Call a connected node to the next round; if another one leaves, it stores what it has in memory."""
        state = self.state
        if node.connected:
            order = CallToRound(state.rendezvous.next_round, reason, self._stores)
            state.send(inputs.Say(node.id, order))

    def _call_others(self, reason: str) -> None:
        """Call the nodes whose workers belong to no round of this master."""
        for node_id, held in self.state.adoption.held.items():
            if held.world is not None and node_id not in self.worlds:
                self.call(self.state.nodes[node_id], reason)

    def settle(self, now: float) -> Collection[inputs.Input] | None:
        """Adopt the round that the nodes report, or open a new one, once it is time.

        Return the reports about an adopted round that were held back until then; None if none is adopted.
        """
        state, rdzv, adoption = self.state, self.state.rendezvous, self.state.adoption
        if not adoption.due(now, rdzv.usable(rdzv.most).nodes):
            return None
        adoption.over = True
        held_back, adoption.reports = adoption.reports, {}
        members = adoption.members()
        # A world that is now too large is adopted; its surplus nodes then leave it in order.
        size = rdzv.count(members)
        surplus = state.scaling.due and rdzv.exceeds(size)
        if members and (surplus or rdzv.usable(size) == size):
            self._adopt(members, now)
            return held_back.values()
        if adoption.highest:
            rdzv.round = adoption.highest
            state.restarts.count = adoption.restart_count
            state.incident = Incident(adoption.began_at, rdzv.round, decided=True)
            self.open(f"the master has lost its journal, and {adoption.summary()}", now)
            self._call_others("a new round is open")
        else:
            self.open_first(now)
        return None

    def _adopt(self, members: dict[int, Holding], now: float) -> None:
        """Continue a running round."""
        state = self.state
        self.worlds = {i: held.world for i, held in members.items() if held.world is not None}
        some_world = next(iter(self.worlds.values()))
        state.rendezvous.adopt(some_world.round, tuple(self.worlds))
        for held in state.adoption.held.values():
            state.rendezvous.hear(0, held.round)
        state.membership.adopt(self.worlds, members)
        self.fleet.keep_places(members)
        state.restarts.count = some_world.restart_count
        state.autoscaling.batch = some_world.global_batch
        self.since = now
        servers = state.rendezvous.servers
        state.progress.steps = max(h.steps for i, h in members.items() if i not in servers)
        for node_id, held in members.items():
            node = state.nodes[node_id]
            node.has_run = True
            state.move(node, NodeStatus.RUNNING)
            if held.succeeded:
                state.move(node, NodeStatus.SUCCEEDED)
        state.emit(events.MasterAdopted(some_world.round, len(members)))
        self._call_others("the world went on without this node")
        if self.can_grow:
            self.grow_at = now + state.job.limits.scale_up_delay

    def complete(self, now: float) -> None:
        """Form the world of the round that has enough nodes."""
        state, rdzv = self.state, self.state.rendezvous
        for node_id in rdzv.missing:  # late; they are called to the next round when they join
            if state.nodes[node_id].status in _BUSY:
                state.move(state.nodes[node_id], NodeStatus.READY)
        ranks = {i: state.nodes[i].node_rank for i in rdzv.offers}
        before = set(rdzv.members)
        self.worlds = rdzv.complete(ranks, state.restarts.count, state.autoscaling.batch)
        state.membership.form(self.worlds)
        state.autoscaling.world_formed()
        state.adoption.over = True
        state.progress.next_round()
        self.since = now
        for node_id in self.worlds:
            node = state.nodes[node_id]
            state.move(node, NodeStatus.RUNNING)
            node.has_run = True
            self.fleet.failed_starts.pop(node.node_rank, None)
            self.assign(node_id)
        some_world = next(iter(self.worlds.values()))
        state.emit(
            events.RoundCompleted(
                rdzv.round,
                some_world.node_count,
                some_world.world_size,
                now - rdzv.opened_at,
                some_world.servers,
            )
        )
        self._note_spares(before)
        self.stand_by()

    def grow_soon(self, now: float) -> None:
        """Have the running world include the nodes that have joined, a little later, as more may come."""
        offers, collecting = self.state.rendezvous.offers, self.state.rendezvous.collecting
        if offers and not collecting and self.grow_at is None and self.can_grow:
            self.grow_at = now + self.state.job.limits.scale_up_delay

    def fill_holes(self) -> list[int]:
        """Let nodes that have joined, and passed their checks, take the places of lost ones; return their ids."""
        state, rdzv, membership = self.state, self.state.rendezvous, self.state.membership
        filled = []
        for node_id, offer in sorted(self.fitting().items()):
            lost = membership.vacancy(offer.nproc)
            if lost is None or state.checks.due((node_id,)):
                continue
            world = membership.replace(lost, node_id)
            rdzv.substitute(lost, node_id)
            if node_id in state.spares.standing:
                state.spares.standing.discard(node_id)
                state.emit(events.SpareTakesPlace(node_id, lost))
            worlds = {**self.worlds, node_id: world}
            self.worlds = {member: worlds[member] for member in rdzv.members}
            state.move(state.nodes[node_id], NodeStatus.RUNNING)
            state.nodes[node_id].has_run = True
            self.assign(node_id)
            filled.append(node_id)
        if filled:
            state.checks.cancel()  # workers start where the check was; the other spares' begins anew
        return filled

    def assign(self, node_id: int) -> None:
        """Send a member its world."""
        world = self.worlds[node_id]
        fresh = self.fresh == (node_id, world.round)
        place = self.state.nodes[node_id].node_rank
        self.state.send(inputs.Say(node_id, AssignWorld(world, fresh, place)))

    # ---- nodes that come by themselves beyond the maximum

    def stand_by(self) -> None:
        """Tell the nodes that came by themselves and find a full world that they are spares."""
        state, rdzv, standing = self.state, self.state.rendezvous, self.state.spares.standing
        if rdzv.collecting or not rdzv.offers or rdzv.size != rdzv.usable(rdzv.most):
            return
        for node_id in rdzv.offers.keys() - standing:
            if not state.nodes[node_id].launched:
                standing.add(node_id)
                state.emit(events.SpareReady(node_id))
                state.send(inputs.Say(node_id, StandBy()))

    def _note_spares(self, before: set[int]) -> None:
        """Record which spares have become members; ``before`` are the members of the world before."""
        spares, members = self.state.spares, self.state.rendezvous.members
        if not spares.standing:
            return
        lost = sorted(before.difference(members), reverse=True)
        for node_id in members:
            if node_id in spares.standing:
                spares.standing.discard(node_id)
                self.state.emit(events.SpareTakesPlace(node_id, lost.pop() if lost else -1))

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        state, nodes, rdzv = self.state, self.state.nodes, self.state.rendezvous
        assert tuple(self.worlds) == rdzv.members, "the members have another world"
        for node in nodes.values():
            inside = node.id in self.worlds or state.is_instance(node)
            assert node.status not in _BUSY or inside, "workers outside the world"
        for node_id in rdzv.offers:
            assert nodes[node_id].status is NodeStatus.READY, "an offer from a busy or lost node"
            assert state.has_ended() or nodes[node_id].connected, (
                "an offer from a disconnected node"
            )
        assert not any(nodes[i].status.final for i in rdzv.missing), "a lost node is awaited"
        if not (state.has_ended() or rdzv.collecting):
            there = [i for i in rdzv.members if i not in state.membership.holes]
            assert all(nodes[i].status in _BUSY for i in there), "a hole in the world"
