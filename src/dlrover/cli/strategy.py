"""``dlrover strategy``: the fastest parallel strategies of a model that fit a cluster."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from dlrover import extras
from dlrover.cli.output import Form, Output, print_json, print_table, write_file
from dlrover.errors import ConfigurationError, ExitCode, readable

if TYPE_CHECKING:
    from dlrover.planning.parallel.records import Prediction, Strategy, Transformer
    from dlrover.planning.parallel.rules import PlannedJob

BAR = 20
"""Characters of a memory bar."""
TOKENS = 4 << 20
"""Tokens of a step unless the global batch is given."""
SEQUENCE = 4096


class Precision(str, Enum):
    """Type of matrix products."""

    BF16 = "bf16"
    FP8 = "fp8"


def strategy(  # noqa: PLR0913 - each is an option of the command
    model: Annotated[
        str,
        typer.Argument(
            help="config.json of a Hugging Face model, or its directory; or MODULE:FUNCTION."
        ),
    ],
    accelerator: Annotated[str, typer.Option(help="Kind of accelerator, such as h100-80.")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster.")] = 1,
    per_node: Annotated[int, typer.Option(min=1, help="Accelerators of a node.")] = 8,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = SEQUENCE,
    global_batch: Annotated[
        int, typer.Option(min=0, help="Sequences of a step; by default those of 4 Mi tokens.")
    ] = 0,
    autocast: Annotated[
        bool,
        typer.Option(help="The program keeps fp32 weights under autocast if they are not sharded."),
    ] = False,
    precision: Annotated[Precision, typer.Option(help="Type of matrix products.")] = Precision.BF16,
    limit: Annotated[int, typer.Option(min=1, help="Strategies to show.")] = 10,
    html: Annotated[
        str, typer.Option(metavar="FILE", help="Write a page with memory and speed of all.")
    ] = "",
    output: Output = Form.TEXT,
) -> None:
    """Show the fastest parallel strategies of a model that fit a cluster. Exits with 3 if none does."""
    job = _job(model, accelerator, nodes, per_node, sequence, global_batch, precision)
    if autocast:
        job = replace(job, model=replace(job.model, autocast=True))
    from dlrover.planning.parallel.search import fitting  # noqa: PLC0415

    found = fitting(job)
    if html:
        from dlrover.cli import strategy_page  # noqa: PLC0415

        write_file("--html", html, strategy_page.render(job, found))
    if output is Form.JSON:
        print_json(_content(job, found[:limit]))
    else:
        _show(job, found, limit)
    if not found:
        raise typer.Exit(ExitCode.INFRASTRUCTURE)


def _job(
    model: str,
    accelerator: str,
    nodes: int,
    per_node: int,
    sequence: int,
    global_batch: int,
    precision: Precision,
) -> PlannedJob:
    with extras.needed("dlrover strategy", "planning"):
        from dlrover.planning.parallel.accelerators import (  # noqa: PLC0415 - needs the extra
            accelerator as known,
        )
        from dlrover.planning.parallel.records import Cluster  # noqa: PLC0415
        from dlrover.planning.parallel.rules import PlannedJob as Planned  # noqa: PLC0415
    cluster = Cluster(accelerator, nodes, per_node)
    if not known(accelerator).fp8 and precision is Precision.FP8:
        raise ConfigurationError(
            f"--precision is fp8: {accelerator} has no products in fp8. Use --precision bf16."
        )
    batch = global_batch or _batch(sequence, cluster.size)
    return Planned(_model(model), cluster, sequence, batch, precision=precision.value)


def _batch(sequence: int, size: int) -> int:
    """Sequences of about ``TOKENS`` tokens, at least one for every eighth accelerator, as a power of two."""
    wanted = max(TOKENS // sequence, size // 8, 1)
    return 1 << (wanted - 1).bit_length()


def _model(name: str) -> Transformer:
    """The model that the argument names.

    Raises:
        ConfigurationError: there is none, or it does not say its shape.
    """
    from dlrover.planning.parallel.records import Transformer  # noqa: PLC0415

    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.exists() or ":" not in name:
        with readable(str(path)):
            data = path.read_bytes()
        try:
            found = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigurationError(f"{path} is not valid JSON: {error}.") from error
    else:
        found = _called(name)
    return found if isinstance(found, Transformer) else Transformer.of(found)


def _called(name: str) -> Any:
    """What the function ``MODULE:FUNCTION`` returns: a shape, a configuration, or a model that has one."""
    sys.path.insert(0, "")
    try:
        made = _function(name)()
    finally:
        sys.path.remove("")
    return getattr(made, "config", made)


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    if not module or module.startswith("."):
        raise ConfigurationError(
            f"MODEL is {name}; accepted are a config.json, its directory, and MODULE:FUNCTION."
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"MODEL is {name}: {error}.") from error
    if not callable(found):
        raise ConfigurationError(
            f"MODEL is {name}, which is a {type(found).__name__}; accepted is a function without arguments."
        )
    return found


def _content(job: PlannedJob, found: list[tuple[Strategy, Prediction]]) -> Any:
    return {
        "model": job.model,
        "cluster": {"accelerator": job.cluster.accelerator, "accelerators": job.cluster.size},
        "sequence": job.sequence,
        "global_batch": job.global_batch,
        "strategies": [{"strategy": one, "prediction": predicted} for one, predicted in found],
    }


def _show(job: PlannedJob, found: list[tuple[Strategy, Prediction]], limit: int) -> None:
    from dlrover.planning.parallel.accelerators import accelerator  # noqa: PLC0415

    model, cluster = job.model, job.cluster
    print(
        f"{model.parameters / 1e9:.1f} B parameters on {cluster.size} x {cluster.accelerator}, "
        f"{job.global_batch} sequences of {job.sequence} tokens a step"
    )
    if not found:
        print("No strategy fits: more nodes, a larger batch or shorter sequences may help.")
        return
    room = accelerator(cluster.accelerator).memory_gib
    head = (
        "dp",
        "zero",
        "tp",
        "pp",
        "cp",
        "ep",
        "batch",
        "recompute",
        "memory",
        "",
        "tokens/s",
        "step",
    )
    rows = [head, *(_row(one, predicted, room) for one, predicted in found[:limit])]
    print_table(rows)
    print(
        f"{min(limit, len(found))} of {len(found)} combinations of degrees that fit. Memory: GiB of "
        f"{room:.0f}, with the interval of 80 % of runs. tokens/s: of one accelerator."
    )


def _row(one: Strategy, predicted: Prediction, room: float) -> tuple[str, ...]:
    filled = round(BAR * predicted.memory_gib / room)
    edge = min(BAR, round(BAR * predicted.memory_high / room))
    bar = "#" * filled + "-" * (edge - filled) + "." * (BAR - edge)
    stages = str(one.pp) if one.virtual == 1 else f"{one.pp} x {one.virtual}"
    shards = f"{one.dp_replicate} x {one.dp_shard}"
    some = f" in {one.recompute_layers} layers" if one.recompute_layers else ""
    extra = [one.recompute + some, *(["offload"] if one.offload else [])]
    if one.optimizer_bytes < 12:
        extra.append("8-bit optimizer")
    return (
        *(shards, str(one.zero), str(one.tp), stages, str(one.cp), str(one.ep)),
        *(str(one.micro_batch), ", ".join(extra)),
        f"{predicted.memory_gib:.1f} ({predicted.memory_low:.0f}-{predicted.memory_high:.0f})",
        *(bar, f"{predicted.tokens_per_second:,.0f}", f"{predicted.step_seconds:.2f} s"),
    )
