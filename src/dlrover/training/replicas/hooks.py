"""The hooks by which ``dlrover-run --survive`` handles losses in programs for `DistributedDataParallel` and HSDP.

==================================== ================================================================
``init_process_group``               makes `ManagedGroup` the default group
``DeviceMesh``, ``fully_shard``      see `sharded`
``DistributedDataParallel``          its gradients are reduced by `Unchanged`; its forward pass is an edge
``Optimizer.step``                   does nothing while a rank replays
``AveragedModel``                    a returning rank takes that of the others
normalization layers                 it takes their running statistics, also outside of models
``torch.save`` and ``safetensors``   write no files while a rank replays
``open``, ``os``, ``shutil``         change no files meanwhile; see `unwritten`
``torch.load`` and ``safetensors``   the files that a returning rank loads are noted
``GradScaler``                       looks for no overflow while a rank replays
``ReduceLROnPlateau``                counts no losses while a rank replays
schedules of learning rates          a returning rank takes their numbers
``torch.distributed.checkpoint``     saves with all ranks or not at all; a rank that replays loads for itself
Accelerate, Trainers                 see `engines`
==================================== ================================================================
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlrover import launched
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError
from dlrover.training.replicas import engines, sharded
from dlrover.training.replicas.unwritten import Unwritten, is_cached
from dlrover.training.worker.imports import after_import

if TYPE_CHECKING:
    from dlrover.training.replicas.unchanged import Unchanged

logger = logging.getLogger(__name__)

_CHECKPOINTS = "torch.distributed.checkpoint"
plain_group: dict[str, Any] | None = None
"""Arguments of ``init_process_group`` within a function that is `restartable`; None elsewhere."""
_FUNCTIONS = (
    "new_group", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single",
    "reduce_scatter", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv",
)  # fmt: skip
"""Functions of ``torch.distributed`` that do not go to a process group as it is; see `functions`."""
_running: list[Unchanged] = []
"""This process's rank, once the program has made its process group."""
_loaded: dict[str, float] = {}
"""The files that a program that is started again has loaded, and when they were written."""
_unwritten = Unwritten(lambda: bool(_running) and _running[0].replaying)
"""The files that a replaying rank leaves as they are."""
_norms: list[weakref.ref[Any]] = []
"""The program's normalization layers, in the order of their making."""
_schedules: list[weakref.ref[Any]] = []
"""The program's learning rate schedules, in the order of their making."""
_early: list[tuple[str, weakref.ref[Any]]] = []
"""Optimizers and scalers that the program has made before its process group."""


def install() -> None:
    """Place each hook when its module is imported."""
    after_import("torch.distributed.distributed_c10d", _watch_groups)
    after_import("torch.nn.parallel.distributed", _watch_models)
    after_import("torch.optim.optimizer", _watch_optimizers)
    after_import("torch.optim.swa_utils", _watch_averages)
    after_import("torch.distributed.optim.zero_redundancy_optimizer", _refuse_parts)
    after_import("torch.distributed.algorithms.model_averaging.averagers", _refuse_averagers)
    after_import("torch.nn.modules.batchnorm", _watch_norms)
    after_import("torch.serialization", functools.partial(_mute, names=("save",), package="torch"))
    after_import(
        "torch.jit._serialization", functools.partial(_mute, names=("save",), package="torch.jit")
    )
    after_import("torch.jit._script", _mute_scripts)
    after_import("safetensors.torch", functools.partial(_mute, names=("save_file",)))
    if launched.given.attempt:
        _unwritten.install()
        after_import("torch.serialization", functools.partial(_note, name="load", package="torch"))
        after_import("safetensors.torch", functools.partial(_note, name="load_file"))
    after_import("torch.amp.grad_scaler", _watch_scalers)
    after_import("torch.optim.lr_scheduler", _watch_schedules)
    after_import(f"{_CHECKPOINTS}.state_dict_saver", _watch_savers)
    after_import(f"{_CHECKPOINTS}.state_dict_loader", _watch_loaders)
    engines.install(_present)
    sharded.install(_present)
    launched.finished, launched.failed = functools.partial(_finish, os.getpid()), _fail


def _present() -> Unchanged | None:
    return _running[0] if _running and plain_group is None else None


def _finish(pid: int) -> None:
    """Finish the training, unless this is a process that the program has forked."""
    for rank in _running if os.getpid() == pid else ():
        rank.finish()


def _fail(error: Exception) -> None:
    """Let all ranks start again if the program fails while this rank replays it: the reason may be the replay, which has no model."""
    for rank in _running:
        if rank.replaying and not isinstance(error, DLRoverError):
            raise InfrastructureError(
                "--survive: the program failed while this rank replayed it up to the place of the ranks that train"
                f" ({type(error).__name__}: {error}); all ranks start again."
            ) from error


def _own(name: str, part: Any) -> None:
    """Take an optimizer or a scaler into the state of this rank."""
    if _running:
        _running[0].owns(name, part)
    else:
        _early.append((name, weakref.ref(part)))


def _watch_groups(module: Any) -> None:
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if plain_group is not None:  # `restartable` says where the ranks meet
            backend = args[0] if args else kwargs.get("backend")
            original(backend, **plain_group)
            return
        from dlrover.training.replicas import managed, unchanged  # noqa: PLC0415 - they need torch
        from dlrover.training.replicas.link import open_link  # noqa: PLC0415

        given = launched.given
        if not _running:
            _running.append(unchanged.Unchanged(open_link(), given, _loaded, _norms, _schedules))
            _running[0].joined = _unwritten.end
            launched.survival = _running[0]
            managed.register(_running[0])
            for name, early in _early:
                if (part := early()) is not None:
                    _running[0].owns(name, part)
        from torch.distributed import HashStore  # noqa: PLC0415 - the package is imported by now

        # Each rank has a store of its own, at which torch's barrier would wait for ever; `begin` lets the ranks meet.
        os.environ["TORCH_DIST_INIT_BARRIER"] = "0"  # noqa: TID251 - for torch
        store = HashStore()
        original(managed.NAME, store=store, rank=given.rank, world_size=given.world_size)
        _running[0].begin()

    _replace(module, "torch.distributed", original, init_process_group)
    for name in _FUNCTIONS:
        if hasattr(module, name):
            function = getattr(module, name)
            _replace(module, "torch.distributed", function, _carried_out(function))


def _carried_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ``torch.distributed`` for groups that survive losses."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not _running or plain_group is not None:
            return original(*args, **kwargs)
        from dlrover.training.replicas import functions  # noqa: PLC0415 - it needs torch

        return functions.call(original, args, kwargs)

    return function


def _watch_savers(module: Any) -> None:
    """Let checkpoints of ``torch.distributed.checkpoint`` be saved by all ranks or not at all, and by this thread."""
    save, later = module.save, module.async_save

    @functools.wraps(save)
    def wrapped(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        rank = _present()
        return save(state_dict, *args, **kwargs) if rank is None else _save(rank, functools.partial(save, state_dict, *args, **kwargs))  # fmt: skip

    @functools.wraps(later)
    def at_once(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        rank = _present()
        if rank is None:
            return later(state_dict, *args, **kwargs)
        if kwargs.get("async_stager") is not None:
            raise ConfigurationError(
                "--survive: async_save with an async_stager cannot survive the loss of a rank; leave it out, or start the"
                " program without --survive."
            )
        from concurrent.futures import Future  # noqa: PLC0415 - for this case alone

        kwargs = {k: v for k, v in kwargs.items() if not k.startswith("async_")}
        future: Future[Any] = Future()
        # Collectives of a second thread would come between those of the training.
        future.set_result(_save(rank, functools.partial(save, state_dict, *args, **kwargs)))
        return future

    _replace(module, _CHECKPOINTS, save, wrapped)
    _replace(module, _CHECKPOINTS, later, at_once)


def _save(rank: Unchanged, save: functools.partial[Any]) -> Any:
    """Save, unless this rank replays or another one is lost."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - it is imported by now

    from dlrover.training.replicas import managed, rows  # noqa: PLC0415 - they need torch

    group = save.keywords.get("process_group")
    together = not (save.keywords.get("no_dist") or isinstance(group, rows.RowGroup))
    if rank.replaying or (together and not rank.whole):
        return None
    rank.saving = together
    try:
        return save()
    except (CheckpointException, managed.NotWholeError) as error:
        if rank.whole or not together:
            raise
        logger.warning("Nothing is saved, since a rank was lost meanwhile: %s", error)
        return None
    finally:
        rank.saving = False


def _watch_loaders(module: Any) -> None:
    """Let a rank that replays load its part of a checkpoint without the others, and note when this was written."""
    load = module.load

    @functools.wraps(load)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        rank = _present()
        if rank is None or not rank.replaying:
            return load(*args, **kwargs)
        where = kwargs.get("checkpoint_id") or getattr(kwargs.get("storage_reader"), "path", None)
        if where is not None:
            _note_file(os.path.join(where, ".metadata"))
        return load(*args, **{**kwargs, "no_dist": True})

    _replace(module, _CHECKPOINTS, load, wrapped)


def _replace(module: Any, package: str, original: Any, new: Any) -> None:
    """Replace a function in its module, and in a package that has imported it."""
    name = original.__name__
    for place in (module, sys.modules.get(package)):
        if getattr(place, name, None) is original:
            setattr(place, name, new)


def _watch_models(module: types.ModuleType) -> None:
    cls = module.DistributedDataParallel
    make, copied, forward = cls.__init__, cls.__setstate__, cls.forward
    register, register_built_in = cls.register_comm_hook, cls._register_builtin_comm_hook

    @functools.wraps(make)
    def wrapped_make(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if _running:
            if not getattr(self.process_group, "whole", True):
                raise ConfigurationError(
                    "--survive: DistributedDataParallel among some of the ranks cannot survive the loss of one."
                )
            survive(self)

    @functools.wraps(copied)
    def wrapped_copied(self: Any, state: Any) -> None:
        copied(self, state)
        if _running:  # a copy has no hook, as torch makes it
            self._comm_hooks = []
            survive(self)

    def survive(model: Any) -> None:
        _running[0].owns("model", model.module)
        # torch refuses annotations that are text.
        hook = lambda state, bucket: _reduce(state, bucket)  # noqa: E731, PLW0108
        register(model, _Buckets(_running[0], model), hook)

    @functools.wraps(forward)
    def wrapped_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _running:
            return forward(self, *args, **kwargs)
        return _running[0].forward(self, forward, args, kwargs)

    cls.__init__, cls.__setstate__, cls.forward = wrapped_make, wrapped_copied, wrapped_forward
    # With a static graph, a rank that has returned would have a collective in its first pass that the others have not.
    cls._set_static_graph = _refused(
        cls._set_static_graph, "static_graph of DistributedDataParallel"
    )
    own = "another way to reduce gradients (register_comm_hook, mixed_precision)"
    cls.register_comm_hook = _refused(register, own)
    cls._register_builtin_comm_hook = _refused(register_built_in, own)


def _refused(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a function that refuses what cannot survive the loss of a rank."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _present() is not None:
            raise ConfigurationError(
                f"--survive: {what} cannot survive the loss of a rank; leave it out, or start the program without --survive."
            )
        return original(*args, **kwargs)

    return wrapped


class _Buckets:
    """The buckets of a backward pass, until the last one; their order may differ between ranks."""

    def __init__(self, rank: Unchanged, model: Any) -> None:
        self.rank, self.model = rank, weakref.ref(model)
        self.order = {id(p): i for i, p in enumerate(model.module.parameters())}
        self.waiting: list[tuple[Any, Any]] = []

    def __deepcopy__(self, _memo: Any) -> _Buckets:
        """Return itself: a copy of the model gets its own."""
        return self


def _reduce(buckets: _Buckets, bucket: Any) -> Any:
    """Reduce all gradients of a backward pass with its last bucket; see ``register_comm_hook``."""
    import torch  # noqa: PLC0415 - it is imported by now

    future: Any = torch.futures.Future()
    buckets.waiting.append((bucket, future))
    if bucket.is_last():
        waiting, buckets.waiting = buckets.waiting, []
        gradients = [
            (buckets.order[id(parameter)], gradient)
            for one, _ in waiting
            for parameter, gradient in zip(one.parameters(), one.gradients(), strict=True)
        ]
        gradients.sort(key=lambda pair: pair[0])
        buckets.rank.reduce([gradient for _, gradient in gradients])
        model = buckets.model()
        buckets.rank.came_back([] if model is None else [model])
        for one, done in waiting:
            done.set_result(one.buffer())
    return future


def _watch_optimizers(module: types.ModuleType) -> None:
    cls = module.Optimizer
    make = cls.__init__
    wrapped: set[type] = set()

    @functools.wraps(make)
    def wrapped_make(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _own("optimizer", self)
        kind = type(self)
        if kind not in wrapped:
            wrapped.add(kind)
            kind.step = _stepping(kind.step)

    cls.__init__ = wrapped_make


def _watch_averages(module: types.ModuleType) -> None:
    make = module.AveragedModel.__init__

    @functools.wraps(make)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _own("average", self)

    module.AveragedModel.__init__ = wrapped


def _refuse_parts(module: Any) -> None:
    """Refuse an optimizer that is divided among the ranks: the others would not step the part of a lost one."""
    cls = module.ZeroRedundancyOptimizer
    cls.__init__ = _refused(cls.__init__, "ZeroRedundancyOptimizer")


def _refuse_averagers(module: Any) -> None:
    """Refuse means of parameters that torch divides by the number of all ranks."""
    cls = module.ModelAverager
    cls.__init__ = _refused(
        cls.__init__, "an averager of models (torch.distributed.algorithms.model_averaging)"
    )


def _watch_norms(module: Any) -> None:
    cls = module._NormBase  # noqa: SLF001 - of all layers with running statistics
    cls.__init__ = _making(cls.__init__, _norms)


def _stepping(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(self: Any, closure: Any = None, **others: Any) -> Any:
        bare = functools.partial(step, **others)
        if not _running:
            return bare(self) if closure is None else bare(self, closure)
        return _running[0].stepped(bare, self, closure)

    return wrapped


def _watch_scalers(module: Any) -> None:
    cls = module.GradScaler
    make, step = cls.__init__, cls.step

    @functools.wraps(make)
    def wrapped_make(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _own("scaler", self)

    @functools.wraps(step)
    def wrapped_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        replays = _running and _running[0].replaying
        return optimizer.step() if replays else step(self, optimizer, *args, **kwargs)

    cls.__init__, cls.step = wrapped_make, wrapped_step
    for name in ("unscale_", "update"):
        setattr(cls, name, _quiet(getattr(cls, name)))


def _watch_schedules(module: Any) -> None:
    """Take schedules from the others: they may have left out steps with a scaler, or follow from losses."""
    plateau = module.ReduceLROnPlateau
    plateau.step = _quiet(plateau.step)
    # The latter two do not call the first one.
    for cls in (module.LRScheduler, module.SequentialLR, plateau):
        cls.__init__ = _making(cls.__init__, _schedules)


def _making(make: Callable[..., Any], made: list[weakref.ref[Any]]) -> Callable[..., Any]:
    """Return a constructor that notes what it makes."""

    @functools.wraps(make)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        made.append(weakref.ref(self))

    return wrapped


def _mute(module: types.ModuleType, names: tuple[str, ...], package: str = "") -> None:
    """Let functions that write a checkpoint do nothing while this rank replays."""
    for name in names:
        original = getattr(module, name)
        _replace(module, package, original, _writes_no_file(original))


def _mute_scripts(module: Any) -> None:
    cls = module.RecursiveScriptModule
    cls.save = _writes_no_file(cls.save)


def _writes_no_file(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that writes to memory only while this rank replays."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
        if _running and _running[0].replaying and not isinstance(file, io.BytesIO):
            return None
        return function(*args, **kwargs)

    return wrapped


def _note(module: types.ModuleType, name: str, package: str = "") -> None:
    """Note when the files were written that a function loads."""
    original = getattr(module, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        file = args[0] if args else kwargs.get("f", kwargs.get("filename"))
        path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", "")
        _note_file(path)
        return original(*args, **kwargs)

    _replace(module, package, original, wrapped)


def _note_file(path: Any) -> None:
    with contextlib.suppress(OSError, TypeError, ValueError):  # no file of this machine
        if not is_cached(path):
            _loaded[str(path)] = os.stat(path).st_mtime


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _running and _running[0].replaying:
            return None
        return function(*args, **kwargs)

    return wrapped
