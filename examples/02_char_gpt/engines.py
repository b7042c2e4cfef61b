"""The GPT of train.py with its state spread over the workers: FSDP2, DeepSpeed's ZeRO, or Lightning's loop.

    dlrover-run --nproc-per-node 2 --max-restarts 3 examples/02_char_gpt/engines.py --engine fsdp --out out/gpt-fsdp

Each engine trains on the same text in the same order, saves to memory after each step, and continues from there.
``deepspeed`` and ``lightning`` need these packages; DeepSpeed on a machine without accelerators runs on its CPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from train import GPT, draw_texts, join_process_group, learning_rate, load_corpus, loss_sum


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--engine", choices=["fsdp", "deepspeed", "lightning"], required=True)
    add("--out", type=Path, required=True, help="folder of the checkpoints")
    add("--layers", type=int, default=3)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=128)
    add("--context", type=int, default=64)
    add("--corpus-mb", type=int, default=2)
    add("--steps", type=int, default=100)
    add("--global-batch-size", type=int, default=48)
    add("--lr", type=float, default=2e-3)
    add("--store-every", type=int, default=20, help="steps between checkpoints that are stored")
    add("--die-at", type=int, default=0, help="step at which the last worker ends, to try it")
    return parser.parse_args()


class Texts:
    """This worker's part of each step's texts; the step number alone decides."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, (self.tokens, _) = args, load_corpus(args.corpus_mb, device)

    def of(self, step: int) -> Tensor:
        return draw_texts(
            self.tokens, self.args.global_batch_size, self.args.context + 1, f"0 {step}"
        )


def mean_loss(model: nn.Module, texts: Tensor) -> Tensor:
    return loss_sum(model, texts) / texts[:, 1:].numel()


def ended_step(args: argparse.Namespace, step: int, loss: float) -> None:
    """Print a step's loss; end the last worker, once, where ``--die-at`` says so."""
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if step == args.die_at and first and dist.get_rank() == dist.get_world_size() - 1:
        os._exit(1)
    if dist.get_rank() == 0 and (step % 20 == 0 or step == args.steps):
        print(f"step {step}: loss {loss:.3f}", flush=True)


def train_with_fsdp(args: argparse.Namespace, model: GPT, texts: Texts) -> None:
    from torch.distributed.fsdp import fully_shard

    from dlrover.checkpoint import Checkpointer

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    progress = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "progress": progress}
    checkpointer = Checkpointer(args.out)
    record = checkpointer.load(state)
    if record is not None and dist.get_rank() == 0:
        print(f"resumed from step {record.step}, from {record.source}", flush=True)
    for step in range(progress["step"] + 1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        loss = mean_loss(model, texts.of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] = step
        checkpointer.save(step, state, to="memory" if step % args.store_every else "storage")
        ended_step(args, step, loss.item())
    checkpointer.wait()
    checkpointer.close()


def train_with_deepspeed(args: argparse.Namespace, model: GPT, texts: Texts) -> None:
    import deepspeed

    from dlrover.integrations.deepspeed import attach

    config = {
        "train_micro_batch_size_per_gpu": args.global_batch_size // dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    flash = attach(engine, args.out / "flash", storage_every=args.store_every, trusted=True)
    engine.load_checkpoint(str(args.out / "tags"))
    if engine.global_steps and dist.get_rank() == 0:
        print(f"resumed from step {engine.global_steps}", flush=True)
    while engine.global_steps < args.steps:
        loss = mean_loss(engine, texts.of(engine.global_steps + 1))
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(str(args.out / "tags"))
        ended_step(args, engine.global_steps, loss.item())
    flash.cleanup()


def train_with_lightning(args: argparse.Namespace, model: GPT, texts: Texts) -> None:
    import lightning
    from torch.utils.data import DataLoader, Dataset

    from dlrover.integrations.lightning import FlashCheckpointIO, FlashDDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = model

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return mean_loss(self.gpt, texts.of(int(batch)))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
            ended_step(args, self.global_step, outputs["loss"].item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=args.lr, betas=(0.9, 0.95))

    class Steps(Dataset):
        """Numbers of steps: the texts follow from them."""

        def __len__(self) -> int:
            return args.steps * dist.get_world_size()

        def __getitem__(self, index: int) -> int:
            return index // dist.get_world_size() + 1

    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
        args.out / "marks", every_n_train_steps=1, save_last=True, save_top_k=1
    )
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=FlashDDPStrategy(),
        plugins=[FlashCheckpointIO(args.out / "flash", storage_every=args.store_every)],
        callbacks=[checkpoints],
        max_steps=args.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    trainer.fit(Module(), DataLoader(Steps(), batch_size=1, shuffle=False), ckpt_path="last")


ENGINES = {
    "fsdp": train_with_fsdp,
    "deepspeed": train_with_deepspeed,
    "lightning": train_with_lightning,
}


def main() -> None:
    args = parse_args()
    device = join_process_group()
    if args.global_batch_size % dist.get_world_size():
        sys.exit(
            f"--global-batch-size {args.global_batch_size} must be a multiple of {dist.get_world_size()},"
            " the number of workers"
        )
    torch.manual_seed(0)
    model = GPT(args.layers, args.heads, args.width, args.context).to(device)
    ENGINES[args.engine](args, model, Texts(args, device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
