"""A training step over one global batch, on any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dlrover import launched
from dlrover.errors import ConfigurationError
from dlrover.training import batch
from dlrover.training.balancing import Balancer
from dlrover.training.memory import MicroBatchTuner
from dlrover.training.noise import NoiseMeter
from dlrover.training.sampler import ElasticDistributedSampler, MicroBatches
from dlrover.training.worker import tracker

Samples = TypeVar("Samples", bound=Sequence[Any])


class ElasticTrainer:
    """A trainer that keeps the global batch fixed on any number of ranks, or uses the size the Brain chooses.

    Each rank computes its part of the global batch in micro-batches and adds up their gradients; after the
    last one, the ranks average them. Every sample weighs the same, so the gradient is that of the global
    batch's mean loss, and the learning rate stays unchanged::

        sampler = ElasticDistributedSampler(dataset)
        trainer = ElasticTrainer(model, optimizer, sampler, global_batch_size=96, micro_batch_size=8)
        for batch in DataLoader(dataset, batch_sampler=trainer.batches):
            trainer.backward(loss_of(model(batch)))
            trainer.step()

    Args:
        model: module that averages gradients over the ranks: ``DistributedDataParallel`` or either kind of
            FSDP. A single rank may use any module.
        optimizer: the model's optimizer.
        sampler: sampler of the training data; its ranks share the global batch. Without one, the program
            loads its own data and divides it by `split`.
        global_batch_size: samples per optimizer step, over all ranks.
        micro_batch_size: maximum samples per pass of a rank; by default its whole part.
        scaler: the ``GradScaler``, if any.
        learning_rate_rule: rule by which the optimizer's learning rates follow ``global_batch_size``:
            ``linear``, ``sqrt`` or ``none`` (`batch.learning_rate_factor`). The factor is applied once, here.
        reference_batch_size: global batch for which the learning rates were chosen.
        max_global_batch_size: if given, the Brain may choose a larger global batch for later rounds, up to
            this size, from the measured gradient noise. The optimizer then steps with learning rates that
            follow ``learning_rate_rule``; between steps they are those of ``global_batch_size``. Needs
            ``micro_batch_size``, and ``DistributedDataParallel`` or a single rank.
        auto_tuning: True to enlarge the micro-batches until they fill the device memory (`MicroBatchTuner`);
            by default as set by ``dlrover-run``. The global batch stays the same.
        balance: True to give slower ranks smaller shares of the global batch (`Balancer`). Only for
            ``DistributedDataParallel``.

    Raises:
        ConfigurationError: an argument is invalid, or conflicts with another.
    """

    def __init__(  # noqa: PLR0913 - options, by name
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: ElasticDistributedSampler | None = None,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        scaler: Any = None,
        learning_rate_rule: str = "none",
        reference_batch_size: int | None = None,
        auto_tuning: bool | None = None,
        balance: bool = False,
        max_global_batch_size: int | None = None,
    ) -> None:
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._group = getattr(model, "process_group", None)
        joined = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank(self._group) if joined else 0
        self._replicas = dist.get_world_size(self._group) if joined else 1
        if sampler is not None:
            self._check_sampler(sampler)
        batch.check(global_batch_size, micro_batch_size, self._replicas)
        batch.check_choice(
            global_batch_size, max_global_batch_size, micro_batch_size, learning_rate_rule
        )
        self._limits = global_batch_size, max_global_batch_size or global_batch_size
        self._factor = 1.0
        """Factor of the learning rates during a step, relative to those of the smallest global batch."""
        self._noise: NoiseMeter | None = None
        self._sizes = global_batch_size, micro_batch_size
        self._scale_learning_rates(learning_rate_rule, reference_batch_size)
        if max_global_batch_size is not None:
            self._take_chosen_batch(learning_rate_rule)
        self._tell_batches()
        self._batches: MicroBatches | None = None
        if sampler is not None:
            self._batches = MicroBatches(sampler, *self._sizes)
            self._batches.on_begin = self._begin
            self._check_data(self._batches.sampler)
        self._check_model()
        self._accumulating = contextlib.ExitStack()
        self._micro_batches: list[batch.MicroBatch] = []
        """This rank's micro-batches of the current global batch."""
        self._size = self._done = 0
        """Samples of the current global batch over all ranks, and micro-batches done by this rank."""
        self._summed: Any = 0.0
        self._loss: torch.Tensor | None = None
        """Weighted loss of this rank's part of the last complete global batch."""
        self._tuner: MicroBatchTuner | None = None
        if launched.given.auto_tuning if auto_tuning is None else auto_tuning:
            largest = -(-self._sizes[0] // max(self._replicas, 2 if max_global_batch_size else 1))
            self._tuner = MicroBatchTuner(self._sizes[1] or largest, largest, self._group)
        self._shares: tuple[int, ...] | None = None
        self._balancer: Balancer | None = None
        if balance and joined and self._replicas > 1:
            self._balancer = Balancer(model, optimizer, self._group, self._sizes[0])

    # ---- data

    @property
    def batches(self) -> MicroBatches:
        """The ``batch_sampler`` for the data loader.

        Raises:
            ConfigurationError: the trainer has no sampler.
        """
        if self._batches is None:
            raise ConfigurationError("The trainer has no sampler; it cannot give batches.")
        return self._batches

    @property
    def global_batch_size(self) -> int:
        """Samples per step of all ranks in this round."""
        return self._sizes[0]

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch of the sampler with this global batch, on any number of ranks."""
        return self.batches.steps

    def split(self, samples: Samples) -> list[Samples]:
        """Return this rank's micro-batches of a global batch that all ranks know.

        For programs that load their own data, without a sampler; call `backward` for each micro-batch.

        Args:
            samples: a sequence or tensor of at most ``global_batch_size`` samples, or of their indices.

        Raises:
            ConfigurationError: the trainer has a sampler, or the number of samples is wrong.
        """
        if self._batches is not None:
            raise ConfigurationError("The trainer has a sampler; its batches are split already.")
        size, (most, micro_batch_size) = len(samples), self._sizes
        if not 1 <= size <= most:
            raise ConfigurationError(
                f"The global batch has {size} samples; it must have from 1 to global_batch_size, {most}."
            )
        self._refuse_part()
        dealt = batch.deal(size, self._replicas, self._rank, micro_batch_size, self._shares)
        self._start(size, dealt)
        return [samples[p.start : p.stop : p.step] for p, _ in self._micro_batches]  # type: ignore[misc]

    # ---- training

    def backward(self, loss: torch.Tensor, *, divisor: float | None = None) -> None:
        """Add the gradient of one micro-batch's loss to the global batch's; call it once per micro-batch.

        Args:
            loss: the mean over the micro-batch's samples, as loss functions compute by default.
            divisor: if given, ``loss`` is a sum, and the sum over the global batch is divided by this number,
                such as the batch's tokens.

        Raises:
            ConfigurationError: the global batch is complete, or the data do not come from ``batches``.
        """
        if self._done == len(self._micro_batches):
            raise ConfigurationError(self._why_nothing_is_due())
        if self._batches is not None:
            self._batches.take()
        weight = self._micro_batches[self._done].weight
        if divisor is not None:
            weight = self._replicas / divisor if weight else 0.0
        if self._done == 0:
            self._optimizer.zero_grad()
        weighted = loss * weight
        if self._noise is not None:
            self._noise.before_pass(self._micro_batches, self._done)
        (self._scaler.scale(weighted) if self._scaler else weighted).backward()
        if self._noise is not None:
            self._noise.after_pass(self._micro_batches, self._done, self._size)
        self._summed = weighted.detach() + (self._summed if self._done else 0.0)
        self._done += 1
        if self.complete:
            self._loss = self._summed
        self._synchronize()

    @property
    def complete(self) -> bool:
        """True if the gradients are those of the whole global batch; clip them then."""
        return 0 < len(self._micro_batches) == self._done

    def step(self) -> bool:
        """Update the parameters if the global batch is complete; return True if it was.

        The sampler then counts its samples as taken: save checkpoints after a step that returned True.
        """
        if not self.complete:
            return False
        with self._learning_rates():
            if self._scaler:
                self._scaler.step(self._optimizer)
            else:
                self._optimizer.step()
        if self._scaler:
            self._scaler.update()
        self._optimizer.zero_grad()
        size = self._size
        self._start(0, [])
        if self._batches is not None:
            self._batches.sampler.record(size)
        self._measure_noise()
        self._tune()
        self._balance()
        if self._batches is not None:
            self._prepare()
        return True

    def loss(self) -> float:
        """Return the mean loss of the last global batch; collective.

        Raises:
            ConfigurationError: no global batch is complete yet.
        """
        if self._loss is None:
            raise ConfigurationError("There is no loss yet: it is that of the last global batch.")
        mean = self._loss.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(mean, group=self._group)
            mean /= dist.get_world_size(self._group)
        return float(mean)

    # ---- within a step

    @contextlib.contextmanager
    def _learning_rates(self) -> Iterator[None]:
        """Step with the chosen batch's learning rates; schedules and checkpoints see the smallest batch's."""
        groups = self._optimizer.param_groups if self._factor != 1.0 else []
        kept = [group["lr"] for group in groups]
        try:
            for group in groups:
                group["lr"] = group["lr"] * self._factor
            yield
        finally:
            for group, rate in zip(groups, kept, strict=True):
                group["lr"] = rate

    def _measure_noise(self) -> None:
        """Report the gradient noise after a step, if a measurement is due."""
        found = self._noise.step() if self._noise is not None else None
        if found is not None:
            tracker.measured_noise(*found)

    def _tell_batches(self) -> None:
        """Report the global batch, and the sizes that may be chosen."""
        (size, micro_batch_size), (least, most) = self._sizes, self._limits
        tracker.keeps_batch(size)
        tracker.allows_batches(least, most, micro_batch_size or size)

    def _tune(self) -> None:
        """Perhaps resize the micro-batches after a step, from the first position requested by no rank."""
        if self._tuner is None:
            return
        change = self._tuner.step(*self._positions())
        if change is None:
            return
        if self._batches is not None:
            self._batches.resize(*change)
        self._sizes = self._sizes[0], change[0]
        self._tell_batches()

    def _balance(self) -> None:
        """Perhaps change the shares after a step, from the first position requested by no rank."""
        if self._balancer is None:
            return
        change = self._balancer.step(*self._positions())
        if change is None:
            return
        if self._batches is not None:
            self._batches.share(*change)
        self._shares = change[0]

    def _positions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return epoch and position up to which all ranks have trained, and this rank's loader has asked."""
        batches = self._batches
        if batches is None:
            return (0, 0), (0, 0)
        taken_to = batches.sampler.epoch, batches.sampler.consumed
        return taken_to, max(taken_to, batches.handed_out_to)

    def _begin(self) -> None:
        """Begin a pass over the data."""
        self._refuse_part()
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the sampler's next global batch."""
        batches = self.batches
        size = batches.size_at(batches.sampler.consumed)
        self._start(size, batches.deal(size, batches.sampler.consumed) if size else [])

    def _start(self, size: int, micro_batches: list[batch.MicroBatch]) -> None:
        self._size, self._micro_batches, self._done = size, micro_batches, 0
        self._synchronize()

    def _synchronize(self) -> None:
        """Make the ranks average their gradients only in the last backward pass of a global batch."""
        wanted = self._done + 1 >= len(self._micro_batches)
        if hasattr(self._model, "set_requires_gradient_sync"):
            self._model.set_requires_gradient_sync(wanted)
        elif hasattr(self._model, "no_sync"):
            self._accumulating.close()
            if not wanted:
                self._accumulating.enter_context(self._model.no_sync())

    def _take_chosen_batch(self, rule: str) -> None:
        """Use the global batch chosen for this round, and measure the noise for the next choice."""
        (least, most), (_, micro_batch_size) = self._limits, self._sizes
        chosen = min(max(launched.given.global_batch, least), most)
        self._factor = batch.learning_rate_factor(rule, chosen, least)
        self._noise = NoiseMeter(self._model, self._group, self._replicas, self._scaler)
        assert micro_batch_size is not None
        if self._replicas == 1:  # force a second pass, to measure the noise
            micro_batch_size = max(1, min(micro_batch_size, chosen // 2))
        self._sizes = chosen, micro_batch_size

    def _scale_learning_rates(self, rule: str, reference: int | None) -> None:
        factor = batch.learning_rate_factor(rule, self._sizes[0], reference)
        for group in self._optimizer.param_groups:
            for key in ("lr", "initial_lr"):
                if key in group:
                    group[key] *= factor

    # ---- argument checks

    def _check_sampler(self, sampler: ElasticDistributedSampler) -> None:
        if not isinstance(sampler, ElasticDistributedSampler):
            raise ConfigurationError(
                f"sampler is a {type(sampler).__name__}; it must be an ElasticDistributedSampler."
            )
        if self._group is not None and sampler.num_replicas != self._replicas:
            raise ConfigurationError(
                f"sampler deals to {sampler.num_replicas} ranks, but the model averages the gradients of"
                f" {self._replicas}."
            )
        self._rank, self._replicas = sampler.rank, sampler.num_replicas

    def _check_data(self, sampler: ElasticDistributedSampler) -> None:
        most = self._limits[1]
        if not sampler.samples or (sampler.drop_last and sampler.samples < most):
            name = "global_batch_size" if most == self._limits[0] else "max_global_batch_size"
            raise ConfigurationError(
                f"The data set has {sampler.samples} samples, too few for one step with"
                f" {name} {most} and drop_last {sampler.drop_last}."
            )

    def _check_model(self) -> None:
        averages = hasattr(self._model, "no_sync") or hasattr(
            self._model, "set_requires_gradient_sync"
        )
        if self._replicas > 1 and not averages:
            raise ConfigurationError(
                f"model is a {type(self._model).__name__}, which does not average gradients over"
                f" {self._replicas} ranks: wrap it in DistributedDataParallel."
            )

    def _refuse_part(self) -> None:
        if self._done > 0:
            raise ConfigurationError(
                f"{self._done} of the {len(self._micro_batches)} micro-batches of a global batch were trained"
                " on, and not yet their step; begin with other data only after step() has returned True."
            )

    def _why_nothing_is_due(self) -> str:
        if self._micro_batches:
            return "The global batch is complete: call step() after backward(), and backward() once per micro-batch."
        if self._batches is None:
            return "No global batch was begun: call split() before backward()."
        return "No global batch was begun: train on a loop over DataLoader(..., batch_sampler=trainer.batches)."
