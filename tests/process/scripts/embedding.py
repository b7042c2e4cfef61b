"""Rows on embedding servers beside a dict: ``embedding.py OUT``. A saved step comes before ``OUT/saved``.

It goes on once ``OUT/go`` exists, with the rows that were saved, and writes the numbers of rows to ``OUT/rows``.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

from dlrover.embedding import Initializer, checkpoints, open_table


def main(out: Path) -> None:
    table = open_table(
        "users", 4, optimizer="sgd", learning_rate=1.0, initializer=Initializer("constant", 3.0)
    )
    saves = checkpoints(str(out / "tables"))
    model: dict[int, np.ndarray] = {}
    chance = np.random.default_rng(int(os.environ["RANK"]))
    train(table, model, chance, 10)
    saves.save(10)
    saves.wait()
    (out / "saved").touch()
    while not (out / "go").exists():
        time.sleep(0.02)
    train(table, model, chance, 10)
    (out / "rows").write_text(f"{len(table)} {len(model)}")


def train(
    table: object, model: dict[int, np.ndarray], chance: np.random.Generator, steps: int
) -> None:
    for _ in range(steps):
        keys = chance.choice(5000, 500, replace=False)
        for key, row in zip(keys.tolist(), table.lookup(keys), strict=True):
            assert (row == model.setdefault(key, np.full(4, 3.0))).all(), (key, row, model[key])
        gradients = chance.integers(-8, 8, (500, 4)).astype(np.float32)
        table.update(keys, gradients)
        for key, gradient in zip(keys.tolist(), gradients, strict=True):
            model[key] = model[key] - gradient


if __name__ == "__main__":
    main(Path(sys.argv[1]))
