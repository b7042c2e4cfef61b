"""Learn the iris flowers from shards that the master deals: a slow worker gets fewer, a dead worker's go to others.

dlrover-run --nproc-per-node 2 --max-restarts 3 examples/12_iris/train.py --out out/iris
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_iris
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dlrover.checkpoint import Checkpointer
from dlrover.data import ElasticDataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the checkpoints")
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=10, help="flowers of each worker per step")
    add("--die-at", type=int, default=0, help="step at which the last worker ends, to try it")
    return parser.parse_args()


def flowers() -> tuple[TensorDataset, TensorDataset]:
    """100 flowers to train on, and 50 to test."""
    found = load_iris()
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    features = torch.tensor(found.data, dtype=torch.float32)[order]
    features = (features - features.mean(0)) / features.std(0)
    species = torch.tensor(found.target)[order]
    return TensorDataset(features[:100], species[:100]), TensorDataset(
        features[100:], species[100:]
    )


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    training, test = flowers()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    data = ElasticDataset(training, name="iris", epochs=args.epochs, shuffle=True, shard=5)
    progress = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "data": data, "progress": progress}
    checkpointer = Checkpointer(args.out)
    record = checkpointer.load(state)
    if record is not None and rank == 0:
        print(f"resumed from step {record.step}, from {record.source}", flush=True)
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    for _ in data.until_end():
        # Workers get as many flowers as they ask for, so some run out before the others.
        with ddp.join():
            for features, species in data.loader(args.batch_size):
                loss = nn.functional.cross_entropy(ddp(features), species)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        progress["step"] += 1
        checkpointer.save(
            progress["step"], state, to="memory" if progress["step"] % 5 else "storage"
        )
        if progress["step"] == args.die_at and rank == size - 1 and not restarted:
            os._exit(1)
    features, species = test.tensors
    right = (model(features).argmax(1) == species).float().mean().item()
    if rank == 0:
        print(f"test accuracy {100 * right:.1f} % after {args.epochs} epochs", flush=True)
    checkpointer.wait()
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
