"""What Accelerate and the Trainers of Transformers and Lightning do beside their steps, on a rank that replays.

A rank that replays writes, logs and decides nothing, since it computes no losses; when it joins the others, it takes their
records, such as the best loss so far. No rank saves while rank 0 is away: rank 0 writes the parts that all ranks have
alike, and a checkpoint would lack them.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlrover.errors import InfrastructureError
from dlrover.training.worker.imports import after_import

if TYPE_CHECKING:
    from dlrover.training.replicas.unchanged import Unchanged

Running = Callable[[], "Unchanged | None"]
"""Returns this process's rank, once the program has made its process group."""
_QUIET = [
    ("accelerate.accelerator", "Accelerator", "save", "log"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
]
"""Modules, their classes, and the methods that do nothing while a rank replays."""
_SAVES = [
    ("accelerate.accelerator", "Accelerator", "save_model"),
    ("transformers.trainer", "Trainer", "save_model", "_save_checkpoint"),
]
"""Methods that save with a part of rank 0 in each checkpoint; they also do nothing while rank 0 is away."""
_QUIET_IN_LIGHTNING = [
    ("trainer.connectors.logger_connector.logger_connector", "_LoggerConnector", "log_metrics"),
    ("callbacks.early_stopping", "EarlyStopping", "_run_early_stopping_check"),
]
_SAVES_IN_LIGHTNING = [
    ("trainer.trainer", "Trainer", "save_checkpoint"),
    (
        "callbacks.model_checkpoint", "ModelCheckpoint",
        "_save_topk_checkpoint", "_save_last_checkpoint",
    ),
]  # fmt: skip
_RECORDS = (
    "log_history", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos", "num_input_tokens_seen",
)  # fmt: skip
"""What all ranks have alike in the state of Transformers' Trainer, and a rank that replays has not."""


def install(running: Running) -> None:
    """Place each hook when its module is imported."""
    quiet, saves = [*_QUIET], [*_SAVES]
    for package in ("lightning.pytorch", "pytorch_lightning"):
        quiet += [(f"{package}.{module}", *names) for module, *names in _QUIET_IN_LIGHTNING]
        saves += [(f"{package}.{module}", *names) for module, *names in _SAVES_IN_LIGHTNING]
        for name, place in (
            ("loops.fit_loop", _watch_fit),
            ("strategies.parallel", _watch_decisions),
            ("strategies.strategy", _watch_redirection),
        ):
            after_import(f"{package}.{name}", functools.partial(place, running))
    for silent, places in ((_replays, quiet), (_saves_nothing, saves)):
        for module, cls, *methods in places:
            muted = functools.partial(silent, running)
            after_import(module, functools.partial(_mute, muted, cls, methods))
    after_import("accelerate.accelerator", functools.partial(_watch_save_state, running))
    after_import("transformers.trainer", functools.partial(_watch_trainer, running))
    after_import("transformers.trainer_callback", functools.partial(_watch_events, running))


def _replays(running: Running) -> bool:
    rank = running()
    return rank is not None and rank.replaying


def _saves_nothing(running: Running) -> bool:
    rank = running()
    return rank is not None and not rank.saves


def _wrap(cls: type, name: str, around: Callable[..., Any]) -> None:
    """Let ``around(method, self, ...)`` take the place of a method, if the class has it."""
    method = cls.__dict__.get(name)
    if method is not None:

        @functools.wraps(method)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return around(method, self, *args, **kwargs)

        setattr(cls, name, wrapped)


def _mute(
    muted: Callable[[], bool], cls: str, methods: list[str], module: types.ModuleType
) -> None:
    def around(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if muted() else method(*args, **kwargs)

    for name in methods:
        _wrap(getattr(module, cls), name, around)


# ---- Accelerate


def _watch_save_state(running: Running, module: Any) -> None:
    def save_state(
        method: Any, self: Any, output_dir: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not _saves_nothing(running):
            return method(self, output_dir, *args, **kwargs)
        self.project_configuration.iteration += 1  # the number of the next directory
        return output_dir

    _wrap(module.Accelerator, "save_state", save_state)


# ---- Transformers


def _watch_trainer(running: Running, module: Any) -> None:
    def train(method: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        rank = running()
        if rank is not None:
            rank.owns("trainer", _TrainerRecord(self))
        return method(self, *args, **kwargs)

    _wrap(module.Trainer, "train", train)


def _watch_events(running: Running, module: Any) -> None:
    """Keep what follows from losses from callbacks, early stopping among them, and learn the first step."""

    def begin(method: Any, self: Any, args: Any, state: Any, *rest: Any, **live: Any) -> Any:
        rank = running()
        if rank is not None:
            rank.begins_at(state.global_step)
        return method(self, args, state, *rest, **live)

    _wrap(module.CallbackHandler, "on_train_begin", begin)
    for name, flag in (
        ("on_evaluate", "should_evaluate"),
        ("on_log", "should_log"),
        ("on_save", "should_save"),
    ):
        silent = _saves_nothing if name == "on_save" else _replays

        def event(
            method: Any, self: Any, args: Any, state: Any, control: Any, *rest: Any,
            _flag: str = flag, _silent: Any = silent, **live: Any,
        ) -> Any:  # fmt: skip
            if not _silent(running):
                return method(self, args, state, control, *rest, **live)
            setattr(control, _flag, False)
            return control

        _wrap(module.CallbackHandler, name, event)


class _TrainerRecord:
    """The records of a Trainer of Transformers, as part of a replica's state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def _counting(self) -> list[Any]:
        from transformers.trainer_callback import ExportableState  # noqa: PLC0415 - it is imported by now

        every = self._trainer.callback_handler.callbacks
        return [callback for callback in every if isinstance(callback, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        of = self._trainer
        record = {
            "step": of.state.global_step,
            "state": {name: getattr(of.state, name) for name in _RECORDS if hasattr(of.state, name)},
            "callbacks": [callback.state()["attributes"] for callback in self._counting()],
            "losses": [float(getattr(of, name, 0.0)) for name in ("_tr_loss", "_total_loss_scalar")],
        }  # fmt: skip
        numbers = json.dumps(record, default=lambda value: value.tolist())  # of NumPy and torch
        return {"json": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        of, record = self._trainer, json.loads(state["json"])
        _check_step(of.state.global_step, record["step"])
        for name, value in record["state"].items():
            setattr(of.state, name, value)
        for callback, attributes in zip(self._counting(), record["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)
        since_log, before = record["losses"]
        if hasattr(of, "_tr_loss"):
            of._tr_loss.fill_(since_log)  # noqa: SLF001 - of the steps since the last log
        of._total_loss_scalar = before  # noqa: SLF001


def _check_step(own: int, theirs: int) -> None:
    """Check that a rank that joins has come to the others' step.

    Raises:
        InfrastructureError: It has not.
    """
    if own != theirs:
        raise InfrastructureError(
            f"--survive: the Trainer came to step {own} where the others are at step {theirs}, since it began with"
            " another checkpoint than they did; all ranks start again."
        )


# ---- Lightning


def _watch_fit(running: Running, module: Any) -> None:
    def run(method: Any, self: Any) -> Any:
        rank = running()
        if rank is not None:
            rank.owns("trainer", _Callbacks(self.trainer))
        return method(self)

    _wrap(module._FitLoop, "run", run)  # noqa: SLF001


class _Callbacks:
    """The records of the callbacks of a Trainer of Lightning, as part of a replica's state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        every = {
            callback.state_key: [_taken(callback), callback.state_dict()]
            for callback in self._trainer.callbacks
        }
        return {"step": self._trainer.global_step, "callbacks": every}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_step(self._trainer.global_step, state["step"])
        for callback in self._trainer.callbacks:
            taken, one = state["callbacks"].get(callback.state_key, ({}, {}))
            for name, value in taken.items():
                setattr(
                    callback, name, value
                )  # before the state, which is refused for another directory
            if one:
                callback.load_state_dict(one)


def _taken(callback: Any) -> dict[str, Any]:
    """Return what a `ModelCheckpoint` does not count as its state, and by which it decides whether to save."""
    names = "dirpath", "_last_global_step_saved", "_last_checkpoint_saved"
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def _watch_decisions(running: Running, module: Any) -> None:
    """Let a decision be that of the ranks that train; Lightning compares a sum with the world's size."""

    def decide(method: Any, self: Any, decision: bool, all: bool = True) -> bool:  # noqa: A002
        if running() is None:
            return bool(method(self, decision, all))
        import torch  # noqa: PLC0415 - Lightning has imported it

        one = torch.tensor(int(decision), device=self.root_device)
        operations = torch.distributed.ReduceOp
        return bool(self.reduce(one, reduce_op=operations.MIN if all else operations.MAX))

    _wrap(module.ParallelStrategy, "reduce_boolean_decision", decide)


def _watch_redirection(running: Running, module: Any) -> None:
    """Let a step that is skipped leave behind what a step does: the module's own ``forward``, and its log."""
    logged: dict[tuple[int, str], list[tuple[Any, Any]]] = {}

    def redirect(method: Any, self: Any, wrapper: Any, of: Any, name: str, *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        if not _replays(running):
            return method(self, wrapper, of, name, *args, **kwargs)
        if name == "training_step" and not of.automatic_optimization:
            raise InfrastructureError(
                "--survive: a LightningModule with manual optimization steps its optimizers within its pass, which a rank that"
                " replays the program does not make, so it cannot reach the others' place; all ranks start again."
            )
        forward, log = of.forward, of.log
        calls: list[tuple[Any, Any]] = []

        def record(*logs: Any, **options: Any) -> None:
            calls.append((logs, options))
            log(*logs, **options)

        of.log = record
        try:
            output = method(self, wrapper, of, name, *args, **kwargs)
        finally:
            skipped = of.forward != forward
            del of.log
            of.forward = forward
        if not skipped:
            logged[id(of), name] = calls
        for logs, options in logged.get((id(of), name), ()) if skipped else ():
            log(*logs, **options)
        return output

    _wrap(module._ForwardRedirection, "__call__", redirect)  # noqa: SLF001
