"""Trains under the planner's strategy on any number of ranks: ``any_size.py DIRECTORY STEPS SECONDS``.

Writes a line ``step ranks strategy loss`` for each step; the loss is that of the global batch.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from dlrover.accelerate import auto_accelerate
from dlrover.checkpoint import Checkpointer

WIDTH, HEADS, WORDS, LAYERS, BATCH = 16, 2, 32, 2, 12
directory, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + functional.gelu(self.mix(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)
        self.config = SimpleNamespace(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, vocab_size=WORDS
        )

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(words, output):
    return functional.cross_entropy(output[:, :-1].flatten(0, 1), words[:, 1:].flatten())


torch.set_num_threads(1)
torch.manual_seed(0)
model = Model()
sequences = (torch.randint(WORDS, (BATCH * steps, 1)) + 5 * torch.arange(8)) % WORDS
_, result, strategy = auto_accelerate(
    model, torch.optim.AdamW, sequences, loss_of, optim_args={"lr": 1e-2, "eps": 1e-4},
    dataloader_args={"batch_size": BATCH, "shuffle": True}, excluded=["amp_native", "pipeline_parallel"],
)  # fmt: skip
state = {"training": result.args["state"], "data": result.dataloader, "step": 0}
checkpointer = Checkpointer(directory / "checkpoints")
checkpointer.load(state)
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
for data in result.dataloader:
    loss = result.loss_func(data, result.model(data))
    loss.backward()
    result.optim.step()
    result.optim.zero_grad()
    state["step"] += 1
    mean = loss.detach().clone()
    if ranks > 1:
        dist.all_reduce(mean)
        mean /= ranks
    checkpointer.save(state["step"], state)
    if rank == 0:
        with (directory / "steps").open("a") as file:
            file.write(f"{state['step']} {ranks} {strategy.dp} {mean.item():.9f}\n")
    time.sleep(seconds)
checkpointer.close()
