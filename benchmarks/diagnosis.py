#!/usr/bin/env python3
"""How many excerpts of public issue threads get the cause that a person gave them: python benchmarks/diagnosis.py.

Prints one line for each cause and writes JSON. *First* is the first run of the table of causes on the
excerpts, before it was tuned on any of them; *now* is the table as it is.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrover.master.diagnosis_rules import table
from dlrover.spec.failure import Origin
from tests.support.corpus import Case, Log, read, read_logs

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "master" / "corpus"
RESULTS = Path(__file__).resolve().parent / "results" / "diagnosis.json"
HELD_OUT = 3
"""Every so manieth case was never used to tune the table."""
SECOND_GO = 16
"""Cases of the first of the two later goes."""
REPETITIONS = 20


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS, help="Where the figures go.")
    arguments = parser.parse_args()
    logs = read_logs(CORPUS / "blind.toml")
    cases, later = read(CORPUS / "public.toml"), read(CORPUS / "later.toml")
    groups = {
        "tuned on": [c for n, c in enumerate(cases) if n % HELD_OUT != HELD_OUT - 1],
        "held out": [c for n, c in enumerate(cases) if n % HELD_OUT == HELD_OUT - 1],
        "unseen, first go": later[:SECOND_GO],
        "unseen, second go": later[SECOND_GO:],
    }
    figures = {
        "groups": {name: _accuracy(group) for name, group in groups.items()},
        "causes": {cause: _accuracy(group) for cause, group in _by_cause((*cases, *later)).items()},
        "logs": _of_logs(logs),
        "microseconds": round(_cost((*cases, *later)) * 1e6),
    }
    print(f"{'':<20} {'cases':>6} {'first':>6} {'now':>6}")
    for name, counts in {**figures["groups"], **figures["causes"]}.items():  # type: ignore[dict-item]
        print(f"{name:<20} {counts['cases']:>6} {counts['first']:>6} {counts['now']:>6}")
    print("logs:", figures["logs"])
    print(f"{figures['microseconds']} µs for a verdict, on average")
    arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def _accuracy(cases: Sequence[Case]) -> dict[str, int]:
    verdicts = [case.verdict() for case in cases]
    right = sum(
        (v.cause, v.origin) == (c.cause, c.origin) for v, c in zip(verdicts, cases, strict=True)
    )
    return {"cases": len(cases), "first": sum(not case.first for case in cases), "now": right}


def _of_logs(logs: Sequence[Log]) -> dict[str, int]:
    """How many logs get the right fault and cause, and a verdict that would end or repeat the wrong job.

    That is a fault of the infrastructure that would end the job, or a bug that would be restarted as one.
    """
    pairs = [(log, table().diagnose_log(log.text)) for log in logs]
    wrong = [(log, v.origin) for log, v in pairs if v.origin not in log.origins]
    bug = [Origin.USER]
    return {
        "cases": len(logs),
        "fault": len(logs) - len(wrong),
        "cause": sum(v.cause in log.causes for log, v in pairs),
        "dangerous": sum(
            origin is Origin.USER or (origin is Origin.INFRASTRUCTURE and log.origins == bug)
            for log, origin in wrong
        ),
    }


def _by_cause(cases: Sequence[Case]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = collections.defaultdict(list)
    for case in sorted(cases, key=lambda case: case.cause):
        found[case.cause].append(case)
    return found


def _cost(cases: Sequence[Case]) -> float:
    """CPU seconds for one verdict."""
    began = time.process_time()
    for _ in range(REPETITIONS):
        for case in cases:
            case.verdict()
    return (time.process_time() - began) / (REPETITIONS * len(cases))


if __name__ == "__main__":
    main()
