"""A training step over a global batch of fixed size, on any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dlrover.elastic import batch, defaults, tracker
from dlrover.elastic.balancing import Balancer
from dlrover.elastic.memory import MicroBatchTuner
from dlrover.elastic.noise import NoiseMeter
from dlrover.elastic.sampler import ElasticDistributedSampler, MicroBatches
from dlrover.errors import ConfigurationError

Samples = TypeVar("Samples", bound=Sequence[Any])


class ElasticTrainer:
    """Keeps the global batch what it is, whatever the number of ranks and their memory; or the Brain chooses it.

    Each rank computes its part of the global batch in micro-batches and adds up their gradients; with the
    last one the ranks average them. Every sample weighs the same, so the gradient is that of the mean loss
    of the global batch, and the learning rate stays as it is::

        sampler = ElasticDistributedSampler(dataset)
        trainer = ElasticTrainer(model, optimizer, sampler, global_batch_size=96, micro_batch_size=8)
        for batch in DataLoader(dataset, batch_sampler=trainer.batches):
            trainer.backward(loss_of(model(batch)))
            trainer.step()

    Args:
        model: what averages gradients over the ranks: ``DistributedDataParallel``, FSDP of either kind. One
            rank alone may have any module.
        optimizer: the model's.
        sampler: whose samples are trained on; its ranks are those that share the global batch. Without one
            the program finds its data by itself, and deals them by `split`.
        global_batch_size: samples per optimizer step, all ranks together.
        micro_batch_size: samples that one rank computes at once, at most; by default all of its part.
        scaler: the ``GradScaler``, if there is one.
        learning_rate_rule: how the optimizer's learning rates follow from ``global_batch_size``: ``linear``,
            ``sqrt`` or ``none`` (`batch.learning_rate_factor`). They are multiplied once, here.
        reference_batch_size: the global batch that the learning rates were chosen for.
        max_global_batch_size: given, the Brain may choose a larger global batch, up to this one, for the rounds
            that follow. The noise of the gradients is measured for it. The optimizer then steps with learning
            rates that follow by ``learning_rate_rule``; between steps they are those of ``global_batch_size``.
            Needs ``micro_batch_size``; only for ``DistributedDataParallel``, or one rank alone.
        auto_tuning: whether the micro-batches grow until the memory of the device is used (`MicroBatchTuner`);
            by default as ``dlrover-run`` was told. The global batch stays what it is.
        balance: whether a rank that computes more slowly than the others gets a smaller share of the global
            batch (`Balancer`). Only for ``DistributedDataParallel``.

    Raises:
        ConfigurationError: an argument is wrong, or does not fit the others.
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
        """Of the learning rates of a step, relative to those of the smallest global batch."""
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
        """Of the global batch that is trained on."""
        self._size = self._done = 0
        """Samples in it on all ranks; micro-batches of it that this rank is done with."""
        self._summed: Any = 0.0
        self._loss: torch.Tensor | None = None
        """Of this rank's part, with its weights: so far, and of the last complete global batch."""
        self._tuner: MicroBatchTuner | None = None
        if defaults.auto_tuning if auto_tuning is None else auto_tuning:
            largest = -(-self._sizes[0] // max(self._replicas, 2 if max_global_batch_size else 1))
            self._tuner = MicroBatchTuner(self._sizes[1] or largest, largest, self._group)
        self._shares: tuple[int, ...] | None = None
        self._balancer: Balancer | None = None
        if balance and joined and self._replicas > 1:
            self._balancer = Balancer(model, optimizer, self._group, self._sizes[0])

    # ---- data

    @property
    def batches(self) -> MicroBatches:
        """The ``batch_sampler`` of the data loader.

        Raises:
            ConfigurationError: the trainer has no sampler.
        """
        if self._batches is None:
            raise ConfigurationError("The trainer has no sampler; it cannot give batches.")
        return self._batches

    @property
    def global_batch_size(self) -> int:
        """Samples of a step of all ranks in this round."""
        return self._sizes[0]

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch of the sampler with this global batch, on any number of ranks."""
        return self.batches.steps

    def split(self, samples: Samples) -> list[Samples]:
        """This rank's micro-batches of a global batch that all ranks know.

        For programs that find their data by themselves, which have no sampler; call `backward` for each.

        Args:
            samples: a sequence or tensor of at most ``global_batch_size`` samples, or of their indices.

        Raises:
            ConfigurationError: there is a sampler, or the number of samples is wrong.
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
        """Add the gradient of one micro-batch's loss to that of the global batch; once for each.

        Args:
            loss: the mean over the samples of the micro-batch, as loss functions compute it by default.
            divisor: given, ``loss`` is a sum instead, and this is what the sum over the global batch is
                divided by: its tokens, say.

        Raises:
            ConfigurationError: the global batch is complete, or the data are not those of ``batches``.
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
        """Whether the gradients are those of the whole global batch: the time to clip them."""
        return 0 < len(self._micro_batches) == self._done

    def step(self) -> bool:
        """Update the parameters if the global batch is complete; whether it was.

        The sampler then knows that its samples are taken: save checkpoints after a step that returned True.
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
        """The mean loss of the last global batch; collective.

        Raises:
            ConfigurationError: there was none yet.
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
        """Those of the chosen global batch, during a step: schedules and checkpoints have those of the smallest."""
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
        """After a step: perhaps tell how noisy the gradients are."""
        found = self._noise.step() if self._noise is not None else None
        if found is not None:
            tracker.measured_noise(*found)

    def _tell_batches(self) -> None:
        """Tell what the global batch is, and which others may be chosen."""
        (size, micro_batch_size), (least, most) = self._sizes, self._limits
        tracker.keeps_batch(size)
        tracker.allows_batches(least, most, micro_batch_size or size)

    def _tune(self) -> None:
        """After a step: perhaps another size of micro-batches, from where no rank has asked for any."""
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
        """After a step: perhaps other shares, from where no rank has asked for any."""
        if self._balancer is None:
            return
        change = self._balancer.step(*self._positions())
        if change is None:
            return
        if self._batches is not None:
            self._batches.share(*change)
        self._shares = change[0]

    def _positions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Epoch and position up to which all ranks have trained, and this rank's loader has asked."""
        batches = self._batches
        if batches is None:
            return (0, 0), (0, 0)
        taken_to = batches.sampler.epoch, batches.sampler.consumed
        return taken_to, max(taken_to, batches.handed_out_to)

    def _begin(self) -> None:
        """A pass over the data begins."""
        self._refuse_part()
        self._prepare()

    def _prepare(self) -> None:
        """See what the next global batch of the sampler is."""
        batches = self.batches
        size = batches.size_at(batches.sampler.consumed)
        self._start(size, batches.deal(size, batches.sampler.consumed) if size else [])

    def _start(self, size: int, micro_batches: list[batch.MicroBatch]) -> None:
        self._size, self._micro_batches, self._done = size, micro_batches, 0
        self._synchronize()

    def _synchronize(self) -> None:
        """Let the ranks average their gradients in the next backward pass if it is the last one."""
        wanted = self._done + 1 >= len(self._micro_batches)
        if hasattr(self._model, "set_requires_gradient_sync"):
            self._model.set_requires_gradient_sync(wanted)
        elif hasattr(self._model, "no_sync"):
            self._accumulating.close()
            if not wanted:
                self._accumulating.enter_context(self._model.no_sync())

    def _take_chosen_batch(self, rule: str) -> None:
        """Go on with the global batch that was chosen for this round, and measure the noise for the next choice."""
        (least, most), (_, micro_batch_size) = self._limits, self._sizes
        chosen = min(max(defaults.global_batch, least), most)
        self._factor = batch.learning_rate_factor(rule, chosen, least)
        self._noise = NoiseMeter(self._model, self._group, self._replicas, self._scaler)
        assert micro_batch_size is not None
        if self._replicas == 1:  # a second pass, to measure the noise
            micro_batch_size = max(1, min(micro_batch_size, chosen // 2))
        self._sizes = chosen, micro_batch_size

    def _scale_learning_rates(self, rule: str, reference: int | None) -> None:
        factor = batch.learning_rate_factor(rule, self._sizes[0], reference)
        for group in self._optimizer.param_groups:
            for key in ("lr", "initial_lr"):
                if key in group:
                    group[key] *= factor

    # ---- what is refused

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
