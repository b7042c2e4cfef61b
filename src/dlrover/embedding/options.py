"""What a table is made of: its optimizer, who is admitted, and what expires."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
import numpy as np

from dlrover._native import tables
from dlrover._native.tables import Hyper
from dlrover._util import decoding
from dlrover.errors import ConfigurationError

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=0)]
InitializerKind: TypeAlias = Literal["constant", "uniform", "normal"]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
BLOOM_BYTES = 1 << 24
"""Default size of the Bloom filter's counters: one byte each, four of them for a key."""


class RowOptimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """RowOptimizer of a table's rows. Each row counts its own updates, so that any number of servers gives equal rows."""

    name: str
    """One of ``sgd``, ``momentum``, ``adagrad``, ``adadelta``, ``adam``, ``amsgrad``, ``radam``, ``adabelief``,
    ``lamb``, ``agd``, ``ftrl`` and ``group_adam``."""
    learning_rate: _Positive = 0.05
    beta1: _Share = 0.9
    """Decay of the mean, or the momentum; for ``ftrl``, its beta."""
    beta2: _Share = 0.999
    epsilon: _Penalty = 1e-8
    """For ``agd``, the floor of the divisor."""
    weight_decay: _Penalty = 0.0
    """Of ``sgd``, ``adam``, ``lamb`` and ``agd``."""
    l1: _Penalty = 0.0
    """Penalties of ``ftrl`` and ``group_adam``: L1, L2, and L21, the group lasso, which sets whole rows to zero."""
    l2: _Penalty = 0.0
    l21: _Penalty = 0.0


class CountAdmission(msgspec.Struct, frozen=True, tag="count", forbid_unknown_fields=True):
    """A key gets a row at its ``lookups``-th lookup; each waiting key takes 32 bytes."""

    lookups: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class BloomAdmission(msgspec.Struct, frozen=True, tag="bloom", forbid_unknown_fields=True):
    """As `CountAdmission` in a fixed number of bytes; a few keys are admitted early, since keys share counters."""

    lookups: Annotated[int, msgspec.Meta(ge=1, le=255)]
    nbytes: Annotated[int, msgspec.Meta(ge=1 << 14, lt=1 << 40)] = BLOOM_BYTES


class ChanceAdmission(msgspec.Struct, frozen=True, tag="chance", forbid_unknown_fields=True):
    """Each lookup of a key without a row gives it one with this probability."""

    probability: Annotated[float, msgspec.Meta(gt=0, le=1)]


Admission: TypeAlias = CountAdmission | BloomAdmission | ChanceAdmission


_ADMISSIONS: dict[type, str] = {
    type(None): "all", CountAdmission: "count", BloomAdmission: "bloom", ChanceAdmission: "chance",
}  # fmt: skip


class Expiry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows `HashTable.evict` removes: those that any of the conditions holds for."""

    seconds: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Seconds since the last lookup; 0: no limit."""
    steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Updates of the table since the last lookup; 0: no limit. Excludes ``seconds``."""
    norm: _Penalty = 0.0
    """Rows with a smaller Euclidean norm."""
    zeroed: bool = True
    """Rows that the penalties of the optimizer have set to zero."""


class Initializer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First values of a row. They depend on the seed and the key, and are equal on any server."""

    kind: InitializerKind = "uniform"
    """``normal`` is the sum of four uniform numbers, at most 3.5 standard deviations from 0."""
    scale: float = 0.05
    """The constant, the largest absolute value, or the standard deviation."""


class Spill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rows lie that have no room in memory: those that are used least.

    The files belong to one table of one process. A process that ends leaves none; what a killed one left is deleted
    by the next that spills to the same directory. They are no checkpoint: the last uses of rows are in memory.
    """

    directory: Annotated[str, msgspec.Meta(min_length=1)]
    """Each table makes a directory of its own in it."""
    nbytes: Annotated[int, msgspec.Meta(ge=1 << 18)]
    """Most bytes of a table's files. Seven eighths hold rows; the rest is room to write them together anew."""


class TableOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of a table."""

    dim: Annotated[int, msgspec.Meta(ge=1, le=tables.MAX_DIM)]
    optimizer: RowOptimizer
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    admission: Admission | None = None
    expiry: Expiry | None = None
    initializer: Initializer = Initializer()
    dtype: Dtype = "float32"
    """Type of stored values; states are float32, and so are rows that are returned."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Most bytes of the table; 0: no limit."""
    spill: Spill | None = None
    """Where further rows lie; None: rows stay in memory."""

    @property
    def counts_updates(self) -> bool:
        """Whether the last use of a row is a number of updates, and no time."""
        return self.expiry is not None and self.expiry.steps > 0

    def json(self) -> str:
        """Return the options as text, equal for equal options."""
        return msgspec.json.encode(self).decode()

    def native(self) -> tables.RowOptions:
        """Return what the table itself takes."""
        o, a = self.optimizer, self.admission
        epsilon = o.epsilon
        hyper = Hyper(o.learning_rate, o.beta1, o.beta2, epsilon, o.weight_decay, o.l1, o.l2, o.l21)
        return tables.RowOptions(
            dim=self.dim,
            kind=self.dtype,
            rule=o.name,
            hyper=hyper,
            seed=self.seed,
            initial=self.initializer.kind,
            scale=self.initializer.scale,
            admission=_ADMISSIONS[type(a)],
            threshold=a.lookups if isinstance(a, CountAdmission | BloomAdmission) else 0,
            chance=a.probability if isinstance(a, ChanceAdmission) else 1.0,
            counters=a.nbytes if isinstance(a, BloomAdmission) else 0,
            memory_bytes=self.memory_bytes,
        )


def difference(one: TableOptions, other: TableOptions) -> str:
    """Return what makes rows of two tables different ones, as values of the first; empty if rows fit both."""
    values = (
        ("dim", one.dim, other.dim),
        ("dtype", one.dtype, other.dtype),
        ("optimizer", one.optimizer.name, other.optimizer.name),
    )
    return ", ".join(f"{name} {mine}" for name, mine, theirs in values if mine != theirs)


def decoded(given: TableOptions | str) -> TableOptions:
    """Return checked options.

    Raises:
        ConfigurationError: A value is not accepted; it is named.
    """
    if not isinstance(given, str):
        _check_choices(given)
    try:
        text = given if isinstance(given, str) else msgspec.json.encode(given, enc_hook=_plain)
        made = decoding.json(text, TableOptions)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ConfigurationError(
            f"The options of an embedding table are wrong: {error}."
        ) from error
    if made.optimizer.name not in tables.RULES:
        raise ConfigurationError(
            f"optimizer is {made.optimizer.name!r}; accepted are {', '.join(tables.RULES)}."
        )
    if made.expiry is not None and made.expiry.seconds and made.expiry.steps:
        raise ConfigurationError("expiry has seconds and steps; one of them is accepted.")
    if made.spill is not None and not made.memory_bytes:
        raise ConfigurationError("memory_bytes is 0; with a spill, a limit is needed.")
    return made


def _plain(value: object) -> object:
    """Return a number of NumPy as one of Python."""
    if isinstance(value, np.number):
        return value.item()
    raise TypeError(f"{value!r} is no option")


def _check_choices(given: TableOptions) -> None:
    kind: object = getattr(given.initializer, "kind", given.initializer)
    choices: tuple[tuple[str, object, tuple[str, ...]], ...] = (
        ("dtype", given.dtype, get_args(Dtype)),
        ("initializer", kind, get_args(InitializerKind)),
    )
    for name, value, accepted in choices:
        if not isinstance(value, str) or value not in accepted:
            raise ConfigurationError(f"{name} is {value!r}; accepted are {', '.join(accepted)}.")
