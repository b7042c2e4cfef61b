"""The configuration of an estimator's training: one class, or several that are merged. It needs no TensorFlow."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dlrover.errors import ConfigurationError

Reader = Any
"""An object with ``read_data_by_index_range(start, end)``, ``_data_nums`` and, if its records are not to be dealt,
``enable_dynamic_sharding`` as False; `dlrover.original.tensorflow.ElasticReader` is one."""


class ColumnLike(Protocol):
    """A column of the records."""

    name: str
    dtype: str
    is_sparse: bool
    is_label: bool


@dataclass(frozen=True)
class DataSet:
    """``train_set`` or ``eval_set`` of a configuration."""

    reader: Any = None
    columns: Sequence[ColumnLike] = ()
    reader_fn: Any = None
    """Function that returns the reader, in the process that reads."""
    batch_size: int = 0
    """0: that of the configuration."""
    epoch: int = 0
    """0: that of the configuration."""
    field_delim: str = ","

    def opened(self) -> Reader:
        """Return the reader."""
        return self.reader if self.reader is not None else self.reader_fn()


@dataclass(frozen=True)
class EstimatorConf:
    """What a training with an estimator needs, checked."""

    classifier_class: Callable[..., Any]
    model_dir: str
    train_set: DataSet
    eval_set: DataSet | None = None
    batch_size: int = 64
    epoch: int = 1
    log_steps: int = 100
    eval_steps: int = 100
    save_steps: int = 100
    save_secs: int = 0
    max_steps: int = 0
    keep_checkpoint_max: int = 5
    params: dict[str, Any] = field(default_factory=dict)


LEAST = {
    "batch_size": 1,
    "epoch": 1,
    "log_steps": 1,
    "eval_steps": 1,
    "save_steps": 1,
    "save_secs": 0,
    "max_steps": 0,
    "keep_checkpoint_max": 1,
}


class ConfigurationManagerMeta(type):
    """Type of the classes that are merged into one configuration."""


class ConfigurationManagerInterface(metaclass=ConfigurationManagerMeta):
    """Base of the classes that are merged into one configuration: the one with the higher ``priority`` wins."""

    priority = 0


def merged(classes: Sequence[type]) -> dict[str, Any]:
    """Return the attributes of classes; among equal priorities, a later class wins. Dicts are merged by key."""
    found: dict[str, Any] = {}
    for cls in sorted(classes, key=lambda cls: getattr(cls, "priority", 0)):
        for name, value in _attributes(cls).items():
            known = found.get(name, {})
            both = isinstance(known, Mapping) and isinstance(value, Mapping)
            found[name] = {**known, **value} if both else value
    return found


def _attributes(cls: type) -> dict[str, Any]:
    names = {name for base in cls.__mro__[:-1] for name in vars(base)}
    return {name: getattr(cls, name) for name in sorted(names) if not name.startswith("_")}


def load(path: str) -> EstimatorConf:
    """Return the configuration of a class, ``module.Class``.

    If it is a `ConfigurationManagerInterface`, the others that its module defines or imports are merged into it.

    Raises:
        ConfigurationError: there is no such class, or a value is wrong.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(f"--conf {path}: must name a class, as module.Class.")
    try:
        found = importlib.import_module(module)
        cls = getattr(found, name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(f"--conf {path}: there is no module {error.name}.") from error
    except AttributeError as error:
        raise ConfigurationError(f"--conf {path}: {module} has no class {name}.") from error
    if not isinstance(cls, ConfigurationManagerMeta):
        return checked([cls])
    others = [
        other for other in vars(found).values() if isinstance(other, ConfigurationManagerMeta)
    ]
    return checked([*(other for other in others if other is not cls), cls])


def checked(classes: Sequence[type]) -> EstimatorConf:
    """Return the configuration of classes.

    Raises:
        ConfigurationError: a value is missing or wrong.
    """
    given = merged(classes)
    known = {name: given[name] for name in EstimatorConf.__dataclass_fields__ if given.get(name)}
    for name in ("classifier_class", "model_dir", "train_set"):
        if name not in known:
            raise ConfigurationError(f"The configuration has no {name}.")
    for name, least in LEAST.items():
        value = given.get(name, least)
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigurationError(f"{name} is {value!r}; it must be a number from {least}.")
    for name in ("train_set", "eval_set"):
        if name in known:
            known[name] = _data_set(name, known[name], known)
    return EstimatorConf(**known)


def _data_set(name: str, given: Mapping[str, Any], conf: Mapping[str, Any]) -> DataSet:
    unknown = given.keys() - DataSet.__dataclass_fields__
    if unknown:
        raise ConfigurationError(
            f"{name} has {', '.join(map(repr, sorted(unknown)))}; it may have"
            f" {', '.join(DataSet.__dataclass_fields__)}."
        )
    data = DataSet(**given)
    if (data.reader is None) == (data.reader_fn is None):
        raise ConfigurationError(f"{name} needs a reader or a reader_fn, and not both.")
    if not data.columns:
        raise ConfigurationError(f"{name} has no columns.")
    size, epoch = conf.get("batch_size", 64), conf.get("epoch", 1)
    return replace(data, batch_size=data.batch_size or size, epoch=data.epoch or epoch)
