"""Learn from a stream of clicks while they come, on one worker or many, through any kill.

    dlrover-run --nproc-per-node 2 examples/03_online_learning/train.py redis://localhost:6379/0?stream=clicks --out out/clicks

Each message is a question first and a lesson then: the model predicts it before it learns from it. What it
was wrong by is on the page ``evaluation.html``. Kill a worker, the master, or everything: the model goes on
where its last checkpoint was, and learns from each message once.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import page
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from dlrover.checkpoint import Checkpointer
from dlrover.data import ElasticDataset, Message, Stream

FEATURES = 8
POINTS = 100
"""Points on the page."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("url", help="where the clicks come from, for example redis://host:port/0?stream=NAME")
    add("--out", type=Path, required=True, help="folder of the checkpoint and evaluation.html")
    add(
        "--messages",
        type=int,
        default=20_000,
        help="end when the model has learned from this number of messages",
    )
    add("--batch-size", type=int, default=16, help="messages in a step of one worker")
    add("--lr", type=float, default=0.2)
    add("--save-every", type=int, default=20, help="steps between checkpoints")
    return parser.parse_args()


def decode(message: Message) -> tuple[Tensor, float]:
    """A sample: what was seen, and whether it was clicked."""
    click = json.loads(message.value["click"])
    return torch.tensor(click["seen"]), float(click["clicked"])


def lesson(weights: Tensor, batch: Any) -> Tensor:
    """Sums over a batch: the gradient, the loss before learning, right answers, messages."""
    sums = torch.zeros(FEATURES + 4)
    if batch is not None:
        seen, clicked = batch[0], batch[1].float()
        logits = seen @ weights[:-1] + weights[-1]
        error = torch.sigmoid(logits) - clicked
        sums[:FEATURES] = error @ seen
        sums[FEATURES] = error.sum()
        sums[-3] = functional.binary_cross_entropy_with_logits(logits, clicked, reduction="sum")
        sums[-2] = ((logits > 0) == (clicked > 0.5)).sum()
        sums[-1] = len(clicked)
    return sums


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    args.out.mkdir(parents=True, exist_ok=True)
    data = ElasticDataset(Stream(args.url, decode=decode, idle=1.0), name="clicks")
    curve = torch.zeros(POINTS, 3)  # of each part of the stream: loss, right answers, messages
    state = {"weights": torch.zeros(FEATURES + 1), "curve": curve, "step": 0, "data": data}
    checkpointer = Checkpointer(args.out / "checkpoint", interval=args.save_every)
    checkpointer.load(state)
    learned = int(curve[:, 2].sum())
    begin = f"rank {rank} is process {os.getpid()} and begins after {learned} messages\n"
    print(begin, end="", flush=True)
    reports = Reports(args, rank, learned)
    loader = data.loader(args.batch_size)
    batches = iter(loader)
    while learned < args.messages:
        batch = next(batches, None)
        if batch is None:  # nobody has clicked for a second; somebody will
            batches = iter(loader)
        sums = lesson(state["weights"], batch)
        dist.all_reduce(sums)
        count = int(sums[-1])
        if count:
            curve[min(learned * POINTS // args.messages, POINTS - 1)] += sums[-3:]
            state["weights"] -= args.lr * sums[: FEATURES + 1] / count
            state["step"] += 1
            learned += count
            checkpointer.save(state["step"], state)
            if state["step"] % args.save_every == 0 or learned >= args.messages:
                reports.send(state["step"], learned, curve)
    checkpointer.wait()
    data.close()
    checkpointer.close()
    dist.destroy_process_group()


class Reports:
    """The page and the lines of rank 0."""

    def __init__(self, args: argparse.Namespace, rank: int, learned: int) -> None:
        self.args, self.rank = args, rank
        self.starts = args.out / "starts.txt"
        if rank == 0:
            with self.starts.open("a") as file:
                file.write(f"{learned}\n")

    def send(self, step: int, learned: int, curve: Tensor) -> None:
        if self.rank:
            return
        messages = self.args.messages
        page.write(self.args.out / "evaluation.html", curve.tolist(), messages, self.starts)
        loss, right, count = curve[curve[:, 2] > 0][-10:].sum(0).tolist()
        lately = f"loss {loss / count:.3f}, {right / count:.1%} right lately"
        print(f"step {step}: learned from {learned} messages, {lately}", flush=True)


if __name__ == "__main__":
    main()
