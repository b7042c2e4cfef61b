"""Teach a small network to read handwritten digits, on one worker or many, through any kill.

    dlrover-run --nproc-per-node 2 examples/01_digits_ddp/train.py --out out/digits

A DistributedDataParallel script: it also runs under ``torchrun``, and as ``python train.py``. Kill it
whenever you like and start the same command again, on as many workers as you have by then: it goes on
from its last checkpoint, and ``losses.jsonl`` ends up as if nothing had happened.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dlrover.training import ElasticDistributedSampler, ElasticTrainer


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of checkpoint.pt and losses.jsonl")
    add("--epochs", type=positive_int, default=20)
    add("--global-batch-size", type=positive_int, default=96, help="images per step, all workers")
    add("--micro-batch-size", type=positive_int, help="images that a worker computes at once")
    add("--lr", type=float, default=0.05)
    add("--seed", type=int, default=0)
    add("--save-every", type=positive_int, default=10, help="steps between checkpoints")
    add("--step-time", type=float, default=0.0, help="seconds to idle after every step")
    add(
        "--target-accuracy", type=float, default=0.95, help="fail below this share of right answers"
    )
    return parser.parse_args()


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def join_process_group() -> torch.device:
    """Meet the other workers and return the device of this one."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    # NCCL wants a GPU for each worker; gloo also serves workers that share one.
    backend = "nccl" if gpus >= local_world_size else "gloo"
    if gpus:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # started as `python train.py`: a world of one, which needs no address
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def compute_reproducibly() -> None:
    """Make equal inputs give equal bits, so that a resumed run can be compared exactly."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for this
    torch.use_deterministic_algorithms(True)
    # Sums depend on how threads split them; a network this small gains nothing from a second one.
    torch.set_num_threads(1)


def load_images(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then those of the test: every fifth image, in any run."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32, device=device).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits, device=device)
    held_out = torch.arange(len(images), device=device) % 5 == 0
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def build_model() -> nn.Module:
    # No batch normalisation: its statistics would depend on how many workers share a batch.
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def save_checkpoint(out: Path, step: int, parts: dict[str, Any]) -> None:
    """Replace the checkpoint in one instant: a kill at any time leaves the old or the new one."""
    state = {"step": step, **{name: part.state_dict() for name, part in parts.items()}}
    partial = out / "checkpoint.pt.partial"
    torch.save(state, partial)
    # Contents before the name, or a power cut could leave a new name on an empty file.
    for path in (partial, out / "losses.jsonl"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    partial.replace(out / "checkpoint.pt")


def load_checkpoint(out: Path, device: torch.device, parts: dict[str, Any]) -> int:
    """Restore the checkpoint, if there is one, and return how many steps it had done."""
    path = out / "checkpoint.pt"
    state = torch.load(path, map_location=device) if path.exists() else {"step": 0}
    # Rank 0 decides: workers that start from different steps would train, and silently be wrong.
    step_of_rank_0 = torch.tensor(state["step"], device=device)
    dist.broadcast(step_of_rank_0, src=0)
    if state["step"] != step_of_rank_0.item():
        raise RuntimeError(
            f"{path} is at step {state['step']}, but rank 0 sees step {step_of_rank_0.item()}: "
            "--out must be a folder that all workers share"
        )
    if state["step"]:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    return state["step"]


def keep_losses(path: Path, steps: int) -> None:
    """Drop what was logged after the checkpoint; those steps are about to be done again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    partial = path.with_suffix(".partial")
    partial.write_text("".join(lines[:steps]))  # line n is step n
    partial.replace(path)


def log_loss(path: Path, step: int, loss: float) -> None:
    record = {
        "step": step,
        "loss": loss,
        "world_size": dist.get_world_size(),
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    }
    with path.open("a") as file:  # closed, hence flushed, at once: a kill loses no line
        file.write(json.dumps(record) + "\n")


def train(args: argparse.Namespace, model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Train to the end of the last epoch, from wherever the checkpoint is; return the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    ddp_model = DistributedDataParallel(model)
    dataset = TensorDataset(images, labels)
    # Every epoch has its own order; what is left over at its end is too little for a batch.
    sampler = ElasticDistributedSampler(dataset, seed=args.seed, drop_last=True)
    trainer = ElasticTrainer(
        ddp_model,
        optimizer,
        sampler,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
    )
    loader = DataLoader(dataset, batch_sampler=trainer.batches)
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
    done = step = load_checkpoint(args.out, images.device, parts)
    total = args.epochs * trainer.steps_per_epoch
    rank = dist.get_rank()
    if rank == 0:
        print(f"{'resumed from' if done else 'starting at'} step {done} of {total}", flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        keep_losses(args.out / "losses.jsonl", done)
    # DDP regroups the gradients after its first backward pass, and with that the order in which it
    # adds up those of three or more workers. A pass for nothing makes all real steps alike.
    ddp_model(images[:1]).sum().backward()
    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        for some_images, some_labels in loader:
            trainer.backward(functional.cross_entropy(ddp_model(some_images), some_labels))
            if not trainer.step():
                continue  # this worker has more images of the same global batch
            step += 1
            loss = trainer.loss()
            if rank == 0:
                log_loss(args.out / "losses.jsonl", step, loss)
                if step % args.save_every == 0 or step == total:
                    save_checkpoint(args.out, step, parts)
                if step % 50 == 0:
                    print(f"step {step}: loss {loss:.4f}", flush=True)
            time.sleep(args.step_time)
    return step


def main() -> None:
    args = parse_args()
    compute_reproducibly()
    device = join_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Line and newline in one write: the workers' lines must not mix.
    print(f"rank {rank} of {world_size}: process {os.getpid()} on {device}\n", end="", flush=True)
    torch.manual_seed(args.seed)
    model = build_model().to(device)
    images, labels, test_images, test_labels = load_images(device)
    steps = train(args, model, images, labels)
    # Only here, not in a `finally`: after an error the others may be gone, and goodbyes would hang.
    dist.destroy_process_group()
    if rank == 0:
        with torch.no_grad():
            accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
        print(f"test accuracy {100 * accuracy:.1f} % after {steps} steps", flush=True)
        if accuracy < args.target_accuracy:
            sys.exit(
                f"test accuracy {100 * accuracy:.1f} % is below the "
                f"{100 * args.target_accuracy:.1f} % of --target-accuracy"
            )


if __name__ == "__main__":
    main()
