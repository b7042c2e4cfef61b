"""Fine-tune a Llama-2-style model with Hugging Face's Trainer or by FSDP, with flash checkpoints.

    dlrover-run --nproc-per-node 2 --max-restarts 3 examples/11_llama/train.py --out out/llama

Without ``--model`` it makes a Llama of a few hundred thousand parameters, and a text of its own, so that it runs on CPUs
and downloads nothing. ``--model`` names a folder that ``from_pretrained`` reads.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from dlrover.checkpoint import Checkpointer
from dlrover.integrations.transformers import FlashCallback
from dlrover.training import ElasticDistributedSampler, ElasticTrainer

BYTES = 256


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the checkpoints")
    add(
        "--model",
        default="",
        help="folder of a model whose tokens are bytes; by default a small new one",
    )
    add("--fsdp", action="store_true", help="a loop with FSDP2 instead of the Trainer")
    add("--steps", type=int, default=30)
    add("--batch-size", type=int, default=4, help="texts of each worker per step")
    add("--context", type=int, default=64)
    add("--die-at", type=int, default=0, help="step at which the last worker ends, to try it")
    return parser.parse_args()


class Texts(Dataset):
    """Pieces of Python's own modules, byte by byte, as inputs and labels of a causal model."""

    def __init__(self, count: int, context: int) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) > count * context:
                break
        self.pieces = (
            torch.frombuffer(text, dtype=torch.uint8)[: count * context].view(-1, context).long()
        )

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def make_model(path: str, context: int) -> LlamaForCausalLM:
    if path:
        return LlamaForCausalLM.from_pretrained(path)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=context,
        )
    )  # fmt: skip


def perhaps_die(args: argparse.Namespace, step: int) -> None:
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    if step == args.die_at and first and last:
        os._exit(1)


class Mortal(TrainerCallback):
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        perhaps_die(self.args, state.global_step)


def train_with_trainer(args: argparse.Namespace) -> None:
    flash = FlashCallback(args.out / "flash", storage_every=10)
    trainer = Trainer(
        model=make_model(args.model, args.context),
        args=TrainingArguments(
            output_dir=str(args.out), max_steps=args.steps, per_device_train_batch_size=args.batch_size,
            learning_rate=3e-3, logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
        ),
        train_dataset=Texts(512, args.context),
        callbacks=[flash, Mortal(args)],
    )  # fmt: skip
    resumed = flash.resume()
    result = trainer.train(resume_from_checkpoint=resumed)
    if trainer.is_world_process_zero():
        how = "resumed" if resumed else "trained"
        print(
            f"{how}: loss {result.training_loss:.3f} after {result.global_step} steps", flush=True
        )


def train_with_fsdp(args: argparse.Namespace) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = make_model(args.model, args.context)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Texts(512, args.context)
    sampler = ElasticDistributedSampler(data)
    trainer = ElasticTrainer(
        model, optimizer, sampler, global_batch_size=args.batch_size * dist.get_world_size()
    )
    progress = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "progress": progress}
    checkpointer = Checkpointer(args.out / "flash")
    record = checkpointer.load(state)
    loader = torch.utils.data.DataLoader(data, batch_sampler=trainer.batches)
    while progress["step"] < args.steps:
        for batch in loader:
            trainer.backward(model(**batch).loss)
            if not trainer.step():
                continue
            progress["step"] += 1
            step = progress["step"]
            checkpointer.save(step, state, to="memory" if step % 10 else "storage")
            perhaps_die(args, step)
            if step == args.steps:
                break
        else:
            sampler.set_epoch(sampler.epoch + 1)
    loss = trainer.loss()
    if dist.get_rank() == 0:
        how = f"resumed from {record.source}" if record else "trained"
        print(f"{how}: loss {loss:.3f} after {progress['step']} steps", flush=True)
    checkpointer.wait()
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = parse_args()
    (train_with_fsdp if arguments.fsdp else train_with_trainer)(arguments)
