"""What users did, in the order of time: ratings of films that are downloaded, or clicks that are made up."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

WHEEL = "recbole==1.2.1"
"""A package that carries MovieLens-100k; its licence forbids to put the ratings into other repositories."""
FOLDER = "recbole/dataset_example/ml-100k/ml-100k"
HISTORY = 5
"""Films that the user liked last, which are a feature."""
LIKED = 4.0
"""Stars of a film that is liked."""
USERS, ITEMS, DIM = 1_000, 2_000, 4
"""Of the clicks that are made up: their users, their items, and the numbers of a true vector."""


class Events(NamedTuple):
    """Events in the order of time."""

    keys: dict[str, Tensor]
    """Keys of each feature, ``(n, length)``."""
    numbers: Tensor
    """Numbers that are known before the event, ``(n, d)``."""
    happened: Tensor
    """Whether the user liked the film or clicked, ``(n,)``."""
    chance: Tensor | None = None
    """The true probability, where it is known."""

    def __len__(self) -> int:
        return len(self.happened)

    def at(self, places: slice) -> Events:
        """Return some of them."""
        keys = {name: column[places] for name, column in self.keys.items()}
        chance = None if self.chance is None else self.chance[places]
        return Events(keys, self.numbers[places], self.happened[places], chance)


def movielens() -> Events:
    """100,000 ratings of 1,682 films by 943 users in 1997 and 1998; a film with 4 stars or more is liked.

    Raises:
        OSError: They cannot be downloaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            folder,
            WHEEL,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(
                f"pip download {WHEEL}: {(done.stderr.strip() or 'failed').splitlines()[-1]}"
            )
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            ratings, users, items = (
                wheel.read(f"{FOLDER}.{kind}").decode().splitlines()[1:]
                for kind in ("inter", "user", "item")
            )
    return _events(
        np.array([line.split("\t") for line in ratings], np.float64),
        {int(user): rest for user, *rest in (line.split("\t") for line in users)},
        {int(item): rest for item, *rest in (line.split("\t") for line in items)},
    )


def _events(
    ratings: np.ndarray, users: dict[int, list[str]], items: dict[int, list[str]]
) -> Events:
    ratings = ratings[np.argsort(ratings[:, 3], kind="stable")]
    liked = ratings[:, 2] >= LIKED
    columns: dict[str, list[object]] = {
        name: [] for name in ("user", "item", "age", "gender", "occupation", "year", "history")
    }
    numbers: list[tuple[float, ...]] = []
    histories: dict[int, list[int]] = {}
    seen: dict[tuple[str, int], list[float]] = {}
    for (user, item), time, good in zip(
        ratings[:, :2].astype(int).tolist(), ratings[:, 3], liked, strict=True
    ):
        age, gender, occupation, _ = users[user]
        row = (user, item, int(age) // 5, gender, occupation, items[item][1])
        for name, value in zip(columns, row, strict=False):
            columns[name].append([_number(value)])
        history = histories.setdefault(user, [])
        columns["history"].append((history[-HISTORY:] + [-1] * HISTORY)[:HISTORY])
        of_user, of_item = (
            seen.setdefault(key, [0.0, 0.0, time]) for key in (("user", user), ("item", item))
        )
        numbers.append((*_rates(of_user), *_rates(of_item), np.log1p(time - of_user[2])))
        for counts in (of_user, of_item):
            counts[0], counts[1], counts[2] = counts[0] + 1, counts[1] + good, time
        if good:
            history.append(item)
    return Events(
        {name: torch.tensor(values) for name, values in columns.items()},
        torch.tensor(np.array(numbers), dtype=torch.float32),
        torch.tensor(liked, dtype=torch.float32),
    )


def _rates(counts: list[float]) -> tuple[float, float]:
    """How many events there were before, and the share of likes among them."""
    return float(np.log1p(counts[0])), (counts[1] + 5.5) / (counts[0] + 10)


def _number(value: object) -> int:
    """A key for a value: itself, or a hash of a text."""
    if isinstance(value, int):
        return value
    return int.from_bytes(str(value).encode()[:7].ljust(7), "little")


def clicks(count: int, seed: int = 0) -> Events:
    """Clicks that follow a factorization machine: users and items as often as in a power law with exponent 1.05.

    Events of one user and item are alike, so ``chance`` is the best possible prediction.
    """
    random = np.random.default_rng(seed)
    ids = [_zipf(random, count, size) for size in (USERS, ITEMS)]
    weights = [random.normal(0, 0.7, size) for size in (USERS, ITEMS)]
    vectors = [random.normal(0, 0.6, (size, DIM)) for size in (USERS, ITEMS)]
    logits = sum(weight[id_] for weight, id_ in zip(weights, ids, strict=True)) - 1.0
    logits += (vectors[0][ids[0]] * vectors[1][ids[1]]).sum(1)
    chance = 1 / (1 + np.exp(-logits))
    keys = {
        name: torch.tensor(id_)[:, None] for name, id_ in zip(("user", "item"), ids, strict=True)
    }
    return Events(
        keys,
        torch.ones(count, 1),
        torch.tensor(random.random(count) < chance, dtype=torch.float32),
        torch.tensor(chance, dtype=torch.float32),
    )


def _zipf(random: np.random.Generator, count: int, size: int) -> np.ndarray:
    shares = np.arange(1, size + 1) ** -1.05
    return np.searchsorted(np.cumsum(shares / shares.sum()), random.random(count)).clip(
        max=size - 1
    )
