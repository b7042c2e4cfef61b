"""Teach a small network to read handwritten digits, on one worker or many, through any kill.

    dlrover-run --nproc-per-node 2 examples/01_digits_ddp/train.py --out out/digits

A plain DistributedDataParallel script: it also runs under ``torchrun``, and as ``python train.py``.
Kill it whenever you like and start the same command again: it goes on from its last checkpoint, and
``losses.jsonl`` ends up as if nothing had happened.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of checkpoint.pt and losses.jsonl")
    add("--epochs", type=positive_int, default=20)
    add("--global-batch-size", type=positive_int, default=96, help="images per step, all workers")
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


def global_batch(step: int, images: int, batch_size: int, seed: int) -> Tensor:
    """Indices of the images of step 0, 1, ...: no state to save, and the same for any world size.

    Every epoch has its own order; what is left over at its end is too little for a batch.
    """
    epoch, batch = divmod(step, images // batch_size)
    order = np.random.default_rng((seed, epoch)).permutation(images)
    return torch.from_numpy(order[batch * batch_size : (batch + 1) * batch_size])


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, count: int
) -> float:
    """Train on this worker's part of a global batch of ``count`` images; return its mean loss."""
    loss_sum = functional.cross_entropy(model(images), labels, reduction="sum")
    optimizer.zero_grad()
    # DDP averages the workers' gradients. Parts may differ in size by one, so it is images that
    # must weigh the same, not workers: undo the division by the workers, divide by the images.
    (loss_sum * dist.get_world_size() / count).backward()
    optimizer.step()
    total = loss_sum.detach()
    dist.all_reduce(total)
    return total.item() / count


def save_checkpoint(
    out: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Replace the checkpoint in one instant: a kill at any time leaves the old or the new one."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    partial = out / "checkpoint.pt.partial"
    torch.save(state, partial)
    # Contents before the name, or a power cut could leave a new name on an empty file.
    for path in (partial, out / "losses.jsonl"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    partial.replace(out / "checkpoint.pt")


def load_checkpoint(
    out: Path, device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
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
    if "model" in state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
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
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if not world_size <= args.global_batch_size <= len(images):
        sys.exit(
            f"--global-batch-size {args.global_batch_size} must be from {world_size} (the number "
            f"of workers) to {len(images)} (the number of training images)"
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    done = load_checkpoint(args.out, images.device, model, optimizer)
    total = args.epochs * (len(images) // args.global_batch_size)
    if rank == 0:
        print(f"{'resumed from' if done else 'starting at'} step {done} of {total}", flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        keep_losses(args.out / "losses.jsonl", done)
    ddp_model = DistributedDataParallel(model)
    # DDP regroups the gradients after its first backward pass, and with that the order in which it
    # adds up those of three or more workers. A pass for nothing makes all real steps alike.
    ddp_model(images[:1]).sum().backward()
    for step in range(done + 1, total + 1):
        batch = global_batch(step - 1, len(images), args.global_batch_size, args.seed)
        mine = batch[rank::world_size]
        loss = train_step(ddp_model, optimizer, images[mine], labels[mine], len(batch))
        if rank == 0:
            log_loss(args.out / "losses.jsonl", step, loss)
            if step % args.save_every == 0 or step == total:
                save_checkpoint(args.out, step, model, optimizer)
            if step % 50 == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)
        time.sleep(args.step_time)
    return max(done, total)


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
