"""``dlrover ckpt``: list, show, verify, convert and delete stored checkpoints, and have a running job store one."""

from __future__ import annotations

import time
from enum import Enum
from typing import Annotated, Any

import typer

from dlrover import extras
from dlrover.cli import output as outputs
from dlrover.cli.output import Form, Output, print_json, print_table, size
from dlrover.cli.selecting import of_job
from dlrover.errors import ConfigurationError, ExitCode
from dlrover.spec.jobdir import JobDir
from dlrover.spec.words import counted

TOOLS, NEEDS = "dlrover.checkpoint.tools.tools", ("dlrover ckpt", "torch")
SHOWN = 20
"""Problems of a step that the text output prints; JSON has all of them."""

app = typer.Typer(
    name="ckpt",
    help="List, show, verify, convert and delete stored checkpoints, and have a running job store one.",
    no_args_is_help=True,
)


class TargetFormat(str, Enum):
    """Target format of a conversion."""

    DCP = "dcp"
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    FLASH = "flash"


Directory = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint directory, or the URL of one.")
]


@app.command("list")
def list_(path: Directory, output: Output = Form.TEXT) -> None:
    """List the stored steps, the newest first. Reads only names and sizes."""
    tools = extras.load(TOOLS, *NEEDS)
    found = tools.listing(path)
    if output is Form.JSON:
        print_json(found)
        return
    print_table([("step", "stored", "ranks", "files", "size", "state"), *map(_row, found)])


def _row(item: Any) -> tuple[str, ...]:
    stored = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.time))
    state = f"{item.state}, latest" if item.latest else item.state
    ranks = "-" if item.ranks is None else str(item.ranks)
    return str(item.step), stored, ranks, str(item.files), size(item.nbytes), state


@app.command()
@of_job()
def save(
    job: JobDir,
    reason: Annotated[
        str, typer.Option(help="Reason, recorded in the job's events.")
    ] = "dlrover ckpt save",
    output: Output = Form.TEXT,
) -> None:
    """Have a running job store its newest memory checkpoint now; its training goes on."""
    from dlrover.dashboard.inspect import queries  # noqa: PLC0415 - loads grpc

    sentence = queries.save(job, reason)
    reply = {"job_dir": str(job.path), "message": sentence}
    outputs.show(reply, output, lambda *_: print(sentence))


@app.command()
def show(
    path: Directory,
    step: Annotated[int | None, typer.Option(help="Step; by default the newest.")] = None,
    output: Output = Form.TEXT,
) -> None:
    """Show a step's tensors and the names of its plain values."""
    tools = extras.load(TOOLS, *NEEDS)
    found = tools.describe(path, tools.chosen(path, step))
    if output is Form.JSON:
        print_json(found)
        return
    rows = [("tensor", "type", "shape", "parts", "size", "")]
    for tensor in found.tensors:
        note = "differs by rank" if tensor.differs else ""
        shape = str(list(tensor.shape))
        parts, nbytes = str(tensor.parts), size(tensor.nbytes)
        rows.append((tensor.name, tensor.dtype, shape, parts, nbytes, note))
    print_table(rows)
    print(f"Plain values: {', '.join(found.values) or 'none'}")
    print(
        f"Step {found.step}, ranks: {found.ranks}, tensors: {len(found.tensors)} with {found.elements}"
        f" elements in {size(found.nbytes)}, files: {size(found.stored_nbytes)}."
    )


@app.command()
def verify(
    path: Directory,
    step: Annotated[str, typer.Option(help="Step, or all; by default the newest.")] = "",
    output: Output = Form.TEXT,
) -> None:
    """Read all of a step and compare it with its checksums. Exit code 3 if it is damaged."""
    tools = extras.load(TOOLS, *NEEDS)
    if step == "all":
        tools.chosen(path, None)
        steps = tools.finished(path)
    else:
        steps = [tools.chosen(path, _number(step))]
    found = [tools.verify(path, number) for number in steps]
    if output is Form.JSON:
        print_json(found)
    for item in found if output is Form.TEXT else ():
        _print_verification(item)
    if not all(item.whole for item in found):
        raise typer.Exit(ExitCode.INFRASTRUCTURE)


def _number(step: str) -> int | None:
    if step and not step.isdecimal():
        raise ConfigurationError(f"--step is {step!r}; it must be a number or all.")
    return int(step) if step else None


def _print_verification(item: Any) -> None:
    state = "whole" if item.whole else "damaged"
    print(f"Step {item.step} is {state}: {counted(item.files, 'file')}, {size(item.nbytes)} read.")
    for problem in item.problems[:SHOWN]:
        tensor = f", tensor {problem.tensor}" if problem.tensor else ""
        print(f"  {problem.file}{tensor}: {problem.problem}")
    if len(item.problems) > SHOWN:
        print(f"  and {len(item.problems) - SHOWN} more")
    if item.unknown:
        print(f"  Not of the step: {', '.join(item.unknown)}")


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="Checkpoint directory, DCP directory, .safetensors or torch.save file."
        ),
    ],
    destination: Annotated[
        str, typer.Argument(help="File or directory to create; it must not exist.")
    ],
    to: Annotated[TargetFormat, typer.Option(help="Format of the destination.")],
    step: Annotated[
        int | None,
        typer.Option(help="Step of the source, by default the newest; or the number of a new one."),
    ] = None,
    trusted: Annotated[
        bool,
        typer.Option("--trusted", help="Read a DCP directory, whose metadata can run any program."),
    ] = False,
    output: Output = Form.TEXT,
) -> None:
    """Convert a checkpoint to another format; the parts of each tensor are joined."""
    conversion = extras.load("dlrover.checkpoint.tools.convert", *NEEDS)
    found = conversion.convert(source, destination, to.value, step, trusted=trusted)
    if output is Form.JSON:
        print_json(found)
        return
    number = "" if found.step is None else f" of step {found.step}"
    are = "is" if found.tensors == 1 else "are"
    print(
        f"{counted(found.tensors, 'tensor')}{number}, {size(found.nbytes)}, {are} in {found.destination}."
    )
    if found.differing:
        print(f"Ranks differed in these; one rank's were taken: {', '.join(found.differing)}")


@app.command()
def prune(
    path: Directory,
    keep: Annotated[int, typer.Option(help="Number of newest steps to keep.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing.")] = False,
    output: Output = Form.TEXT,
) -> None:
    """Delete old steps, but never the newest whole one, which is verified first."""
    found = extras.load(TOOLS, *NEEDS).prune(path, keep, dry_run=dry_run)
    if output is Form.JSON:
        print_json(found)
        return
    done = "Would delete" if dry_run else "Deleted"
    for item in found.deleted:
        print(f"{done} step {item.step}, {size(item.nbytes)}.")
    kept = ", ".join(map(str, found.kept)) or "none"
    if not found.deleted:
        print("There is nothing to delete.")
    print(f"Steps kept: {kept}.")
