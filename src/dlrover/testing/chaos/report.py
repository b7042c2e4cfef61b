"""Report of a run: a row for each fault, the job's end, and the assertions that do not hold."""

from __future__ import annotations

import msgspec

from dlrover.spec.outcome import Goodput


class FaultRow(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. Times are seconds since it was injected."""

    fault: str
    target: str
    node: int = -1
    rank: int = -1
    pid: int = -1
    injected: float
    """Seconds since the job was started."""
    detected: float | None
    """None: the job did not report it."""
    training_again: float | None
    """None: the job never trained again; 0: training never stopped."""
    steps_lost: int | None = None
    """None: not measured."""
    verdict: str
    """The job's sentence about the fault, or what was observed."""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a whole run."""

    job_dir: str
    seed: int
    exit_code: int
    """The job's exit code."""
    reason: str
    """Why the job ended."""
    wall_seconds: float
    start_up_seconds: float
    """From the start to the first step."""
    steps: int
    """All completed steps, including those done again."""
    goodput: Goodput | None
    """As ``dlrover goodput`` shows it; None if the job left none."""
    faults: tuple[FaultRow, ...]
    not_injected: tuple[str, ...] = ()
    """Faults not injected because the job ended first."""
    left_behind: tuple[str, ...] = ()
    """Processes that outlived the job and were killed."""
    unmet: tuple[str, ...] = ()
    """A sentence for each assertion that does not hold."""


def goodput_in_words(report: ChaosReport) -> str:
    """Return a run's goodput: ``93.1 %``, ``at most 93.1 %`` or ``not measured``."""
    return "not measured" if report.goodput is None else report.goodput.in_words()


def _ratio(report: ChaosReport) -> float | None:
    return None if report.goodput is None else report.goodput.goodput_ratio


def unmet(report: ChaosReport, recovery: float | None, goodput: float | None) -> tuple[str, ...]:
    """Return a sentence for each assertion that does not hold, and for each process left behind."""
    found = []
    if recovery is not None:
        for row in report.faults:
            if row.training_again is None or row.training_again > recovery:
                took = "never" if row.training_again is None else f"{row.training_again:.2f} s"
                found.append(
                    f"{row.fault} ({row.target}): training again after {took}, "
                    f"--assert-recovery {recovery:g}"
                )
    if goodput is not None and (_ratio(report) or 0.0) < goodput:
        found.append(f"goodput {goodput_in_words(report)}, --assert-goodput {goodput:g}")
    if recovery is not None or goodput is not None:
        found += [f"{fault} was not injected: the job had ended" for fault in report.not_injected]
    found += [f"left behind: {line}" for line in report.left_behind]
    return tuple(found)
