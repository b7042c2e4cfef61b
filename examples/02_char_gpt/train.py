"""Train a small GPT to write Python, byte by byte, on one worker or many, through any kill.

    dlrover-run --nproc-per-node 2 examples/02_char_gpt/train.py --out out/gpt

Its text is the standard library of the Python that runs it, so there is nothing to download. A plain
DistributedDataParallel script: it also runs under ``torchrun``, and as ``python train.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 256  # a token is a byte: any text will do, and none changes the shape of the model


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of checkpoint.pt and losses.jsonl")
    add("--layers", type=positive_int, default=3)
    add("--heads", type=positive_int, default=4)
    add("--width", type=positive_int, default=128, help="a multiple of --heads")
    add("--context", type=positive_int, default=64, help="bytes that the model sees at once")
    add("--corpus-mb", type=positive_int, default=2, help="megabytes of text, if there are as many")
    add("--steps", type=positive_int, default=300)
    add("--global-batch-size", type=positive_int, default=48, help="texts per step, all workers")
    add("--lr", type=float, default=2e-3, help="the highest; see learning_rate()")
    add("--seed", type=int, default=0)
    add("--eval-every", type=positive_int, default=50, help="steps between validations")
    add("--save-every", type=positive_int, default=10, help="steps between checkpoints")
    add("--step-time", type=float, default=0.0, help="seconds to idle after every step")
    add("--sample", type=int, default=400, help="bytes to write at the end")
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    return args


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


# ---- the model ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention, then a two-layer network; each adds to what passes by."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time_steps, width = x.shape
        packed = self.query_key_value(self.attention_norm(x))
        split = packed.view(batch, time_steps, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)  # so that all bytes start equally likely

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, time) to logits of the next token (batch, time, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.bytes(tokens) + self.positions(places))
        return functional.linear(self.norm(x), self.bytes.weight)  # one table for in and out

    @torch.no_grad()
    def write(self, prompt: str, count: int, seed: int) -> str:
        """Continue the prompt by ``count`` bytes."""
        dice = torch.Generator().manual_seed(seed)
        text = list(prompt.encode())
        device = self.bytes.weight.device
        for _ in range(count):
            logits = self(torch.tensor([text[-self.context :]], device=device))[0, -1]
            odds = (logits.float().cpu() / 0.8).softmax(dim=0)  # below 1: fewer odd choices
            text.append(int(torch.multinomial(odds, 1, generator=dice)))
        return bytes(text).decode(errors="replace")


# ---- the data -----------------------------------------------------------------------------------


def load_corpus(megabytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Python's own modules, in the order of their names: bytes to train on, and a last tenth to
    validate on."""
    size = megabytes * 1_000_000
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    tokens = torch.frombuffer(text, dtype=torch.uint8)[:size].to(device)
    boundary = len(tokens) * 9 // 10
    return tokens[:boundary], tokens[boundary:]


def draw_texts(tokens: Tensor, count: int, length: int, key: str) -> Tensor:
    """``count`` pieces of the corpus, chosen by ``key`` alone: no state to save, and the same
    pieces for any world size, of which this worker takes its part."""
    dice = random.Random(key)
    starts = [dice.randrange(len(tokens) - length) for _ in range(count)]
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    return torch.stack([tokens[start : start + length] for start in mine]).long()


# ---- training -----------------------------------------------------------------------------------


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


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Up in a straight line for a tenth of the steps, then down along a cosine to a tenth."""
    warmup = steps // 10
    if step <= warmup:
        return highest * step / warmup
    progress = (step - warmup) / (steps - warmup)
    return highest * (0.55 + 0.45 * math.cos(math.pi * progress))


def loss_sum(model: nn.Module, texts: Tensor) -> Tensor:
    """Cross entropy of every next byte, in nats, added up over this worker's texts."""
    bf16 = texts.is_cuda and torch.cuda.is_bf16_supported()
    with torch.autocast(texts.device.type, dtype=torch.bfloat16, enabled=bf16):
        logits = model(texts[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits.float(), texts[:, 1:].flatten(), reduction="sum")


def mean_over_workers(total: Tensor, count: int) -> float:
    total = total.detach().clone()
    dist.all_reduce(total)
    return total.item() / count


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, texts: Tensor, count: int
) -> float:
    """Train on this worker's texts of a global batch of ``count`` bytes; return its mean loss."""
    total = loss_sum(model, texts)
    optimizer.zero_grad()
    # DDP averages the workers' gradients. Parts may differ in size by one, so it is bytes that
    # must weigh the same, not workers: undo the division by the workers, divide by the bytes.
    (total * dist.get_world_size() / count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    return mean_over_workers(total, count)


@torch.no_grad()
def validate(args: argparse.Namespace, model: GPT, tokens: Tensor) -> float:
    """Mean loss on four global batches, the same ones every time, of text never trained on."""
    texts, length = args.global_batch_size, args.context + 1
    totals = [loss_sum(model, draw_texts(tokens, texts, length, f"test {i}")) for i in range(4)]
    return mean_over_workers(torch.stack(totals).sum(), 4 * texts * args.context)


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


def train(args: argparse.Namespace, model: GPT, device: torch.device) -> None:
    """Train up to ``--steps``, from wherever the checkpoint is."""
    rank = dist.get_rank()
    tokens, held_out = load_corpus(args.corpus_mb, device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    done = load_checkpoint(args.out, device, model, optimizer)
    if rank == 0:
        print(
            f"{'resumed from' if done else 'starting at'} step {done} of {args.steps}: "
            f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokens):,} bytes",
            flush=True,
        )
        args.out.mkdir(parents=True, exist_ok=True)
        keep_losses(args.out / "losses.jsonl", done)
    ddp_model = DistributedDataParallel(model)
    # DDP regroups the gradients after its first backward pass, and with that the order in which it
    # adds up those of three or more workers. A pass for nothing makes all real steps alike.
    loss_sum(ddp_model, draw_texts(tokens, args.global_batch_size, 2, "any")).backward()
    for step in range(done + 1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        texts = draw_texts(tokens, args.global_batch_size, args.context + 1, f"{args.seed} {step}")
        loss = train_step(ddp_model, optimizer, texts, args.global_batch_size * args.context)
        if rank == 0:
            log_loss(args.out / "losses.jsonl", step, loss)
            if step % args.save_every == 0 or step == args.steps:
                save_checkpoint(args.out, step, model, optimizer)
        if step % args.eval_every == 0 or step == args.steps:
            validation = validate(args, model, held_out)
            if rank == 0:
                print(f"step {step}: train {loss:.3f}, validation {validation:.3f}", flush=True)
        time.sleep(args.step_time)


def main() -> None:
    args = parse_args()
    device = join_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Line and newline in one write: the workers' lines must not mix.
    print(f"rank {rank} of {world_size}: process {os.getpid()} on {device}\n", end="", flush=True)
    if args.global_batch_size < world_size:
        sys.exit(
            f"--global-batch-size {args.global_batch_size} must be at least {world_size}, "
            "the number of workers"
        )
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.heads, args.width, args.context).to(device)
    train(args, model, device)
    # Only here, not in a `finally`: after an error the others may be gone, and goodbyes would hang.
    dist.destroy_process_group()
    if rank == 0 and args.sample:
        print("--- what it writes ---")
        print(model.write("def ", args.sample, args.seed), flush=True)


if __name__ == "__main__":
    main()
