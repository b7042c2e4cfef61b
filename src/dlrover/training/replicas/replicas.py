"""`Replicas`: a training loop of one's own that goes on when a replica is lost.

The global batch is divided into numbered micro-batches, each computed by one replica. When a replica is lost, the
others compute what it had not delivered, in the same step: the sum over all micro-batches stays what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dlrover import launched
from dlrover.checkpoint.engine.tree import parameters_of
from dlrover.errors import ConfigurationError, UserCodeError
from dlrover.training.replicas.beside import Unsaved
from dlrover.training.replicas.healing import Healer
from dlrover.training.replicas.link import open_link
from dlrover.training.replicas.survivors import Regrouping, Survivors

BUCKET_BYTES = 32 * 1024 * 1024
"""Bytes of gradients that are added up in one collective."""


class Replicas:
    """Replicas of a model, one per rank; a lost one stops no other, and joins again from another's memory.

    Each replica repeats no completed step, and loses none::

        replicas = Replicas(model, optimizer, global_batch_size=64, micro_batch_size=8)
        for step in replicas.steps(1000):
            for samples in step:
                step.backward(loss_of(model(data[samples])))
            optimizer.step()

    The inner loop gives this replica's micro-batches, as ranges of sample numbers counted from the training's
    start, and further ones if a replica is lost. After it, each parameter's ``grad`` is that of the global batch's mean
    loss. PyTorch's random generators are seeded for each micro-batch, so that it does not matter which replica
    computes it.

    Args:
        model: The module; each replica has all of it. Replicas begin with the parameters of the lowest rank.
        optimizer: Its optimizer.
        others: Further objects with ``state_dict`` and ``load_state_dict`` that change with each step, such as a
            learning rate scheduler.
        global_batch_size: Samples of a step, over all replicas.
        micro_batch_size: Most samples of a pass through the model.
        seed: Seed of the random generators.

    Raises:
        ConfigurationError: A size is not positive, the optimizer has parameters that the model has not, or the launcher
            does not keep replicas (``--survive``).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *others: Any,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int = 0,
    ) -> None:
        for name, size in (("global", global_batch_size), ("micro", micro_batch_size)):
            if size < 1:
                raise ConfigurationError(
                    f"{name}_batch_size is {size}; it must be an integer of at least 1."
                )
        learned = {id(parameter) for parameter in model.parameters()}
        steppers = [one for one in (optimizer, *others) if isinstance(one, torch.optim.Optimizer)]
        if not all(id(p) in learned for one in steppers for p in parameters_of(one)):
            raise ConfigurationError(
                "Replicas: an optimizer has parameters that the model has not, whose gradients would not be added up; let the"
                " model have all of them, for example in a torch.nn.ModuleList."
            )
        given = launched.given
        self._model, self.optimizer = model, optimizer
        self._size, self._seed = global_batch_size, seed
        bounds = range(0, global_batch_size, micro_batch_size)
        self._micro_batches = [
            range(at, min(at + micro_batch_size, global_batch_size)) for at in bounds
        ]
        parts = {"model": model, "optimizer": optimizer, "numbers": _Numbers(self), "modes": _Modes(model)}  # fmt: skip
        parts |= {f"other {i}": part for i, part in enumerate(others)}
        modules = [model, *(one for one in others if isinstance(one, torch.nn.Module))]
        parts["unsaved"] = Unsaved(lambda: modules)
        self.number = 0
        """Number of the present step."""
        self._healer = Healer(parts)
        self._survivors = Survivors(
            open_link(), given.round, given.rank, given.attempt, self._healer
        )
        self._assigned: list[int] | None = None
        self._finished = False

    @property
    def rank(self) -> int:
        """This replica's rank; another process may have had it before."""
        return self._survivors.rank

    @property
    def ranks(self) -> list[int]:
        """The ranks that train."""
        return list(self._survivors.ranks)

    def steps(self, count: int, first: int = 0) -> Iterator[Step]:
        """Yield the steps ``first`` to ``count - 1``; a replica that joins begins with the step of the others.

        One that comes when the others have finished ends; rank 0, which may store what they trained, starts all again.

        Raises:
            UserCodeError: The training is finished: an earlier call has yielded its last step.
        """
        if self._finished:
            raise UserCodeError(
                "steps was called again, but the training ended with its first loop."
            )
        self.number = first
        survivors = self._survivors
        survivors.position = first
        regrouped = survivors.join(self._nothing())
        if regrouped is None:
            survivors.leave()
        self._take(regrouped)
        try:
            while self.number < count:
                survivors.position = self.number
                self._take_in()
                step = Step(self, self.number)
                yield step
                if not step.complete:
                    raise UserCodeError(
                        f"Step {self.number} was left before its micro-batches were done."
                    )
                self.number += 1
        finally:  # also after a break
            self._finished = True
            if launched.leaves():  # with an exit code of 0, too
                survivors.close()
            else:
                survivors.finish()

    # ---- for steps

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def _nothing(self) -> torch.Tensor:
        return torch.zeros(len(self._micro_batches), dtype=torch.uint8)

    def _take_in(self) -> None:
        regrouped = self._survivors.edge(self._nothing())
        if regrouped is not None:
            self._take(regrouped)

    def _take(self, regrouped: Regrouping) -> None:
        """Deal the micro-batches that no rank has done to all ranks."""
        done = torch.stack(list(regrouped.payloads.values())).sum(0)
        missing = [i for i, times in enumerate(done.tolist()) if not times]
        self._assigned = deal(missing, regrouped.ranks, self.rank)

    def _own(self) -> list[int]:
        """Return the numbers of this rank's micro-batches in a step that begins."""
        assigned, self._assigned = self._assigned, None
        if assigned is None:
            every = range(len(self._micro_batches))
            return deal(every, self._survivors.ranks, self.rank)
        return assigned

    def _sum(self, step: Step, done: torch.Tensor) -> Regrouping | None:
        """Add up the gradients and the loss of all ranks; they are in place unless the step is to go on."""
        gradients = [_gradient(p) for p in self._parameters]
        buckets = _buckets(gradients)
        flats = [torch.cat([g.reshape(-1) for g in bucket]).cpu() for bucket in buckets]
        loss = step.part.to("cpu", torch.float64).reshape(1).clone()
        originals = [*flats, loss]
        regrouped = self._survivors.run(lambda group: group.sum(originals), done)
        if regrouped is None or regrouped.complete:
            for flat, bucket in zip(flats, buckets, strict=True):
                for gradient, total in zip(
                    bucket, flat.split([g.numel() for g in bucket]), strict=True
                ):
                    gradient.copy_(total.view_as(gradient))
            step.loss = float(loss)
        return regrouped


class Step:
    """One step: iterate over its micro-batches, then step the optimizer."""

    def __init__(self, replicas: Replicas, number: int) -> None:
        self.number = number
        """Number of the step, from 0."""
        self.loss = 0.0
        """Mean loss of the global batch, after the last micro-batch."""
        self.complete = False
        self.part = torch.zeros(())
        """This replica's part of the loss."""
        self._replicas = replicas
        self._weight = 0.0

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's mean loss, with its part of the global batch as weight."""
        if not self._weight:
            raise UserCodeError(
                "backward was called twice for a micro-batch, or outside of the loop."
            )
        weighted = loss * self._weight
        self._weight = 0.0
        self.part = self.part.to(loss.device) + weighted.detach()
        weighted.backward()

    def __iter__(self) -> Iterator[range]:
        """Yield this replica's micro-batches as ranges of sample numbers, more of them if a replica is lost."""
        replicas = self._replicas
        replicas._model.zero_grad()  # noqa: SLF001 - also what another optimizer steps
        done, todo = replicas._nothing(), replicas._own()  # noqa: SLF001 - one thing in two classes
        while not self.complete:
            for index in todo:
                yield self._begin(index)
                if self._weight:
                    raise UserCodeError(
                        f"Step {self.number}: backward was not called for a micro-batch."
                    )
                done[index] = 1
            regrouped = replicas._sum(self, done)  # noqa: SLF001
            self.complete = regrouped is None or regrouped.complete
            if regrouped is not None:
                replicas._take(regrouped)  # noqa: SLF001
            if not self.complete:
                todo = replicas._own()  # noqa: SLF001

    def _begin(self, index: int) -> range:
        replicas = self._replicas
        positions = replicas._micro_batches[index]  # noqa: SLF001
        self._weight = len(positions) / replicas._size  # noqa: SLF001
        torch.manual_seed(hash((replicas._seed, self.number, index)) & 0x7FFF_FFFF_FFFF_FFFF)  # noqa: SLF001
        first = self.number * replicas._size  # noqa: SLF001
        return range(first + positions.start, first + positions.stop)


class _Numbers:
    """The numbers of a replica's steps, as part of its state."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def state_dict(self) -> dict[str, int]:
        return {"number": self._replicas.number, "steps": launched.steps_made()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._replicas.number = state["number"]
        launched.rejoined(state["steps"])


class _Modes:
    """Which modules of a model are in training mode, and which parameters learn, as part of a replica's state.

    A program may change them at a step that a rank that joins does not make.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, list[bool]]:
        return {
            "trains": [module.training for module in self._model.modules()],
            "learns": [parameter.requires_grad for parameter in self._model.parameters()],
        }

    def load_state_dict(self, state: dict[str, list[bool]]) -> None:
        for module, trains in zip(self._model.modules(), state["trains"], strict=True):
            module.training = trains
        for parameter, learns in zip(self._model.parameters(), state["learns"], strict=True):
            parameter.requires_grad_(learns)


def deal(numbers: Sequence[int], ranks: Sequence[int], rank: int) -> list[int]:
    """Return the part of ``numbers`` for one of the ranks; all parts together are ``numbers``."""
    return list(numbers[ranks.index(rank) :: len(ranks)])


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Divide gradients into lists of one type each, of about `BUCKET_BYTES`."""
    buckets: list[list[torch.Tensor]] = []
    open_: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for gradient in gradients:
        bucket, size = open_.get(gradient.dtype, ([], BUCKET_BYTES))
        if size >= BUCKET_BYTES:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(gradient)
        open_[gradient.dtype] = bucket, size + gradient.nbytes
    return buckets
