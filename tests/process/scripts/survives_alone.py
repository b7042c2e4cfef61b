"""The training of ``survives.py`` in one process: ``survives_alone.py PROGRAM RANKS OUT``.

Standard input has a line for each step: the sum of the weights, the norm of the gradients, and the ranks that are known
to have trained. It prints the ranks whose gradients the step has. A step that is none of them, and final weights in
``OUT/weights.pt`` that are not those of this training, are an error.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from survives_model import BATCH, DROPOUT, PASS, loss_of, make, total

PROGRAM, RANKS, OUT = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
ROW = 2 if PROGRAM == "hsdp" else 1
NOISE = 1e-8
"""Largest difference that the order of summation makes, as a fraction of a value."""
model, optimizer, scheduler = make(torch.nn.Linear)
parameters = list(model.parameters())


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    """Return what a rank adds to the gradients of a step."""
    optimizer.zero_grad()
    if PROGRAM == "replicas":  # one for all
        for index in range(BATCH // PASS):
            torch.manual_seed(hash((0, step, index)) & 0x7FFF_FFFF_FFFF_FFFF)
            first = BATCH * step + PASS * index
            loss = loss_of(model, range(first, first + PASS), DROPOUT)
            (loss * PASS / BATCH).backward()
    else:
        first = (step * RANKS + rank) * PASS
        loss_of(model, range(first, first + PASS)).backward()
    return [p.grad.clone() for p in parameters]


def candidates(known: list[int]) -> Iterator[list[int]]:
    """Yield the ranks that may have trained: those known to have, then each group of whole rows."""
    yield known
    rows = range(RANKS // ROW)
    for count in range(len(rows), 0, -1):
        for chosen in itertools.combinations(rows, count):
            yield [rank for rank in range(RANKS) if rank // ROW in chosen]


for number, line in enumerate(sys.stdin):
    weights, norm, *known = line.split()
    by_rank = [gradients(number, r) for r in range(1 if PROGRAM == "replicas" else RANKS)]
    for ranks in [[0]] if PROGRAM == "replicas" else candidates([*map(int, known)]):
        parts = [[by_rank[rank][i] for rank in ranks] for i in range(len(parameters))]
        means = [torch.stack(part).mean(0) for part in parts]
        if math.isclose(float(torch.nn.utils.get_total_norm(means)), float(norm), rel_tol=NOISE):
            break
    else:
        sys.exit(f"step {number}: no ranks have gradients of the norm {norm}")
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad = mean
    optimizer.step()
    scheduler.step()
    own = total(parameters)
    if not math.isclose(own, float(weights), rel_tol=NOISE):
        sys.exit(f"step {number}: the sum of the weights is {own} here and {weights} there")
    sys.stdout.write(" ".join(map(str, ranks)) + "\n")
for own, other in zip(parameters, torch.load(OUT / "weights.pt"), strict=True):
    torch.testing.assert_close(own.detach(), other, rtol=0, atol=1e-7)
