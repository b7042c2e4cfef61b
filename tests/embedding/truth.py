"""Trainings whose best possible result is known, on rows of a table."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrover.embedding.table import HashTable

ITEM, CAMPAIGN, BIAS, SESSION = (np.int64(number) << 58 for number in (1, 2, 3, 4))
"""What is added to keys, so that those of different features differ."""


class Clicks(NamedTuple):
    """Events whose chance is known."""

    keys: np.ndarray
    """``(n, features)``."""
    clicked: np.ndarray
    chance: np.ndarray


def _power_law(random: np.random.Generator, count: int, size: int) -> np.ndarray:
    shares = np.arange(1, size + 1) ** -1.05
    return np.searchsorted(np.cumsum(shares / shares.sum()), random.random(count)).clip(
        max=size - 1
    )


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def logistic_clicks(count: int, size: int = 2000, seed: int = 1) -> Clicks:
    """A logistic model of users and items by a power law, and of campaigns, 5 of which run at a time.

    A session is of one event and says nothing about it.
    """
    random = np.random.default_rng(seed)
    user, item = (_power_law(random, count, size) for _ in range(2))
    campaign = np.arange(count) // (count // 100) + random.integers(0, 5, count)
    session = random.integers(0, 1 << 57, count)
    weights = [random.normal(0, 0.6, number) for number in (size, size, campaign.max() + 1)]
    chance = _sigmoid(weights[0][user] + weights[1][item] + weights[2][campaign] - 0.5)
    keys = [user, item + ITEM, campaign + CAMPAIGN, np.full(count, BIAS), session + SESSION]
    return Clicks(np.stack(keys, 1), random.random(count) < chance, chance)


def machine_clicks(count: int, size: int = 200, dim: int = 2, seed: int = 1) -> Clicks:
    """A factorization machine of users and items by a power law; and sessions as above."""
    random = np.random.default_rng(seed)
    user, item = (_power_law(random, count, size) for _ in range(2))
    weights = [random.normal(0, 0.4, size) for _ in range(2)]
    vectors = [random.normal(0, 0.7, (size, dim)) for _ in range(2)]
    products = (vectors[0][user] * vectors[1][item]).sum(1)
    chance = _sigmoid(weights[0][user] + weights[1][item] + products - 0.5)
    session = random.integers(0, 1 << 57, count)
    keys = [user, item + ITEM, session + SESSION]
    return Clicks(np.stack(keys, 1), random.random(count) < chance, chance)


class Learned(NamedTuple):
    """Outcome of a training on clicks."""

    ratio: float
    """Logloss of the predictions for the last quarter, each made before the event was learned, to the best one."""
    evicted: int
    most_rows: int


def learn_clicks(
    table: HashTable, clicks: Clicks, batch: int = 250, evict_every: int = 50
) -> Learned:
    """Learn in the order of time: a sum of weights, and with wider rows the product of the first two vectors."""
    predicted, evicted, most = np.empty(len(clicks.clicked)), 0, 0
    for number, first in enumerate(range(0, len(predicted), batch)):
        keys = clicks.keys[first : first + batch]
        count, features = keys.shape
        rows = table.lookup(keys.reshape(-1)).reshape(count, features, -1)
        logits = rows[:, :, 0].sum(1) + (rows[:, 0, 1:] * rows[:, 1, 1:]).sum(1)
        predicted[first : first + count] = _sigmoid(logits)
        error = predicted[first : first + count] - clicks.clicked[first : first + count]
        gradients = np.zeros_like(rows)
        gradients[:, :, 0] = error[:, None]
        gradients[:, 0, 1:] = error[:, None] * rows[:, 1, 1:]
        gradients[:, 1, 1:] = error[:, None] * rows[:, 0, 1:]
        table.update(keys.reshape(-1), gradients.reshape(count * features, -1))
        if number % evict_every == evict_every - 1:
            most = max(most, len(table))
            evicted += table.evict()
    late = slice(len(predicted) * 3 // 4, None)
    losses = [_logloss(given[late], clicks.clicked[late]) for given in (predicted, clicks.chance)]
    return Learned(losses[0] / losses[1], evicted, most)


def _logloss(chance: np.ndarray, clicked: np.ndarray) -> float:
    return float(-np.log(np.where(clicked, chance, 1 - chance)).mean())


# ---- matrix factorization


def movielens(folder: Path) -> np.ndarray:
    """Ratings of MovieLens-100k, ``(100000, 4)``: user, item, stars, time; downloaded with a package that has them.

    Raises:
        OSError: There is no download.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, "recbole==1.2.1"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr)
    with zipfile.ZipFile(next(folder.glob("recbole*.whl"))) as wheel:
        text = wheel.read("recbole/dataset_example/ml-100k/ml-100k.inter").decode()
    return np.array([line.split("\t") for line in text.splitlines()[1:]], np.float64)


def planted_ratings(count: int, users: int, items: int, noise: float, seed: int = 0) -> np.ndarray:
    """Ratings from biases, a product of vectors of 2 numbers, and noise."""
    random = np.random.default_rng(seed)
    user, item = random.integers(0, users, count), random.integers(0, items, count)
    biases = random.normal(0, 0.4, users), random.normal(0, 0.4, items)
    vectors = random.normal(0, 0.6, (users, 2)), random.normal(0, 0.6, (items, 2))
    stars = 3.5 + biases[0][user] + biases[1][item] + (vectors[0][user] * vectors[1][item]).sum(1)
    return np.stack([user, item, stars + random.normal(0, noise, count), np.arange(count)], 1)


class Factors:
    """Biased matrix factorization by stochastic gradients (Koren et al., 2009), with rows in a table.

    Args:
        table: Any with `lookup`, `peek` and `update`; its optimizer is ``sgd``. A row is a bias and a vector.
        rate: Learning rate of the table.
    """

    def __init__(self, table: HashTable, rate: float, decay: float = 0.02) -> None:
        self.table, self._rate, self._decay = table, rate, decay
        self._mean = 0.0

    def fit(self, ratings: np.ndarray, epochs: int, batch: int = 256, seed: int = 0) -> None:
        """Learn for some epochs; all biases begin at 0."""
        keys = self._keys(ratings)
        stars = ratings[:, 2].astype(np.float32)
        self._mean = stars.mean()
        every = np.unique(keys)
        biases = self.table.lookup(every)
        biases[:, 1:] = 0
        self.table.update(every, biases / np.float32(self._rate))
        random = np.random.default_rng(seed)
        for _ in range(epochs):
            order = random.permutation(len(stars))
            for first in range(0, len(stars), batch):
                some = order[first : first + batch]
                self.step(keys[some], stars[some])

    def step(self, keys: np.ndarray, stars: np.ndarray) -> None:
        """Learn from one batch."""
        rows = self.table.lookup(keys.reshape(-1)).reshape(len(stars), 2, -1)
        users, items = rows[:, 0], rows[:, 1]
        errors = (stars - self._predicted(users, items))[:, None]
        gradients = np.float32(self._decay) * rows
        gradients[:, :, :1] -= errors[:, None]
        gradients[:, 0, 1:] -= errors * items[:, 1:]
        gradients[:, 1, 1:] -= errors * users[:, 1:]
        self.table.update(keys.reshape(-1), gradients.reshape(2 * len(stars), -1))

    def error(self, ratings: np.ndarray) -> float:
        """Return the root of the mean square error."""
        rows = self.table.peek(self._keys(ratings).reshape(-1)).reshape(len(ratings), 2, -1)
        return float(
            np.sqrt(((self._predicted(rows[:, 0], rows[:, 1]) - ratings[:, 2]) ** 2).mean())
        )

    def _predicted(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        return self._mean + users[:, 0] + items[:, 0] + (users[:, 1:] * items[:, 1:]).sum(1)

    @staticmethod
    def _keys(ratings: np.ndarray) -> np.ndarray:
        user, item = ratings[:, :2].astype(np.int64).T
        return np.stack([user, item + ITEM], 1)
