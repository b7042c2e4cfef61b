"""Programs that use `DistributedDataParallel` or FSDP2's HSDP as they are: what they see of a loss is a slow step.

Each synchronizing backward pass of a model is one *reduction*; other collectives are counted within it. A rank that is started
again runs the program from its beginning, without computing: each model returns what it returned once, the optimizer
does nothing, collectives have no effect. So it comes to the place of the others within moments, with its loaders,
schedulers and counters where they would be; there it takes their state, and trains.
"""

from __future__ import annotations

import logging
import math
import mmap
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dlrover import config, launched
from dlrover.checkpoint.engine.tree import parameters_of
from dlrover.checkpoint.storage.lease import job_of
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.spec.requests.membership import DivideMembers, LookMembers, MembersNow
from dlrover.training.machine.places import EXCLUDED_LIMIT
from dlrover.training.replicas.beside import Beside, Gradients, Schedules, Unsaved
from dlrover.training.replicas.groups import Changed, MembershipGroup, Peers
from dlrover.training.replicas.healing import Healer
from dlrover.training.replicas.link import Link
from dlrover.training.replicas.outputs import Outputs
from dlrover.training.replicas.rows import Row
from dlrover.training.replicas.sent import Sent
from dlrover.training.replicas.survivors import Survivors
from dlrover.training.worker.counted import CountedOptimizer

logger = logging.getLogger(__name__)

REDUCTION = 1 << 32
"""Positions between two reductions."""
BEGUN = 1 << 31
"""Added to the position once the step of the next reduction has begun: a rank joins at this place of its program only."""
SHORTER = 0.75
"""Greatest ratio of the steps that a rank lacks to those that it lacked before, at which it goes on without letting the others wait."""
MOST_SKIPPED = 100
"""Steps in a row at whose beginnings no rank can join, after which the program is taken to have no other ones."""


class Unchanged:
    """One rank of an unchanged program."""

    joined: Callable[[], None] = staticmethod(lambda: None)
    """Called when this rank has come to the others."""

    def __init__(
        self,
        link: Link,
        given: launched.Given,
        loaded: Mapping[str, float],
        norms: Sequence[Callable[[], Any]] = (),
        schedules: Sequence[Callable[[], Any]] = (),
    ) -> None:
        """``loaded`` are the files that the program has loaded, with the times at which they were written.

        ``norms`` return the program's normalization layers, or None for those that it has dropped; ``schedules`` those of
        learning rates.
        """
        self._in_replay = mmap.mmap(
            -1, 1
        )  # processes that the program forks in the replay see its end, too
        self.replaying = given.attempt > 0
        self.steps = 0
        """Steps of the program's optimizer that counts in this round, made or skipped."""
        self._optimizer = CountedOptimizer()
        self._stepping: Any = None
        """The optimizer within whose step this rank is: it may call that of its base class."""
        self._link, self._given = link, given
        self._round = zlib.crc32(f"{job_of(config.environ())} {given.round}".encode()) or 1
        self._loaded = loaded
        self._files: dict[str, float] = {}
        self._began = torch.zeros(3, dtype=torch.float64, device="cpu")
        """When the ranks made their first step, in seconds since the epoch, the number of the save that they began with, 0
        for none, and 1 if an optimizer has called its closure several times in a step; they send it to each other with each regrouping."""
        self._continues = 0
        """Number of the save that a returning rank began with; the others have begun before, if its place is known."""
        self._placed = False
        self._continued: tuple[int, ...] | None = None
        """The place at which all Checkpointers of a returning rank continue; zeros: it is not known."""
        self._last: tuple[int, list[int]] = (-1, [])
        """Number and ranks of the membership that has carried out the last collective. Of a loss since, some ranks may
        know and others not."""
        self._parts: dict[str, Any] = {
            "numbers": _StepCount(self),
            "schedules": Schedules(schedules),
            "unsaved": Unsaved(self._models),
        }
        self._parts["gradients"] = Gradients(self._trained)
        self._parts["beside"] = Beside(self._trained, norms, self._held)
        self._held_by_rows: Callable[[], set[int]] = set
        self._healer, self._sent = Healer(self._parts), Sent(link, given)
        self._survivors = Survivors(link, given.round, given.rank, given.attempt, self._healer)
        self.row: Row | None = None
        """The ranks that have a replica together with this one; None: it has one alone."""
        self.saving = False
        """True while all ranks save a checkpoint together, which lacks something if one of them is lost."""
        self._reductions = self._others = self._skipped = 0
        self._fresh = self._first = True
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models, or what stands for them, with a pass whose backward pass is yet to come."""
        self._returned: list[Any] = []
        """Models that the present backward pass has come to, while this rank replays."""
        self._asked = self._local = self._midway = False
        self._aim, self._left = 0, math.inf
        self.outputs = Outputs()

    @property
    def replaying(self) -> bool:
        """True while this rank runs the program without its model."""
        return bool(self._in_replay[0])

    @replaying.setter
    def replaying(self, value: bool) -> None:
        self._in_replay[0] = value

    @property
    def saves(self) -> bool:
        """True if a checkpoint may be saved here: this rank trains, and rank 0, which writes what all have, does."""
        return not self.replaying and 0 in self._survivors.ranks

    @property
    def whole(self) -> bool:
        """True if all ranks have carried out the last collective."""
        return not self.replaying and len(self._last[1]) == self._given.world_size

    @property
    def number(self) -> int:
        """Number of the membership that has carried out the last collective."""
        return self._last[0]

    @property
    def lacking(self) -> bool:
        """True if a rank was lost with which this one has trained last."""
        return self._survivors.lacking or self._survivors.number != self._last[0]

    def place(self) -> tuple[int, int, int]:
        """Return where a rank goes on that loads what is saved now; nowhere within a step."""
        edge = self._fresh and not self._open and not self.replaying
        return (self._round, self._reductions, self.steps) if edge else (0, 0, 0)

    def continued(self, save: int, place: tuple[int, int, int]) -> None:
        """Take note of the save that the program continues from; a returning rank goes on at its place."""
        if not self.replaying:
            self._began[1] = save if self._first else self._began[1]
            return
        if not self._first:
            raise InfrastructureError(
                "--survive: the program loads a checkpoint after its first step, so a rank cannot reach the others'"
                " place; all ranks start again."
            )
        self._continues, self._placed = save, place[0] == self._round
        where = place if self._placed else (0, 0, 0)
        if self._continued not in (None, where):
            raise InfrastructureError(
                "--survive: the program continues from checkpoints in several directories that were not saved at the same"
                " place, so a rank cannot reach the others' place; all ranks start again."
            )
        self._continued = where
        if self._placed:
            _, self._reductions, self.steps = place
            self._others = 0

    # ---- life

    def begin(self) -> None:
        """Begin to train, unless this rank replays first, or trains: the program makes its process group anew."""
        if not self.replaying and self._survivors.number < 0:
            self._survivors.join(self._began)
            self._last = self._survivors.number, self._survivors.ranks

    def finish(self) -> None:
        """Report the end of the program; a rank that still replays waits for that of the others."""
        if not self.replaying:
            self._survivors.finish()
            return
        if (self._asked or self.steps < self._aim) and not self._link.over:
            raise InfrastructureError(
                "--survive: the program ended before it reached the place of the ranks that train; all ranks"
                " start again."
            )
        while not self._link.over:
            self._link.wait(lambda members: members.over, EXCLUDED_LIMIT)
        self._survivors.leave()

    def owns(self, name: str, part: Any) -> None:
        """Take a model or an optimizer into the state of replicas."""
        self._parts[f"{name} {len(self._parts)}"] = part

    def divide(self, size: int) -> None:
        """Begin to train as one of a row of ``size`` ranks.

        Raises:
            ConfigurationError: The program's ranks are in rows of another size.
        """
        if self.row is None:
            given = self._given
            self._link.ask(DivideMembers(given.round, given.rank, given.attempt, size))
            self.row = Row(self._link, given, size, self._look, self._leave)
            self._survivors.position = self._position
            self._survivors.divide(self.row, self._began)
        if self.row.size != size:
            raise ConfigurationError(
                f"--survive: the program has device meshes with replicas of {self.row.size} and of {size} ranks; it can"
                " have one kind only."
            )

    def _look(self) -> None:
        """Give up while this rank waits for others of its row, if other rows wait for it or have finished."""
        self._leave()
        try:
            self._survivors.check()
        except Changed:
            raise InfrastructureError(
                "--survive: a rank was lost while the program made its device mesh; all ranks start again."
            ) from None

    def _leave(self) -> None:
        if self.replaying and self._link.over:
            self._survivors.leave()

    def _trained(self) -> list[torch.Tensor]:
        """Return the parameters of all optimizers."""
        optimizers = [part for name, part in self._parts.items() if name.startswith("optimizer")]
        return [parameter for one in optimizers for parameter in parameters_of(one)]

    def _models(self) -> list[torch.nn.Module]:
        return [part for part in self._parts.values() if isinstance(part, torch.nn.Module)]

    def _held(self) -> set[int]:
        """Return the ids of the tensors of all models and averages."""
        tensors = (t for model in self._models() for t in (*model.parameters(), *model.buffers()))
        return {*map(id, tensors)} | self._held_by_rows()

    def spread_over(self, mesh: Any, held: Callable[[], set[int]]) -> None:
        """Note the device mesh that parts of the state belong to, and what returns the ids of the models' tensors."""
        self._healer.mesh, self._held_by_rows = mesh, held

    def begins_at(self, step: int) -> None:
        """Count reductions from a step of the training, so that a rank that returns may begin with a newer checkpoint."""
        if step and not self._reductions:
            self._reductions, self._others = step, 0
            self._midway = True

    # ---- collectives

    def collective(
        self,
        operation: Callable[[Peers], list[torch.Tensor]],
        alone: list[torch.Tensor],
        *,
        whole: bool = True,
    ) -> list[torch.Tensor]:
        """Return the results of a collective, or of a rank ``alone`` while this one replays.

        It is one of all ranks, or of those with the same place in their rows.
        """
        if self._local:
            return alone
        results = alone if self.replaying else self._carry_out(operation, whole=whole)
        self._others += 1
        return results

    def objects(
        self, operation: Callable[[Peers], list[torch.Tensor]], *, whole: bool = True
    ) -> list[torch.Tensor]:
        """Return the results of a collective for objects; none while this rank replays, beyond those before the first step."""
        kept = self._first and whole
        if kept and self.replaying and not self._local:
            self._others += 1
            return self._sent.take()
        results = self.collective(operation, [], whole=whole)
        if kept:
            self._sent.add(results, sends=self._sends)
        return results

    @property
    def _sends(self) -> bool:
        """True on the lowest rank that trains, which sends what one that returns needs."""
        return self._survivors.ranks[0] == self._given.rank

    def reduce(self, gradients: list[torch.Tensor], *, whole: bool = True) -> None:
        """Replace gradients by their means over the ranks that train, or those with the same place in their rows."""

        def operation(group: Peers) -> list[torch.Tensor]:
            flat = torch.cat([g.detach().reshape(-1).cpu() for g in gradients])
            group.sum([flat])
            return [flat.div_(len(group.ranks))]

        (flat,) = self._carry_out(operation, whole=whole)
        means = flat.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        self.reduced()

    def reduced(self) -> None:
        """Count a reduction."""
        self._reductions += 1
        self._others = 0

    def _carry_out(
        self, operation: Callable[[Peers], list[torch.Tensor]], *, whole: bool
    ) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []

        def keep(group: MembershipGroup) -> None:
            results[:] = operation(group if whole else group.column)

        self._survivors.position = self._position
        while True:
            group = self._survivors.number, self._survivors.ranks
            regrouped = self._survivors.run(keep, self._began)
            if regrouped is not None and self._sends:
                self._sent.send()
            if regrouped is None or regrouped.complete:
                self._last = group
                return results

    @property
    def _position(self) -> int:
        return self._reductions * REDUCTION + self._others

    # ---- the program

    def forward(self, model: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the output of a model's forward pass; ``torch.compile`` sees only the program's part of it."""
        self._begin_pass(model)
        if not self.replaying:
            return original(model, *args, **kwargs)
        return self._replay_pass(model, args, kwargs)

    @torch._disable_dynamo  # type: ignore[untyped-decorator]  # noqa: SLF001 - torch's own for what is not compiled
    def _begin_pass(self, model: Any) -> None:
        self.passes(model if _learns(model) and model.require_backward_grad_sync else None)
        if not self.replaying:
            self._rebuild(model)

    @torch._disable_dynamo  # type: ignore[untyped-decorator]  # noqa: SLF001 - as above
    def _replay_pass(self, model: Any, args: Any, kwargs: Any) -> Any:
        module = model.module
        plain = [self._stand_in(model)] if _learns(model) else []
        output = self.outputs.remembered(
            module, lambda: module(*args, **kwargs), args, kwargs, plain
        )
        # By it the next pass decides whether it begins with a collective for buffers, as that of the others does.
        model.require_forward_param_sync = (
            torch.is_grad_enabled() and model.require_backward_grad_sync
        )
        return output

    def _stand_in(self, model: Any) -> Any:
        """Return a parameter that gets a gradient when the model's would, in whose backward pass the others reduce.

        As `DistributedDataParallel` does, they reduce in the next backward pass, whichever it is, once a pass has been
        made that is not under ``no_sync``: for example an evaluation that leaves gradients enabled.
        """

        def comes_back(_parameter: torch.Tensor) -> None:
            if model not in self._open or model in self._returned:
                return
            if not self._returned:
                torch.autograd.Variable._execution_engine.queue_callback(self._count)  # noqa: SLF001
            self._returned.append(model)

        parameter = torch.zeros((), requires_grad=True)
        parameter.register_post_accumulate_grad_hook(comes_back)
        return parameter

    def _count(self) -> None:
        """Count the reductions of a backward pass, one of each model."""
        returned, self._returned = self._returned, []
        for _model in returned:
            self.reduced()
        self.came_back(returned)

    def passes(self, graph: Any) -> None:
        """Note that a forward pass begins, the first of a step at an edge.

        ``graph`` stands for the model until `came_back`, at the end of the backward pass; None: there will be none.
        """
        if not torch.is_grad_enabled():
            return
        # What the replay has computed cannot be used after it: a rank does not join between a pass and its backward pass.
        if self._fresh and self._open:
            self._skip_edge(
                "A forward pass has waited for its backward pass",
                "Use torch.no_grad() for passes without a backward pass.",
            )
        elif self._fresh:
            self._skipped = 0
            self._edge()
        self._fresh = False
        if graph is not None:
            self._open.add(graph)

    def _skip_edge(self, what: str, advice: str) -> None:
        """Give up, or warn, once no rank could join for many steps."""
        self._skipped += 1
        if self._skipped % MOST_SKIPPED:
            return
        what = f"{what} in {MOST_SKIPPED} steps, so no lost rank can return"
        if self.replaying and self.steps >= self._furthest()[0]:
            raise InfrastructureError(f"--survive: {what}; all ranks start again. {advice}")
        if not self.replaying and self._skipped == MOST_SKIPPED:
            logger.warning("%s. %s", what, advice)

    def came_back(self, graphs: Sequence[Any]) -> None:
        """Note the end of a backward pass of models."""
        self._open.difference_update(graphs)

    def _rebuild(self, model: Any) -> None:
        """Let a model arrange its buckets, which it does once, without the others: their order does not matter here."""
        if torch.is_grad_enabled():
            self._local = True
            model.reducer._rebuild_buckets()  # noqa: SLF001 - the forward pass would, with a collective
            self._local = False

    def _edge(self) -> None:
        """Take in others that join, or join them, between two steps."""
        if self._first:
            self._first = False
            if not self.replaying:
                self._began[0] = time.time()
            elif not self._midway:
                self._files = dict(self._loaded)
        if not self.replaying:
            # Another place than that of the step before, if this one had no reduction.
            self._others = max(self._others + 1, BEGUN)
            self._survivors.position = self._position
            if self._survivors.edge(self._began) is not None and self._sends:
                self._sent.send()
            self._others += 1  # what follows is within the step, where no rank joins
            return
        if self.row is None:
            self._leave()
        if not self._asked and self.steps >= self._aim:
            furthest, left = self._furthest()
            before = self._left
            self._aim, self._left = furthest, left
            # Ways that hardly become shorter would not end: the others wait while this rank makes the rest of the last one.
            self._asked = self._midway or left <= 0 or left > SHORTER * before
            if self._asked:
                self._ask()
        if self._asked:
            self._arrive()

    def _ask(self) -> None:
        """Let the others wait for this rank, which must have begun as they did."""
        regrouped = self._survivors.join(self._began, later=True)
        if regrouped is None:
            self._survivors.leave()
        times = [one for one in regrouped.payloads.values() if float(one[0])]
        began, first, _ = min(map(torch.Tensor.tolist, times), default=[0.0, 0.0, 0.0])
        if any(float(one[2]) for one in times):
            raise InfrastructureError(
                "--survive: an optimizer of the program calls its closure several times in a step, as LBFGS does, so a rank"
                " cannot reach the others' place; all ranks start again."
            )
        if times and (self._continues != first if not self._placed else self._continues <= first):
            raise InfrastructureError(
                "--survive: this rank began with another checkpoint than the others, and where they were when it was"
                " saved is not known; all ranks start again."
            )
        for path, written in self._files.items():
            if 0 < began < written:
                raise InfrastructureError(
                    f"--survive: this rank began with a newer checkpoint than the others, {path}, so it cannot reach"
                    " their place; all ranks start again."
                )
        self._began[:2] = torch.tensor([began, first], device="cpu")

    def _furthest(self) -> tuple[int, int]:
        """Return how many steps the others have made, as far as a rank of this row knows, and how many a rank of it lacks.

        Leave if they have finished.
        """
        steps = self.steps
        furthest = launched.furthest()
        if self.steps >= furthest:
            reply = self._link.ask(LookMembers(self._given.round))
            known = reply.members if isinstance(reply, MembersNow) else None
            furthest = max(furthest, known.steps if known is not None else 0)
        if self.row is not None:  # its ranks ask at the same place
            furthest, least, over = self.row.most(furthest, -steps, self._link.over)
            steps = -least  # the ranks may have begun with different saves
            if over:
                self._survivors.leave()
        return furthest, furthest - steps

    def _arrive(self) -> None:
        """Take the state of the others at their place in the program."""
        while True:
            reductions, others = divmod(self._survivors.position, REDUCTION)
            if others != BEGUN:
                # Another rank was lost within a step: the others have met at once, and this one has no place there.
                self._survivors.withdraw()
                self._ask()
                continue
            if self._reductions != reductions:
                break
            if self._survivors.settle(self._began):
                self.replaying = False
                self._others = BEGUN + 1
                self.outputs.clear()
                self.joined()
                logger.info("Rank %d trains from step %d", self._given.rank, self.steps)
                return
        if self._reductions > reductions:
            raise InfrastructureError(
                "--survive: the program made more steps from its beginning than the ranks that train, so it cannot"
                " be continued at their place; all ranks start again."
            )

    def take_steps(self, steps: int) -> None:
        """Take the steps of the others, at the same count of reductions.

        They may have made fewer than this rank has skipped: a step whose gradients are not finite is left out.

        Raises:
            InfrastructureError: They have made more, so that this is not their place.
        """
        if self.steps < steps and not self._midway:
            raise InfrastructureError(
                f"--survive: this rank is at step {self.steps} of its program, and the others are at step {steps} after as many"
                " reductions, so it cannot reach their place; all ranks start again."
            )
        self.steps = steps

    def stepped(
        self, step: Callable[..., Any], optimizer: Any, closure: Callable[[], Any] | None
    ) -> Any:
        """Carry out a step of an optimizer, unless this rank replays; the closure may begin with an edge."""
        if self._stepping is optimizer:
            return step(optimizer) if closure is None else step(optimizer, closure)
        result = None
        if self.replaying and callable(closure):
            with torch.enable_grad():
                result = closure()
            closure = lambda: result  # noqa: E731 - if this rank has joined the others within it
        if not self.replaying:
            self._stepping = optimizer
            try:
                result = (
                    step(optimizer) if closure is None else step(optimizer, self._noted(closure))
                )
            finally:
                self._stepping = None
        self.steps += self._optimizer.counts(optimizer)
        if self._fresh:
            self._skip_edge(
                "No model in DistributedDataParallel or fully_shard has made a forward pass",
                "Let one of them have the model, or use dlrover.training.Replicas.",
            )
        self._fresh = True
        return result

    def _noted(self, closure: Any) -> Any:
        """Return a closure that notes if it is called more than once: a replaying rank calls it once."""
        called = False

        def wrapped() -> Any:
            nonlocal called
            self._began[2] = max(float(self._began[2]), float(called))
            called = True
            return closure()

        return wrapped if callable(closure) else closure


def _learns(model: Any) -> bool:
    learned = any(parameter.requires_grad for parameter in model.module.parameters())
    return learned and torch.is_grad_enabled()


class _StepCount:
    """The count of steps, as part of a replica's state."""

    def __init__(self, rank: Unchanged) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, int]:
        return {"steps": launched.steps_made(), "place": self._rank.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._rank.take_steps(state["place"])
        launched.rejoined(state["steps"])
