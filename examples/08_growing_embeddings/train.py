"""Learn what users like in the order of time, with an embedding for every key that comes, through any kill.

    dlrover-run --nproc-per-node 2 --embedding-servers 2 examples/08_growing_embeddings/train.py --out out/films

DeepFM or DLRM. Each event is predicted before it is learned, so the printed figures are of events that the model
has not seen. With ``--embedding-servers`` the rows are on servers; else one process has them.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from events import Events, clicks, movielens
from models import DLRM, DeepFM
from tables import Rows
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from dlrover.checkpoint import Checkpointer
from dlrover.embedding import HashEmbeddingBag

MODELS = {"deepfm": DeepFM, "dlrm": DLRM}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of events and checkpoints")
    add("--model", choices=MODELS, default="deepfm")
    add("--data", choices=["movielens", "clicks"], default="movielens")
    add("--clicks", type=int, default=100_000, help="number of made-up clicks")
    add("--dim", type=int, default=8, help="numbers of a vector")
    add("--batch-size", type=int, default=256, help="events of a step, of all workers")
    add("--lr", type=float, default=0.05, help="learning rate of the table, with Adagrad")
    add("--dense-lr", type=float, default=0.001, help="learning rate of all else, with Adam")
    add("--admit", type=int, default=1, help="lookup of a key from which on it has a row")
    add("--save-every", type=int, default=50, help="steps between two checkpoints")
    add("--step-time", type=float, default=0.0, help="seconds that a worker idles in every step")
    return parser.parse_args()


def load_events(args: argparse.Namespace, rank: int) -> Events:
    """The events, which rank 0 gets once and keeps in the folder."""
    kept = args.out / f"{args.data}.pt"
    if rank == 0 and not kept.exists():
        args.out.mkdir(parents=True, exist_ok=True)
        if args.data == "movielens":
            try:
                events = movielens()
            except OSError as error:
                print(f"made-up clicks instead of MovieLens-100k: {error}", flush=True)
                events = clicks(args.clicks)
        else:
            events = clicks(args.clicks)
        partial = kept.with_suffix(".partial")
        torch.save(tuple(events), partial)
        partial.replace(kept)
    dist.barrier()
    return Events(*torch.load(kept))


class Scores:
    """Predictions of one worker, made before the events were learned."""

    def __init__(self, count: int) -> None:
        self.logits = torch.full((count,), torch.nan)

    def report(self, events: Events, first: int, last: int) -> str:
        """How well some events were predicted by all workers."""
        logits = self.logits[first:last].nan_to_num()
        dist.all_reduce(logits)
        happened = events.happened[first:last]
        text = (
            f"logloss {_logloss(logits.sigmoid(), happened):.4f}, AUC {_auc(logits, happened):.4f}"
        )
        if events.chance is not None:
            text += f"; the best possible logloss is {_logloss(events.chance[first:last], happened):.4f}"
        return text


def _logloss(chance: Tensor, happened: Tensor) -> float:
    return functional.binary_cross_entropy(chance, happened).item()


def _auc(scores: Tensor, happened: Tensor) -> float:
    """The probability that something that happened has the higher one of two scores."""
    _, places, counts = np.unique(scores.numpy(), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    ones = float(happened.sum())
    below = ranks[happened.numpy() > 0].sum() - ones * (ones + 1) / 2
    return below / max(1.0, ones * (len(happened) - ones))


class Training:
    """What one worker has."""

    def __init__(self, args: argparse.Namespace, events: Events) -> None:
        self.args, self.events = args, events
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = MODELS[args.model](len(events.keys), args.dim, events.numbers.shape[1])
        self.rows = Rows(args.out, model.row, learning_rate=args.lr, admission=args.admit)
        self.model: nn.Module = DistributedDataParallel(model)
        self.optimizer = torch.optim.Adam(model.parameters(), args.dense_lr)
        self.scores = Scores(len(events))
        self.state: dict[str, Any] = {
            "step": 0,
            "model": model,
            "optimizer": self.optimizer,
            "logits": self.scores.logits,
        }
        self.checkpointer = Checkpointer(args.out / "dense")

    def resume(self) -> None:
        """Go on from the last checkpoint: the rows of the table are those of the same step."""
        self.checkpointer.load(self.state)
        self.rows.load(self.state["step"])
        self.scores.logits = self.state["logits"]
        self.bag = HashEmbeddingBag(self.rows.table, list(self.events.keys), mode="mean")

    def step(self) -> None:
        """Predict a batch, then learn from it."""
        size = self.args.batch_size
        first = self.state["step"] * size
        mine = slice(first + self.rank, min(first + size, len(self.events)), self.workers)
        batch = self.events.at(mine)
        logits = self.model(self.bag(batch.keys), batch.numbers)
        self.scores.logits[mine] = logits.detach()
        self.optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(logits, batch.happened).backward()
        self.optimizer.step()
        self.state["step"] += 1
        time.sleep(self.args.step_time)

    def save(self) -> None:
        """Save the rows, then all else; a checkpoint without rows of its step does not count."""
        dist.barrier()  # all workers' gradients have reached the table
        step, every = self.state["step"], self.args.save_every
        self.rows.save(step)
        self.checkpointer.save(step, self.state, to="storage")
        self.checkpointer.wait()
        self.rows.forget(step - 2 * every)
        first = (step - 1) // every * every * self.args.batch_size
        report = self.scores.report(self.events, first, step * self.args.batch_size)
        if self.rank == 0:
            print(f"step {step}: {len(self.rows.table)} rows; {report}", flush=True)

    def run(self) -> None:
        """Learn from all events once."""
        steps = -(-len(self.events) // self.args.batch_size)
        while self.state["step"] < steps:
            self.step()
            if self.state["step"] % self.args.save_every == 0 or self.state["step"] == steps:
                self.save()
        half = len(self.events) // 2
        report = self.scores.report(self.events, half, len(self.events))
        if self.rank == 0:
            print(f"the second half of {len(self.events)} events: {report}", flush=True)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world_size}: process {os.getpid()}\n", end="", flush=True)
    training = Training(args, load_events(args, rank))
    training.resume()
    training.run()
    training.checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
