"""The PyTorch hooks that report the activity of a training, without a change to the program.

========================== ==========================================================================
optimizer step             PyTorch's hook for all optimizers; ``launched.stepped`` without PyTorch
parameters and state       read from the optimizer after its first step
waiting for the next batch wrapper of the data loader iterators' ``__next__``
compiling                  callbacks of PyTorch's compiler
evaluating                 wrappers of ``Module.eval`` and ``Module.train``
steps left                 wrapper of Transformers' Trainer's event at the start of a training
checkpoints                wrappers of ``torch.save`` and ``torch.distributed.checkpoint``'s ``save`` and
                           ``load``; DLRover's `Checkpointer` reports its own
========================== ==========================================================================
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from dlrover import launched
from dlrover.spec.activity import Activity
from dlrover.training.worker.compute import ComputeTime
from dlrover.training.worker.counted import CountedOptimizer
from dlrover.training.worker.imports import after_import
from dlrover.training.worker.tracker import Tracker, guarded

OPTIMIZERS = "torch.optim.optimizer"
DATA_LOADERS = "torch.utils.data.dataloader"
MODULES = "torch.nn.modules.module"
TRAINER = "transformers.trainer_callback"
COMPILER = "torch._dynamo.callback"
SAVING = "torch.serialization"
CHECKPOINTS = (
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.checkpoint.state_dict_loader",
)


def install(tracker: Tracker, on_first_step: Callable[[], None]) -> None:
    """Place each hook when its module is imported; call ``on_first_step`` after the first step."""
    hooks = Hooks(tracker, on_first_step)
    places = {
        OPTIMIZERS: hooks.watch_steps,
        DATA_LOADERS: hooks.watch_data,
        MODULES: hooks.watch_evaluation,
        COMPILER: hooks.watch_compiler,
        TRAINER: hooks.watch_trainer,
        SAVING: hooks.watch_saving,
        **dict.fromkeys(CHECKPOINTS, hooks.watch_checkpoints),
    }
    for name, place in places.items():
        after_import(name, guarded(place))
    launched.blocked = hooks.checkpoint
    launched.stepped = guarded(hooks.step)
    launched.imported = guarded(on_first_step)
    launched.loaded = guarded(tracker.began_with)
    launched.steps_made = lambda: tracker.steps
    launched.furthest = tracker.furthest
    launched.rejoined = guarded(tracker.rejoined)
    launched.saving = guarded(tracker.saves)


class Hooks:
    """The hooks of one worker."""

    def __init__(self, tracker: Tracker, on_first_step: Callable[[], None]) -> None:
        self._tracker = tracker
        self._on_first_step = guarded(on_first_step)
        self._compute = ComputeTime(tracker)
        self._time_step = guarded(self._compute.step, self._compute.stop)
        self._read_profile = guarded(self._profile)
        self._begin = guarded(tracker.begin)
        self._end = guarded(tracker.end)
        self._optimizer = CountedOptimizer()
        self._compiling: int | None = None
        self._owned: set[int] = set()

    # ---- steps

    def step(self) -> None:
        """Count a step that the program reports."""
        if self._tracker.step(time.monotonic_ns()) and self._tracker.steps == 1:
            self._on_first_step()

    def watch_steps(self, module: types.ModuleType) -> None:
        """Count the steps of the first optimizer that steps; others, such as a GAN's second one, only show life.

        A program that trains again, or another model, goes over to another optimizer: then that one counts.
        """
        module.register_optimizer_step_post_hook(guarded(self._after_step, self._tracker.lose))

    def _after_step(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        now, before = time.monotonic_ns(), self._optimizer.now
        if not self._optimizer.counts(optimizer):
            self._tracker.alive(now)
            return
        if self._optimizer.now is not before:
            self._owned = set()
        if self._tracker.step(now):
            self._time_step(optimizer, now)
            if self._tracker.steps == 1:
                self._read_profile(optimizer)
                self._on_first_step()

    def _profile(self, optimizer: Any) -> None:
        self._tracker.trains(*_profile_of(optimizer))

    # ---- data

    def watch_data(self, module: types.ModuleType) -> None:
        """Time the wait of data loader iterators for the next batch."""
        iterator = module._BaseDataLoaderIter  # noqa: SLF001
        iterator.__next__ = self._timed(iterator.__next__, Activity.DATA)

    # ---- evaluation

    def watch_evaluation(self, module: types.ModuleType) -> None:
        """Detect when the trained model enters and leaves evaluation mode."""
        cls = module.Module
        to_eval, to_train, tracker = cls.eval, cls.train, self._tracker
        evaluate, train = guarded(self._evaluate), guarded(tracker.train)

        @functools.wraps(to_eval)
        def eval(self: Any) -> Any:  # noqa: A001 - the wrapped method's name
            evaluate(self)
            return to_eval(self)

        @functools.wraps(to_train)
        def wrapped_train(self: Any, mode: bool = True) -> Any:
            if mode and tracker.evaluating:
                train()
            return to_train(self, mode)

        cls.eval, cls.train = eval, wrapped_train

    def _evaluate(self, module: Any) -> None:
        optimizer = self._optimizer.now() if self._optimizer.now is not None else None
        if optimizer is None:
            return
        if not self._owned:
            groups = optimizer.param_groups
            self._owned = {id(parameter) for group in groups for parameter in group["params"]}
        if any(id(parameter) in self._owned for parameter in module.parameters()):
            self._tracker.evaluate()

    # ---- length of the training

    def watch_trainer(self, module: types.ModuleType) -> None:
        """Read the number of steps left from Transformers' Trainer."""
        cls = module.CallbackHandler
        begin, tell = cls.on_train_begin, guarded(self._tracker.ends_in)

        @functools.wraps(begin)
        def on_train_begin(self: Any, args: Any, state: Any, control: Any) -> Any:
            tell(state.max_steps - state.global_step)
            return begin(self, args, state, control)

        cls.on_train_begin = on_train_begin

    # ---- compiling

    def watch_compiler(self, module: types.ModuleType) -> None:
        """Time compilation with the compiler's callbacks."""
        handler = module.callback_handler
        handler.register_start_callback(guarded(self._compile))
        handler.register_end_callback(guarded(self._compiled))

    def _compile(self, *_: object) -> None:
        self._compiling = self._tracker.begin(Activity.COMPILE)

    def _compiled(self, *_: object) -> None:
        self._tracker.end(self._compiling)
        self._compiling = None

    # ---- checkpoints

    def watch_saving(self, module: types.ModuleType) -> None:
        """Time ``torch.save``."""
        self._time_function(module, "save", "torch")

    def watch_checkpoints(self, module: types.ModuleType) -> None:
        """Time ``torch.distributed.checkpoint.save`` and ``load``."""
        for name in ("save", "load"):
            if hasattr(module, name):
                self._time_function(module, name, "torch.distributed.checkpoint")

    def _time_function(self, module: types.ModuleType, name: str, package: str) -> None:
        """Time a function, also where ``package`` has already imported it from ``module``."""
        function = getattr(module, name)
        timed = self._timed(function, Activity.CHECKPOINT)
        for place in (module, sys.modules.get(package)):
            if getattr(place, name, None) is function:
                setattr(place, name, timed)

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Time a block in which the training waits for a checkpoint."""
        before = self._begin(Activity.CHECKPOINT)
        try:
            yield
        finally:
            self._end(before)

    def _timed(self, function: Callable[..., Any], activity: Activity) -> Callable[..., Any]:
        begin, end, kind = self._begin, self._end, int(activity)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = begin(kind)
            try:
                return function(*args, **kwargs)
            finally:
                if before is not None:
                    end(before)

        return timed


def _profile_of(optimizer: Any) -> tuple[int, int, int]:
    """Return the count of trained parameters, their bytes, and the optimizer state's bytes, on this rank."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    count = sum(_local(p).numel() for p in parameters)
    size = sum(_bytes(p) for p in parameters)
    kept = sum(
        _bytes(value)
        for state in list(optimizer.state.values())
        for value in (state.values() if isinstance(state, dict) else ())
    )
    return count, size, kept


def _local(tensor: Any) -> Any:
    """Return this rank's part of a tensor that is divided among ranks; other values unchanged."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor  # noqa: SLF001


def _bytes(value: Any) -> int:
    """Return the bytes of a tensor; 0 for any other value."""
    local = _local(value)
    if not (hasattr(local, "numel") and hasattr(local, "element_size")):
        return 0
    return int(local.numel() * local.element_size())
