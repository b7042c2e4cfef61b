"""Rows on embedding servers beside a dict: ``embedding.py OUT``. A saved step comes before ``OUT/saved``.

It goes on once ``OUT/go`` exists, with the rows that were saved. Then keys come by a power law, the commonest from one
server, until that one gets not much more than the others. It writes the numbers of rows to ``OUT/rows``, and what the
hottest server got as a multiple of the mean, before and after, to ``OUT/hottest``.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

from dlrover._native.tables import slots_of
from dlrover.embedding import Initializer, checkpoints, open_table

COOL = 1.4
"""Multiple of the mean: ``hot_server_ratio``, and what the servers' measurement of a few seconds may be wrong by."""


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
    before, after = cool(table, model, chance)
    (out / "hottest").write_text(f"{before} {after}")
    (out / "rows").write_text(f"{len(table)} {len(model)}")


def train(
    table: object, model: dict[int, np.ndarray], chance: np.random.Generator, steps: int
) -> None:
    for _ in range(steps):
        step(table, model, chance, chance.choice(5000, 500, replace=False))


def step(
    table: object, model: dict[int, np.ndarray], chance: np.random.Generator, keys: np.ndarray
) -> None:
    for key, row in zip(keys.tolist(), table.lookup(keys), strict=True):
        assert (row == model.setdefault(key, np.full(4, 3.0))).all(), (key, row, model[key])
    gradients = chance.integers(-8, 8, (len(keys), 4)).astype(np.float32)
    table.update(keys, gradients)
    for key, gradient in zip(keys.tolist(), gradients, strict=True):
        model[key] = model[key] - gradient


def cool(
    table: object, model: dict[int, np.ndarray], chance: np.random.Generator
) -> tuple[float, float]:
    """Train on a server that is hot; return what it gets as a multiple of the mean, before and after."""
    keys, group = np.arange(5000), table._group
    while group._placement.moves or len({*group._owners}) < 3:
        train(table, model, chance, 1)
    of_first = group._owners[slots_of(keys)] == 0
    keys = np.concatenate([keys[of_first][:30], keys[of_first][30:], keys[~of_first]])
    chance.shuffle(keys[30:])
    shares = np.arange(1, 5001) ** -1.05
    shares /= shares.sum()

    def hottest() -> float:
        asked = np.bincount(group._owners[slots_of(keys)], shares)
        return asked.max() * len(asked)

    before = hottest()
    while group._placement.moves or hottest() > COOL:
        step(table, model, chance, chance.choice(keys, 500, p=shares))
        time.sleep(0.02)
    return before, hottest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
