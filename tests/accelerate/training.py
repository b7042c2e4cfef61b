"""Cases of training under a strategy, several for each start of the ranks."""

import importlib.util
import json
import os
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "cases.py"
HUGGING_FACE = importlib.util.find_spec("transformers") is not None
EXACT = 2e-6
"""Largest relative difference of losses and gradient norms in fp32: orders of summation differ."""
HALF = 1e-2
"""Of losses where matrices are multiplied in bf16 or fp16."""


def check(forks, ranks, *cases):
    """Train all cases on so many ranks, and compare their 10 losses with those of one process."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_")}
    output = forks.ranks(
        ranks, SCRIPT, json.dumps(cases), env=env | {"OMP_NUM_THREADS": "1"}, timeout=240.0
    )
    reports = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("CASE ")]
    assert len(reports) == len(cases), output
    for case, report in zip(cases, reports, strict=True):
        half = case.get("half", False)
        assert report["loss"] < (HALF if half else EXACT), (case, report)
        assert half or report["norm"] < 10 * EXACT, (case, report)


def case(model, strategy=(), half=False, **options):
    """A case: the model's name, the strategy's fields or methods, and how the step is made."""
    fields = strategy if isinstance(strategy, list) else dict(strategy)
    return {"model": model, "strategy": fields, "half": half, **options}
