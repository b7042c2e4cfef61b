"""Models that FSDP2 spreads over rows of ranks (HSDP), in a program that is unchanged.

FSDP gathers parameters and scatters gradients within the row. It is kept from adding gradients up over the rows while
the backward pass runs, when a row may be lost between two of its sums: `Unchanged` does so once, at the end of the pass.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlrover import launched
from dlrover.errors import ConfigurationError
from dlrover.training.worker.imports import after_import

if TYPE_CHECKING:
    import torch

    from dlrover.training.replicas.unchanged import Unchanged

Running = Callable[[], "Unchanged | None"]
"""Returns this process's rank, once the program has made its process group."""
_FSDP = "torch.distributed.fsdp._fully_shard"
USE = (
    'use fully_shard with init_device_mesh(device, (replicas, ranks of a replica), mesh_dim_names=("replicate", "shard"))'
    ", or start the program without --survive."
)


def install(running: Running) -> None:
    """Place each hook when its module is imported."""
    models = ShardedModels(running)
    after_import("torch.distributed.device_mesh", functools.partial(_watch_meshes, running))
    after_import(f"{_FSDP}._fsdp_param_group", models.watch_groups)
    after_import(f"{_FSDP}._fsdp_state", models.watch_states)
    after_import(f"{_FSDP}._fully_shard", models.watch_modules)
    first = "torch.distributed.fsdp.fully_sharded_data_parallel"
    after_import(first, functools.partial(_refuse, running))


def _refuse(running: Running, module: Any) -> None:
    cls = module.FullyShardedDataParallel
    make = cls.__init__

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if running() is not None:
            raise ConfigurationError(
                f"--survive: FullyShardedDataParallel cannot survive the loss of a rank; {USE}"
            )
        make(*args, **kwargs)

    cls.__init__ = wrapped


def _watch_meshes(running: Running, module: Any) -> None:
    """Let the ranks of the second dimension of a mesh be a row; refuse other meshes."""
    make = module.DeviceMesh.__init__

    @functools.wraps(make)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        from torch import distributed  # noqa: PLC0415 - it is imported by now

        if launched.given.survive and not distributed.is_initialized():
            distributed.init_process_group()  # as the mesh would
        rank = running()
        if rank is not None and kwargs.get("_init_backend", True) and not kwargs.get("_root_mesh"):
            _divide(rank, *args, **kwargs)
        make(self, *args, **kwargs)

    module.DeviceMesh.__init__ = wrapped


def _divide(
    rank: Unchanged, _device: str = "", mesh: Any = None, *,
    _layout: Any = None, _rank_map: Any = None, **_others: Any,
) -> None:  # fmt: skip
    import torch  # noqa: PLC0415 - it is imported by now

    ranks = _layout.remap_to_tensor(_rank_map)[0] if mesh is None else torch.as_tensor(mesh)
    world = torch.arange(launched.given.world_size, device="cpu")
    regular = ranks.dim() == 2 and torch.equal(ranks.flatten().cpu(), world.to(ranks.dtype))
    if not regular:
        raise ConfigurationError(
            f"--survive: a device mesh of the shape {tuple(ranks.shape)} with these ranks cannot survive the loss of one,"
            f" as its replicas are no rows of consecutive ranks; {USE}"
        )
    rank.divide(ranks.shape[1])


class ShardedModels:
    """The models of this process that FSDP divides."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._inside = self._queued = self._spread = False
        self._modules: list[weakref.ref[Any]] = []
        self._passed: dict[int, Any] = {}
        """What the modules of each model that a backward pass has come through have in common, by id."""

    def watch_groups(self, module: types.ModuleType) -> None:
        """Let groups of parameters know the row alone."""
        cls = module.FSDPParamGroup
        make, info = cls.__init__, module.FSDPMeshInfo

        @functools.wraps(make)
        def wrapped(group: Any, *args: Any, **kwargs: Any) -> None:
            make(group, *args, **kwargs)
            rank = self._running()
            if rank is None:
                return
            mesh, both = group.mesh_info, group.post_forward_mesh_info
            if rank.row is None or mesh.mesh.ndim != 2 or both not in (None, mesh):
                raise ConfigurationError(
                    f"--survive: fully_shard needs the mesh of replicas and of their ranks, and reshard_after_forward as"
                    f" True or False; {USE}"
                )
            if not self._spread:
                self._spread = True
                rank.owns("model", self)
                rank.spread_over(mesh.mesh, self.held)
            group.mesh_info = info(mesh.mesh, shard_mesh_dim=1)
            group.post_forward_mesh_info = group.mesh_info if both is not None else None

        cls.__init__ = wrapped

    def watch_states(self, module: types.ModuleType) -> None:
        """Add up gradients over the rows after FSDP has done with a backward pass."""
        cls = module.FSDPState
        init, end = cls.init, cls._root_post_backward_final_callback

        @functools.wraps(init)
        def wrapped_init(state: Any, modules: Any, *args: Any, **kwargs: Any) -> None:
            init(state, modules, *args, **kwargs)
            if self._running() is not None:  # also a module without parameters of its own
                self._modules += map(weakref.ref, modules)

        @functools.wraps(end)
        def wrapped(state: Any) -> None:
            end(state)
            if self._running() is not None:
                self._end_later(state)

        cls.init, cls._root_post_backward_final_callback = wrapped_init, wrapped

    def watch_modules(self, module: types.ModuleType) -> None:
        """Let the outermost call of a module be a forward pass of this rank."""
        models, cls = self, module.FSDPModule

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            inherited = super(cls, self).__call__  # type: ignore[misc] # of the module that FSDP has divided
            forward = functools.partial(inherited, *args, **kwargs)
            return models.forward(self, forward, args, kwargs)

        cls.__call__ = call

    def forward(self, model: Any, original: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Return the output of a forward pass, or what it once was while this rank replays."""
        import torch  # noqa: PLC0415 - it is imported by now

        rank = self._running()
        backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - parts are computed again
        if rank is None or self._inside or backward:
            return original()
        learns = any(parameter.requires_grad for parameter in model.parameters())
        rank.passes(model._get_fsdp_state()._state_ctx if learns else None)  # noqa: SLF001 - as in `_end_later`
        self._inside = True
        try:
            if not rank.replaying:
                return original()
            ended = functools.partial(self._end_later, model._get_fsdp_state())  # noqa: SLF001
            plain = [*model.parameters()]  # those that FSDP divides are none
            forward = functools.partial(_resharded, model, original)
            return rank.outputs.remembered(model, forward, args, kwargs, plain, ended)
        finally:
            self._inside = False

    # ---- the end of a backward pass

    def _end_later(self, state: Any) -> None:
        """Call `_end` once at the end of the backward pass, after all that FSDP does there.

        The ``state`` is that of any module of the model: of the one whose output the pass has come to first.
        """
        import torch  # noqa: PLC0415 - it is imported by now

        shared = state._state_ctx  # noqa: SLF001 - FSDP has no public hooks there
        self._passed[id(shared)] = shared
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # noqa: SLF001

    def _end(self) -> None:
        import torch  # noqa: PLC0415 - it is imported by now

        passed, self._passed, self._queued = list(self._passed.values()), {}, False
        rank = self._running()
        if rank is not None:
            rank.came_back(passed)
        passed = [shared for shared in passed if shared.is_last_backward]  # else FSDP still adds up
        groups = [g for shared in passed for s in shared.all_states for g in _groups_in(s)]
        if rank is None or not any(g.reduce_grads and g.all_reduce_grads for g in groups):
            return
        parameters = [p.sharded_param for group in groups for p in group.fsdp_params]
        parameters = [p for p in parameters if p.requires_grad]
        _check(groups, parameters)
        present = torch.tensor([float(p.grad is not None) for p in parameters], device="cpu")
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is None:  # here; maybe another row has one
                    parameter.grad = torch.zeros_like(parameter)
        if rank.replaying:
            rank.reduced()
            return
        rank.reduce([present, *(local(p.grad) for p in parameters)], whole=False)
        for parameter, share in zip(parameters, present.tolist(), strict=True):
            if not share:
                parameter.grad = None

    # ---- the state

    def _named(self) -> dict[str, torch.Tensor]:
        """Return the tensors of all models, which FSDP has divided again."""
        modules = {i: m for i, ref in enumerate(self._modules) if (m := ref()) is not None}
        parts = {id(part) for m in modules.values() for part in m.modules() if part is not m}
        found: dict[str, torch.Tensor] = {}
        for i, model in ((i, m) for i, m in modules.items() if id(m) not in parts):
            _reshard(model)
            named = [*model.named_parameters(), *model.named_buffers()]
            found |= {f"{i} {name}": tensor for name, tensor in named}
        return found

    def held(self) -> set[int]:
        """Return the ids of the tensors of all models."""
        return {id(tensor) for tensor in self._named().values()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts of all models."""
        return {name: local(tensor) for name, tensor in self._named().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take the parts of another rank with the same place in its row.

        Either rank may still have a model that the program has dropped, and the other one not.
        """
        own = self.state_dict()
        for name in own.keys() & state.keys():
            own[name].copy_(state[name])


def local(tensor: Any) -> Any:
    """Return this rank's part of a tensor, itself and no copy."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def _resharded(model: Any, forward: Callable[[], Any]) -> Any:
    """Return the output of a forward pass, after which the model is as after a backward pass."""
    output = forward()
    _reshard(model)
    return output


def _reshard(model: Any) -> None:
    """Let a model have this rank's parts of its parameters alone; they may just be gathered."""
    for group in _groups_of(model):
        group.wait_for_unshard()
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            module.reshard()


def _groups_of(model: Any) -> Iterator[Any]:
    """Yield the groups of parameters of a model and its parts."""
    parts = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    for state in dict.fromkeys(module._get_fsdp_state() for module in parts):  # noqa: SLF001
        yield from _groups_in(state)


def _groups_in(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # one in earlier versions of torch
    return several if several is not None else [*filter(None, [state._fsdp_param_group])]  # noqa: SLF001


def _check(groups: list[Any], parameters: list[Any]) -> None:
    """Refuse what a program does with gradients before they are means over the rows."""
    names = "gradient_divide_factor", "_all_reduce_hook"
    if any(getattr(group, name, None) is not None for group in groups for name in names):
        raise ConfigurationError(
            "--survive: set_gradient_divide_factor and set_all_reduce_hook have no effect on the mean over the rows that"
            " train; leave them out, or start the program without --survive."
        )
    hooks = [
        hook
        for p in parameters
        for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()
    ]
    if not all(str(getattr(hook, "__module__", "")).startswith("dlrover.") for hook in hooks):
        raise ConfigurationError(
            "--survive: an optimizer in the backward pass (register_post_accumulate_grad_hook) steps before gradients are"
            " means over the rows; step it after the pass, or start the program without --survive."
        )
