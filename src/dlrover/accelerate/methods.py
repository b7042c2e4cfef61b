"""Lists of methods in the original's form, as strategies: ``["fsdp", ("amp_native", {"dtype": "bf16"})]``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.records import Strategy

Fields = dict[str, Any]
"""Fields of the strategy; besides, ``data`` and ``sharded`` until the ranks are divided."""

_log = logging.getLogger(__name__)

SIZES = {
    "data": "data", "zero": "dp_shard", "tensor": "tp", "pipeline": "pp", "pipe": "pp",
    "sequence": "cp", "expert": "ep",
}  # fmt: skip
"""Names of a parallel mode, and the degrees that they set."""
DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "fp32": "fp32", "float32": "fp32",
}  # fmt: skip
ALWAYS = {
    "backward_prefetch", "forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params",
    "wrap_trainable_outmost", "fsdp_wrap_params_outmost", "atorch_size_based_min_num_params",
}  # fmt: skip
"""Options of FSDP that ``fully_shard`` decides by itself."""
INSTEAD = {
    "half": "('amp_native', {'dtype': 'bf16'}), which keeps the weights in fp32",
    "fp8": "('amp_native', {'dtype': 'bf16'}): strategies in fp8 are predicted, and not applied",
    "mixed_parallel": "('parallel_mode', ([('tensor', 2), ('pipeline', 2), ('data', 2)], None)) with the sizes",
    "deepspeed_3d_parallel": "('parallel_mode', ([('tensor', 2), ('pipeline', 2), ('data', 2)], None)) with the sizes",
    "ds_3d_parallel": "('parallel_mode', ([('tensor', 2), ('pipeline', 2), ('data', 2)], None)) with the sizes",
    "mixed_precision": "the method amp_native",
}
"""What to write for methods and options of the original that are not here."""


def of_methods(methods: Sequence[object], world_size: int, batch: int = 0) -> Strategy:
    """Return the strategy of a list of names, ``(name, config)`` and ``(name, config, tunable)``.

    If no method sets ``micro_batch``, a rank takes its part of the ``batch`` at once, or in four passes for each stage
    of a pipeline.

    Raises:
        ConfigurationError: a method or its config is unknown, or the sizes do not fit ``world_size``.
    """
    found: Fields = {"precision": "fp32"}
    for item in methods:
        name, config = _parts(item)
        method = METHODS.get(name)
        if method is None:
            raise ConfigurationError(
                f"load_strategy has the method {name!r}; {_accepted(name, METHODS)}."
            )
        method(found, config)
    return _divided(found, world_size, batch)


def _parts(item: object) -> tuple[str, Any]:
    match item:
        case str():
            return item, None
        case (str() as name, config) | (str() as name, config, bool()):
            return name, config
    raise ConfigurationError(
        f"load_strategy has {item!r}; accepted are a name, (name, config) and (name, config, tunable)."
    )


def _divided(found: Fields, world_size: int, batch: int) -> Strategy:
    """Divide the ranks that no other method needs among copies and shards."""
    data, sharded = found.pop("data", None), found.pop("sharded", False)
    Strategy(**found)  # refuses sizes that are no positive integers
    fixed = 1
    for name in ("tp", "pp", "cp"):
        fixed *= found.get(name, 1)
    if world_size % fixed:
        raise ConfigurationError(
            f"parallel_mode has the sizes tensor x pipeline x sequence {found.get('tp', 1)} x {found.get('pp', 1)}"
            f" x {found.get('cp', 1)}; they must divide the {world_size} ranks of this world."
        )
    ranks = world_size // fixed
    if "dp_shard" in found:
        if ranks % found["dp_shard"]:
            raise ConfigurationError(
                f"parallel_mode: zero is {found['dp_shard']}; it must divide the {ranks} ranks that remain for data."
            )
        found["dp_replicate"] = ranks // found["dp_shard"]
    elif sharded:
        found["dp_shard"] = ranks
    else:
        found["dp_replicate"] = ranks
        found["zero"] = 0 if found.get("cp", 1) == 1 else found.get("zero", 0)
    if data not in (None, found.get("dp_replicate", 1), ranks):
        _log.info("The data-parallel size is %d, not %d: the world has %d ranks.", ranks, data, world_size)  # fmt: skip
    passes = 4 * found["pp"] if found.get("pp", 1) > 1 else 1
    found.setdefault("micro_batch", max(1, -(-batch // (ranks * passes))))
    return Strategy(**found)


def _mapping(method: str, config: Any, accepted: Sequence[str]) -> Mapping[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"{method} has the config {config!r}; accepted is a dict with {', '.join(accepted)}."
        )
    for key in config:
        if key not in accepted and key not in ALWAYS:
            raise ConfigurationError(
                f"{method} has the option {key!r}; {_accepted(key, accepted)}."
            )
    return config


def _accepted(name: object, accepted: Iterable[str]) -> str:
    instead = INSTEAD.get(str(name))
    return f"write {instead}" if instead else f"accepted are {', '.join(accepted)}"


def _class_names(config: Any) -> tuple[str, ...]:
    classes = config if isinstance(config, tuple | list | set) else (config,)
    for item in classes:
        if not isinstance(item, str | type):
            raise ConfigurationError(
                f"load_strategy has {item!r} as the class of a module; accepted are classes and their names."
            )
    names = [item if isinstance(item, str) else item.__name__ for item in classes]
    # The order of a set is another one on each rank.
    return tuple(sorted(names) if isinstance(config, set) else names)


def _zero(stage: int) -> Callable[[Fields, Any], None]:
    def method(found: Fields, config: Any) -> None:
        options = _mapping(
            f"zero{stage} or fsdp", config, ["atorch_wrap_cls", "cpu_offload", "sharding_strategy"]
        )
        found.update(zero=stage, sharded=True)
        if "atorch_wrap_cls" in options:
            found["blocks"] = _class_names(options["atorch_wrap_cls"])
        found["offload"] = bool(options.get("cpu_offload", found.get("offload", False)))
        if "SHARD_GRAD_OP" in str(options.get("sharding_strategy", "")):
            found["zero"] = 2

    return method


def _parallel_mode(found: Fields, config: Any) -> None:
    if config is None:
        return  # all ranks are data-parallel
    if (
        not isinstance(config, tuple | list)
        or not config
        or not isinstance(config[0], list | tuple)
    ):
        raise ConfigurationError(
            f"parallel_mode has the config {config!r}; accepted is ([(name, size), ...], None)."
        )
    if len(config) > 1 and config[1] is not None:
        raise ConfigurationError(
            f"parallel_mode has the ranks {config[1]!r}; accepted is None: ranks of tensor are nearest, then those"
            " of sequence, data and pipeline."
        )
    for item in config[0]:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ConfigurationError(f"parallel_mode has {item!r}; accepted is (name, size).")
        name, size = item
        if name not in SIZES:
            raise ConfigurationError(
                f"parallel_mode has the name {name!r}; accepted are {', '.join(SIZES)}."
            )
        found[SIZES[name]] = size


def _auto_ddp(found: Fields, config: Any) -> None:
    _mapping("auto_ddp", config, [])


def _amp_native(found: Fields, config: Any) -> None:
    options = (
        {"dtype": config} if isinstance(config, str) else _mapping("amp_native", config, ["dtype"])
    )
    dtype = str(options.get("dtype", "bf16"))
    found["precision"] = DTYPES.get(dtype.removeprefix("torch."), "")
    if not found["precision"]:
        raise ConfigurationError(
            f"amp_native: dtype is {dtype!r}; accepted are {', '.join(DTYPES)}."
        )


def _checkpoint(found: Fields, config: Any) -> None:
    found["recompute"] = "full"
    if config in ("full", "selective"):
        found["recompute"] = config
    elif isinstance(config, Mapping):
        options = _mapping("checkpoint", config, ["wrap_class", "mode", "no_reentrant"])
        found["recompute"] = options.get("mode", "full")
        if "wrap_class" in options:
            found["blocks"] = _class_names(options["wrap_class"])
    elif config is not None:
        found["blocks"] = _class_names(config)


def _compile(found: Fields, config: Any) -> None:
    _mapping("native_dynamo", config, [])
    found["compile"] = True


def _tensor_parallel(found: Fields, config: Any) -> None:
    options = _mapping("tensor_parallel", config, ["plan", "size", "sequence_parallel"])
    plan = options.get("plan", {})
    if not isinstance(plan, Mapping):
        raise ConfigurationError(
            f"tensor_parallel: plan is {plan!r}; accepted is a dict of patterns of module names and their styles."
        )
    found["tensor_rules"] = tuple(plan.items())
    found["sequence_parallel"] = options.get("sequence_parallel", True)
    if "size" in options:
        found["tp"] = options["size"]


def _pipeline_parallel(found: Fields, config: Any) -> None:
    options = _mapping("pipeline_parallel", config, ["size", "schedule", "virtual", "micro_batch"])
    names = {"size": "pp"}
    found.update({names.get(key, key): value for key, value in options.items()})


def _sequence_parallel(found: Fields, config: Any) -> None:
    options = _mapping("sequence_parallel", config, ["size", "method"])
    found["context"] = options.get("method", "ulysses")
    if "size" in options:
        found["cp"] = options["size"]


def _module_replace(found: Fields, config: Any) -> None:
    _log.info("module_replace has nothing to replace: attention runs PyTorch's fused kernels.")


METHODS: Mapping[str, Callable[[Fields, Any], None]] = {
    "zero1": _zero(1),
    "zero2": _zero(2),
    "fsdp": _zero(3),
    "fsdp2": _zero(3),
    "parallel_mode": _parallel_mode,
    "auto_ddp": _auto_ddp,
    "amp_native": _amp_native,
    "tensor_parallel": _tensor_parallel,
    "module_replace": _module_replace,
    "checkpoint": _checkpoint,
    "native_dynamo": _compile,
    "pipeline_parallel": _pipeline_parallel,
    "sequence_parallel": _sequence_parallel,
}
"""Methods by the original's names."""
