"""DiLoCo and Streaming DiLoCo, with everything that EDiT shares: schedule, syncs, members that come and go."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dlrover import launched
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.optim.dense import WrappedOptimizer
from dlrover.optim.local.exchange import CodedSum, Residuals, Sum, SyncPeers
from dlrover.optim.local.fragments import Fragment, Outer, divided
from dlrover.optim.machine.penalty import Penalty, PenaltyDecision, ReplicaReport, Statistics, judge
from dlrover.optim.tensors import like, local, parameters, saved_states

logger = logging.getLogger(__name__)

PREFIX = "local_sgd."
"""Begins the keys that the wrapper adds to the state of each parameter."""


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer: SGD with the rate 0.7 and Nesterov momentum of 0.9."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class Schedule(Protocol):
    """When the next sync of a fragment starts, and when it ends."""

    def begin(self) -> None:
        """Note that training begins, before each step."""

    def starts(self, since: int) -> bool:
        """Return whether a sync starts after a step, ``since`` steps after the last one."""

    def ends(self, since: int) -> bool:
        """Return whether the sync that has started ends after this step."""

    def synced(self) -> None:
        """Note that a sync has ended."""


class EverySteps:
    """Syncs every ``stride`` steps, whose exchange begins ``delay`` steps before."""

    def __init__(self, stride: int, delay: int) -> None:
        self._stride, self._delay = stride, delay

    def begin(self) -> None:
        """Do nothing: the steps are counted by the wrapper."""

    def starts(self, since: int) -> bool:
        """Return whether it is time to begin the exchange."""
        return since >= self._stride - self._delay

    def ends(self, since: int) -> bool:
        """Return whether it is time to use its result."""
        return since >= self._stride

    def synced(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A sync between its two halves."""

    fragment: Fragment
    decision: PenaltyDecision
    rank: int
    """This replica's position in the decision."""
    sum: Sum | CodedSum | None
    """None if no replica counts."""
    steps: int
    """Steps of all replicas since the last sync."""


class DiLoCo(WrappedOptimizer):
    """A wrapper of any optimizer: replicas make many steps of their own between two syncs (arXiv:2311.08105).

    At a sync, the replicas average the changes that they made to the parameters since the last one, and the outer
    optimizer applies the mean to the parameters of that sync. All replicas continue from the result::

        optimizer = DiLoCo(torch.optim.AdamW(model.parameters(), lr=4e-4), interval=500)
        for batch in loader:
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    A replica is one rank, or several ranks with FSDP2, tensor parallelism or DDP *within* the replica. Each of its
    ranks synchronizes with the ranks at the same position in the other replicas.

    Replicas come and go at a sync: ``group`` is called before each one. A replica that is behind the others, as a new
    one is, gets their shared parameters and their outer optimizer's state, and counts from the next sync on; it calls
    `sync` once before its first step. A replica whose change is not finite is left out of the mean.

    If a sync fails, because a replica is lost, the parameters are those before it, and the next step tries again.

    With ``fragments``, one of them is synchronized every ``interval / fragments`` steps, in turn; with ``delay``, its
    result is awaited, and applied that number of steps after the exchange began (Streaming DiLoCo, arXiv:2501.18512).

    Args:
        base: the inner optimizer, with its parameters.
        group: process group of the ranks that synchronize, one of each replica, or a function that returns the group
            of the next sync (None: this replica is alone). By default all ranks.
        interval: steps between two syncs of a fragment.
        outer: function that makes an outer optimizer from a list of parameters; it must work element by element.
        fragments: into how many parts the parameters are divided.
        delay: steps from the begin of an exchange to the use of its result.
        alpha: part of a replica's own change that it keeps at a sync.
        bits: 32, or 8 for exchanges of a quarter of the bytes. What coding cuts off is added at the next sync.
        warmup: first steps, in which the replicas average gradients, as with DDP.
        penalty: how replicas are weighted and left out; by default all that are finite count the same.
        clip: maximum norm of the mean change of a fragment.
        replica_group: process group of the ranks of this replica, if it is several; by default that of the mesh over
            which the parameters are spread.
        outer_device: device of the shared parameters and the outer optimizer, such as ``"cpu"``; by default that of
            the parameters.

    Raises:
        ConfigurationError: an argument is out of its range or conflicts with another.
    """

    def __init__(  # noqa: PLR0913 - options, by name
        self,
        base: torch.optim.Optimizer,
        group: Any = None,
        *,
        interval: int = 100,
        outer: Outer = nesterov,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        bits: int = 32,
        warmup: int = 0,
        penalty: Penalty | None = None,
        clip: float | None = None,
        replica_group: Any = None,
        outer_device: Any = None,
    ) -> None:
        if launched.survival is not None:
            raise ConfigurationError(
                f"--survive: {type(self).__name__} cannot survive the loss of a rank; start the program without --survive."
            )
        super().__init__(base)
        if self.computes_parameters:
            raise ConfigurationError(
                f"{type(self).__name__} got {type(base).__name__}, whose next step undoes a sync, because it computes the"
                " parameters from its states; it accepts optimizers that change the parameters by a step."
            )
        trained = [each for each in parameters(self.param_groups) if each.requires_grad]
        if any(each.is_complex() for each in trained):
            raise ConfigurationError(
                f"{type(self).__name__} got a complex parameter; it accepts real ones."
            )
        self._trained = frozenset(trained)
        self._parts = divided(trained, fragments)
        _check_schedule(interval, fragments, delay)
        if not 0 <= alpha <= 1:
            raise ConfigurationError(f"alpha is {alpha}; it must be from 0 to 1.")
        if bits not in (8, 32):
            raise ConfigurationError(f"bits is {bits}; accepted are 8 and 32.")
        if warmup < 0:
            raise ConfigurationError(f"warmup is {warmup}; it must be 0 or more.")
        if clip is not None and not clip > 0:
            raise ConfigurationError(f"clip is {clip}; it must be more than 0, or None.")
        self._group, self._device = group, local(trained[0]).device
        self._schedule: Schedule = EverySteps(interval // fragments, delay)
        self._alpha, self._bits, self._warmup, self._clip, self._penalty = (
            alpha, bits, warmup, clip, penalty,
        )  # fmt: skip
        self._outer, self._outer_device = outer, outer_device
        self._replica = _replica_group(trained) if replica_group is None else replica_group
        self._replica_size = 1 if self._replica is None else dist.get_world_size(self._replica)
        self._fragments: list[Fragment] = []
        """Empty until the first step of its own: a program may load parameters before."""
        self._pending: Pending | None = None
        self._steps = self._since = 0
        self.syncs = 0
        """Syncs so far, each of one fragment; the same in all replicas."""
        self.total_steps = 0
        """Steps of all replicas together up to the last sync; the same in all replicas."""
        self.latest: PenaltyDecision | None = None
        """What the replicas counted at the last sync."""

    _step_supports_amp_scaling = True
    """A ``GradScaler`` calls `step` also if gradients have overflown: replicas must make equally many steps."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the inner optimizer, and synchronize if it is time; the replica's ranks call it together.

        Args:
            closure: function that computes the gradients again and returns the loss.

        Returns:
            What ``closure`` returned.

        Raises:
            ConfigurationError: a parameter is trained that was not when the wrapper was made.
            InfrastructureError: the sync failed.
        """
        for each in parameters(self.param_groups):
            if each.requires_grad and each not in self._trained:
                name = type(self).__name__
                raise ConfigurationError(
                    f"{name} got a parameter of shape {tuple(each.shape)} that was frozen, or not in a group, when"
                    f" {name} was made, and replicas would not synchronize it; make {name} again."
                )
        finite = self._unscaled()
        if self._steps < self._warmup:
            return self._warm_step(closure, finite=finite)
        self._begin()
        loss = self.base.step(closure) if finite else None
        self._steps += 1
        self._since += 1
        if self._pending is None and self._schedule.starts(self._since):
            self._start()
        if self._pending is not None and self._schedule.ends(self._since):
            self._finish()
        return loss

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def sync(self) -> None:
        """Synchronize the next fragment now, as a new replica does before its first step; all replicas together.

        Raises:
            InfrastructureError: the sync failed.
        """
        self._begin()
        if self._pending is None:
            self._start()
        self._finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state; each parameter's has the wrapper's too, spread like the parameter."""
        found = self.base.state_dict()
        numbers = {each: number for number, each in enumerate(parameters(self.param_groups))}
        state = {number: dict(entries) for number, entries in found["state"].items()}
        # Before the first step of its own, too: a checkpoint is loaded by the keys that the new optimizer's state has.
        for fragment in self._fragments or self._new_fragments():
            progress = torch.tensor(
                [self._steps, self._since, self.syncs, self.total_steps, *astuple(fragment.statistics)],
                dtype=torch.float64,
            )  # fmt: skip
            for parameter, shared in zip(fragment.parameters, fragment.shared, strict=True):
                entries = state.setdefault(numbers[parameter], {})
                entries[f"{PREFIX}shared"] = like(parameter, shared.detach())
                entries[f"{PREFIX}progress"] = progress
                for key, value in fragment.outer_state(shared):
                    whole = like(parameter, value) if value.shape == shared.shape else value
                    entries[f"{PREFIX}outer.{key}"] = whole
        return {**found, "state": state}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or one of the inner optimizer: then the next sync begins from the parameters."""
        own: dict[torch.Tensor, dict[str, Any]] = {}
        inner: dict[int, dict[str, Any]] = {}
        for number, entries in state_dict["state"].items():
            kept = {key: each for key, each in entries.items() if not key.startswith(PREFIX)}
            if kept:
                inner[number] = kept
        for parameter, entries in saved_states(self.param_groups, state_dict):
            found = {key: each for key, each in entries.items() if key.startswith(PREFIX)}
            if found:
                own[parameter] = found
        super().load_state_dict({**state_dict, "state": inner})
        self._pending, self._fragments = None, []
        self._steps = self._since = self.syncs = self.total_steps = 0
        if own:
            self._begin()
            for fragment in self._fragments:
                self._restore(fragment, own)
            if not (self._since or self.syncs):
                self._fragments = []

    def _restore(self, fragment: Fragment, own: dict[torch.Tensor, dict[str, Any]]) -> None:
        for parameter, shared in zip(fragment.parameters, fragment.shared, strict=True):
            state = dict(fragment.outer_state(shared))
            targets = {"shared": shared, **{f"outer.{key}": value for key, value in state.items()}}
            entries = own.get(parameter, {})
            for key in (*targets, "progress"):
                if f"{PREFIX}{key}" not in entries:
                    raise ConfigurationError(
                        f"The state dict has no {PREFIX}{key} for a parameter of shape {tuple(parameter.shape)}; it"
                        " must be of the same parameters and the same kind of outer optimizer."
                    )
            for key, value in targets.items():
                value.copy_(local(entries[f"{PREFIX}{key}"]))
            *counts, a, b, c, d = entries[f"{PREFIX}progress"].tolist()
            self._steps, self._since, self.syncs, self.total_steps = map(int, counts)
            fragment.statistics = Statistics.of((a, b, c, d))

    # ---- a sync

    def _begin(self) -> None:
        """Note the parameters that the replicas have in common, unless they are known."""
        self._fragments = self._fragments or self._new_fragments()
        self._schedule.begin()

    def _new_fragments(self) -> list[Fragment]:
        return [Fragment(part, self._outer, self._outer_device) for part in self._parts]

    def _start(self) -> None:
        """Decide what each replica counts, and begin to add up their changes."""
        with self._explained():
            peers = self._peers()
            fragment = self._fragments[self.syncs % len(self._fragments)]
            change = fragment.difference()
            squares, check = self._over_replica(
                fragment.squares(change, self._replica_size), fragment.check_sum()
            )
            rows = peers.gather([math.sqrt(squares), self._since, self.syncs, check])
            source = max(range(peers.size), key=lambda rank: rows[rank][2])
            joins = [_joins(row, rows[source]) for row in rows]
            if any(row[2:] != rows[source][2:] for row in rows):
                self._spread(peers, source, joins=joins[peers.rank])
                if joins[peers.rank]:
                    fragment = self._fragments[self.syncs % len(self._fragments)]
                    change = fragment.difference()
            reports = [
                None if joining else ReplicaReport(row[0], max(int(row[1]), 1))
                for row, joining in zip(rows, joins, strict=True)
            ]
            decision = judge(reports, fragment.statistics, self._penalty)
            if peers.rank == 0:
                self._log(decision)
            under_way = None
            if any(decision.weights):
                weight = decision.weights[peers.rank]
                change = change.mul_(weight) if weight else torch.zeros_like(change)
                coded = self._bits == 8
                under_way = (
                    peers.sum_coded(change, fragment.residuals) if coded else peers.sum(change)
                )
            steps = sum(0 if report is None else report.steps for report in reports)
            self._pending = Pending(fragment, decision, peers.rank, under_way, steps)

    def _finish(self) -> None:
        """Await the mean change and continue from what the outer optimizer makes of it."""
        pending, self._pending = self._pending, None
        assert pending is not None
        fragment = pending.fragment
        mean = None
        with self._explained():
            if pending.sum is not None:
                mean = pending.sum.result()
                if self._clip is not None:
                    (squares,) = self._over_replica(fragment.squares(mean, self._replica_size))
                    mean.mul_(min(1.0, self._clip / (math.sqrt(squares) + 1e-6)))
            counted = pending.decision.weights[pending.rank] > 0
            broken = [] if counted else self._broken_states(fragment)
        if mean is not None:
            fragment.step(mean)
        fragment.take(self._alpha if counted else 0.0)
        for parameter in broken:  # begins anew: else it would spoil the next steps too
            del self.state[parameter]
        fragment.statistics = pending.decision.statistics
        self.latest = pending.decision
        self.total_steps += pending.steps
        self.syncs += 1
        self._since = 0
        self._schedule.synced()

    def _spread(self, peers: SyncPeers, source: int, *, joins: bool) -> None:
        """Overwrite what the replicas should have in common by what one of them has."""
        if peers.rank == source:
            logger.warning("Sync %d: replica %d gives its state to others.", self.syncs, source)
        statistics = [value for each in self._fragments for value in astuple(each.statistics)]
        counts = torch.tensor([self.syncs, self.total_steps, *statistics], dtype=torch.float64)
        tensors = [each for fragment in self._fragments for each in fragment.tensors()]
        peers.spread([*tensors, counts], source)
        if not joins:
            return
        syncs, total_steps, *statistics = counts.tolist()
        self.syncs, self.total_steps = int(syncs), int(total_steps)
        self._steps = max(self._steps, self._warmup)
        for index, fragment in enumerate(self._fragments):
            fragment.statistics = Statistics.of(statistics[4 * index : 4 * index + 4])
            fragment.residuals = Residuals()
            fragment.take(0.0)

    def _broken_states(self, fragment: Fragment) -> list[torch.Tensor]:
        """Return the parameters whose inner state is not finite on a rank of this replica."""
        counts = []
        for parameter in fragment.parameters:
            state = self.state.get(parameter, {}).values()
            values = [local(each) for each in state if isinstance(each, torch.Tensor)]
            numbers = [each for each in values if each.is_floating_point()]
            counts.append(float(not all(each.isfinite().all() for each in numbers)))
        sums = self._over_replica(*counts)
        return [each for each, count in zip(fragment.parameters, sums, strict=True) if count]

    def _unscaled(self) -> bool:
        """Undo the scale of a ``GradScaler``, if one calls `step`; return whether no gradient has overflown."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            for each in parameters(self.param_groups):
                if each.grad is not None:
                    local(each.grad).div_(scale.to(local(each.grad).device))
        return not getattr(self, "found_inf", False)

    def _warm_step(self, closure: Callable[[], Any] | None, *, finite: bool) -> Any:
        """Step with the mean gradient of all replicas."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._explained():
            peers = self._peers()
            trained = [each for part in self._parts for each in part]
            own = [float(each.grad is not None) for each in trained] + [float(not finite)]
            *used, overflown = peers.sum(torch.tensor(own, device=self._device)).result().tolist()
            # A replica whose batch does not use a parameter counts with a gradient of zero, as with DDP.
            for parameter, replicas in zip(trained, used, strict=True):
                if replicas:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    peers.sum(local(parameter.grad).div_(peers.size)).result()
        if not overflown:
            self.base.step()
        self._steps += 1
        return loss

    # ---- groups

    def _peers(self) -> SyncPeers:
        group = self._group() if callable(self._group) else self._group
        if group is None and self._group is None and dist.is_initialized():
            group = dist.group.WORLD
        return SyncPeers(group, self._device)

    def _over_replica(self, *numbers: float) -> list[float]:
        """Return the sums over this replica's ranks."""
        if self._replica_size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(sums, group=self._replica)
        return [float(each) for each in sums]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise InfrastructureError(
                f"Sync {self.syncs} failed, and the parameters are those before it: {error}"
            ) from error

    def _log(self, decision: PenaltyDecision) -> None:
        for rank, reason in enumerate(decision.reasons):
            if reason:
                logger.warning("Sync %d: replica %d is left out: %s.", self.syncs, rank, reason)


def _joins(row: list[float], latest: list[float]) -> bool:
    """Return whether a replica is behind the latest one, or began with other parameters; rows as in `_start`.

    Replicas of different machines may come to differ in the last digits: that alone does not make one join.
    """
    return row[2] != latest[2] or (latest[2] == 0 and row[3] != latest[3])


def _check_schedule(interval: int, fragments: int, delay: int) -> None:
    if interval < 1 or interval % fragments:
        raise ConfigurationError(
            f"interval is {interval}; it must be a multiple of fragments, {fragments}."
        )
    if not 0 <= delay < interval // fragments:
        raise ConfigurationError(
            f"delay is {delay}; it must be from 0 to below interval / fragments, {interval // fragments}."
        )


def _replica_group(trained: list[torch.Tensor]) -> Any:
    """Return the process group of the mesh over which parameters are spread; None if none is."""
    meshes = {each.device_mesh for each in trained if hasattr(each, "device_mesh")}
    if not meshes:
        return None
    mesh = meshes.pop()
    if meshes or mesh.ndim > 1:
        raise ConfigurationError(
            "replica_group is None, and the parameters are spread over a mesh of several dimensions; it must be"
            " the process group of all ranks of this replica."
        )
    return mesh.get_group()
