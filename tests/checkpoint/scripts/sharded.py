"""Saves a model in some layout, or loads it in another: ``sharded.py save|load LAYOUT WHERE DIR...``.

The model and its optimizer are the same for every layout and number of ranks: what is saved does not
depend on how it is spread. ``load`` compares all of it with what one process has that trained alone. Each
of the directories, which are the same, stands for a node.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dlrover.checkpoint import Checkpointer

STEPS = 3
verb, layout, where, *nodes = sys.argv[1:]
size = int(os.environ.get("WORLD_SIZE", "1"))
if size > 1:
    dist.init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))
directory = nodes[rank * len(nodes) // size]


class Model(nn.Module):
    """Sizes that do not divide by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 13)
        self.down = nn.Linear(13, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.tanh(self.up(x))))


def spread(model: nn.Module) -> nn.Module:
    if layout == "fsdp2":
        fully_shard(model.up)
        fully_shard(model)
    elif layout in ("tp", "tp x dp"):
        tp = 2 if layout == "tp x dp" else size
        mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "tp x dp":
            fully_shard(model, mesh=mesh["dp"])
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("r", "s")))
    return model


def train(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same steps, whatever the layout: gradients are made up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            whole = torch.randn(parameter.shape, generator=generator)
            parameter.grad = as_spread(whole, parameter)
        optimizer.step()
    return model, optimizer


def as_spread(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    if all(isinstance(placement, Shard | Replicate) for placement in like.placements):
        return distribute_tensor(whole, like.device_mesh, like.placements)
    target = torch.zeros_like(like)  # shards of shards
    from dlrover.checkpoint.engine import tree

    box = tree.extent(like)
    cut = tuple(slice(a, a + n) for a, n in zip(box.at, box.shape, strict=True))
    target.to_local().copy_(whole[cut])
    return target


def full(value: object) -> object:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, list):
        return [full(item) for item in value]
    return value


def equal(one: object, other: object, path: str) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor), path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert isinstance(other, dict), path
        assert one.keys() == other.keys(), path
        for key in one:
            equal(one[key], other[key], f"{path}.{key}")
    else:
        assert str(one) == str(other), path


torch.manual_seed(0)
if verb == "save":
    model, optimizer = train(spread(Model()))
else:
    torch.manual_seed(1)
    model = spread(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
state = {
    "model": model,
    "optimizer": optimizer,
    "step": STEPS if verb == "save" else 0,
    "rng": torch.Generator().manual_seed(rank).get_state(),
}
torch.set_default_device("meta")  # as programs do that run on an accelerator
checkpointer = Checkpointer(directory, linger=60.0, local=("rng",))
if verb == "save":
    checkpointer.save(STEPS, state, to="storage" if where == "storage" else "memory")
    checkpointer.wait()
else:
    record = checkpointer.load(state)
    torch.set_default_device("cpu")
    assert record is not None
    assert record.step == STEPS == state["step"]
    assert record.source == where, record
    torch.manual_seed(0)
    whole, its_optimizer = train(Model())
    equal(full(model.state_dict()), whole.state_dict(), "model")
    equal(full(optimizer.state_dict()), its_optimizer.state_dict(), "optimizer")
    assert state["rng"].equal(torch.Generator().manual_seed(rank).get_state())
    assert full(model.state_dict())["up.weight"].shape == (13, 6)
    if rank == 0:
        print(f"equal on {size} ranks")  # noqa: T201
checkpointer.close()
if size > 1:
    dist.destroy_process_group()
