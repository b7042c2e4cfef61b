"""``dlrover chaos``: run a job on this machine, inject faults, and report what each one cost."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dlrover import config
from dlrover.cli import jobs
from dlrover.cli.output import Form, Output, print_table, show
from dlrover.errors import ConfigurationError, ExitCode

if TYPE_CHECKING:
    from dlrover.testing.chaos.report import ChaosReport, FaultRow
    from dlrover.testing.chaos.run import ChaosRun
    from dlrover.testing.chaos.verbs import Planned


def chaos(  # noqa: PLR0913 - each is an option of the command
    program: Annotated[
        list[str], typer.Argument(metavar="PROGRAM [ARGS]...", help="As for dlrover-run.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to run on this machine.")] = 4,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Workers on each node.")] = 1,
    faults: Annotated[
        str, typer.Option(help="Faults to inject, in this order: NAME,NAME,...")
    ] = "",
    every: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds between faults, each drawn at random from --faults."),
    ] = 0.0,
    duration: Annotated[
        float,
        typer.Option("--for", min=0.0, help="Seconds for which --every injects faults."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Chooses targets, and the faults of --every.")] = 0,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Directory of the program's Checkpointer.")
    ] = None,
    steps_file: Annotated[
        Path | None, typer.Option(help='JSON lines with a number "step" that the program writes.')
    ] = None,
    detect_within: Annotated[
        float, typer.Option(min=2.0, help="Seconds that a fault lasts which ends no process.")
    ] = 10.0,
    patience: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for a step.")] = 120.0,
    memory_mb: Annotated[int, typer.Option(min=1, help="MiB that memory-hog takes.")] = 512,
    slow_share: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="Part of the time that slow leaves a worker.")
    ] = 0.3,
    networks: Annotated[
        bool | None,
        typer.Option(
            "--networks/--no-networks",
            help="A network of its own for each node; by default for partition, where allowed.",
            show_default=False,
        ),
    ] = None,
    assert_recovery: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds until each fault is over, at most.")
    ] = None,
    assert_goodput: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Goodput of the job, at least.")
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop the job after the last fault.")
    ] = False,
    job_dir: Annotated[str, typer.Option(help="Directory of the job.")] = "",
    output: Output = Form.TEXT,
) -> None:
    """Run a job on this machine, inject faults, and show the outcome of each.

    Exits with the job's exit code; 0 for a job that --stop ended. If that is 0 and an assertion does not
    hold, exits with 6.
    """
    from dlrover.testing.chaos import report as reports  # noqa: PLC0415 - loads grpc
    from dlrover.testing.chaos.run import ChaosOptions, ChaosRun  # noqa: PLC0415
    from dlrover.testing.chaos.verbs import VerbSettings  # noqa: PLC0415

    env = config.environ()
    plan = _plan(faults, every, duration, seed)
    directory = jobs.create(env, "chaos", job_dir)
    with jobs.locked(directory):
        pass  # moves the files of an earlier job before anything reads them
    options = ChaosOptions(
        program=tuple(program),
        job_dir=directory.path,
        plan=tuple(plan),
        settings=VerbSettings(
            checkpoint_dir=checkpoint_dir,
            memory_mb=memory_mb,
            slow_share=slow_share,
            own_networks=_enter_network(networks, plan),
        ),
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        seed=seed,
        detect_within=detect_within,
        patience=patience,
        steps_file=steps_file,
        stop=stop,
    )
    run = ChaosRun(options, env, _say)
    run.check()
    report = _run(run)
    report = msgspec.structs.replace(
        report, unmet=reports.unmet(report, assert_recovery, assert_goodput)
    )
    show(report, output, lambda found, _: render(found))
    raise typer.Exit(exit_code(report, stopped=stop))


def _plan(faults: str, every: float, duration: float, seed: int) -> list[Planned]:
    from dlrover.testing.chaos import verbs  # noqa: PLC0415

    names = [name.strip() for name in faults.split(",")] if faults else list(verbs.DEFAULT)
    for name in names:
        if name not in verbs.VERBS:
            raise ConfigurationError(
                f"--faults names {name}; the faults are {', '.join(verbs.VERBS)}."
            )
    if bool(every) != bool(duration):
        raise ConfigurationError("--every and --for belong together: give both, or none.")
    if every:
        return verbs.at_random(names, every, duration, seed)
    return verbs.in_order(names, seed)


def _enter_network(wanted: bool | None, plan: list[Planned]) -> bool:
    """Move into a new network if wanted, or if useful and possible; return True if done."""
    from dlrover.testing.chaos import network  # noqa: PLC0415

    partition = any(planned.verb == "partition" for planned in plan)
    if wanted is False or (wanted is None and not partition):
        return False
    problem = network.why_not()
    if problem and wanted:
        raise ConfigurationError(
            f"--networks: no network can be made for each node ({problem}); that takes root and the "
            "programs ip, nsenter and unshare."
        )
    if problem:
        _say(f"No network can be made for each node ({problem}): partition stops its processes.")
        return False
    network.enter()
    _say("Each node has a network of its own, and none to the world: partition pulls its cable.")
    return True


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run(run: ChaosRun) -> ChaosReport:
    """Run the job; end it in an orderly way on a signal that ends a command."""
    caught: list[int] = []

    async def work() -> ChaosReport:
        task = asyncio.current_task()
        assert task is not None

        def on_signal(number: int) -> None:
            caught.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
        return await run.run()

    try:
        return asyncio.run(work())
    except asyncio.CancelledError:
        raise typer.Exit(ExitCode.SIGNAL_BASE + caught[0]) from None


def exit_code(report: ChaosReport, *, stopped: bool) -> int:
    """Return the command's exit code; ``stopped`` is True if --stop was given."""
    if stopped and report.exit_code == ExitCode.STOPPED and not report.not_injected:
        return ExitCode.NOT_MET if report.unmet else ExitCode.SUCCESS
    if report.exit_code:
        return report.exit_code
    return ExitCode.NOT_MET if report.unmet else ExitCode.SUCCESS


def render(report: ChaosReport) -> None:
    """Print the report of a run as text."""
    from dlrover.testing.chaos.report import goodput_in_words  # noqa: PLC0415 - loads grpc

    print_table([_HEADER, *map(_row, report.faults)])
    for fault in report.not_injected:
        print(f"{fault} was not injected: the job had ended.")
    print(f"The job left with exit code {report.exit_code}: {report.reason}")
    print(
        f"{report.steps} steps in {report.wall_seconds:.0f} s, goodput {goodput_in_words(report)}, "
        f"seed {report.seed}, job directory {report.job_dir}"
    )
    for sentence in report.unmet:
        print(f"Not met: {sentence}.")


_HEADER = ("fault", "target", "detected", "trains again", "steps lost", "verdict")


def _row(row: FaultRow) -> tuple[str, ...]:
    lost = "-" if row.steps_lost is None else str(row.steps_lost)
    detected = "-" if row.detected is None else f"{row.detected:.2f} s"
    return row.fault, row.target, detected, _again(row), lost, row.verdict


def _again(row: FaultRow) -> str:
    if row.training_again is None:
        return "never"
    return "went on" if row.training_again == 0.0 else f"{row.training_again:.2f} s"
