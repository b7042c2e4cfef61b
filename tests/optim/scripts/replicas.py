"""Trains small models on four ranks by Local SGD; each rank writes what it found to ``OUT/RANK.json``.

One launch for all cases: each function below is one, and returns what `test_replicas` looks at.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from dlrover.checkpoint import Checkpointer
from dlrover.errors import InfrastructureError
from dlrover.optim import AGD, WSAM, AEDiT, AGD8bit, DiLoCo, EDiT, GroupAdam, Penalty

RANKS = 4


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch(step: int, rank: int, size: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 4, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - inputs.prod(1, keepdim=True)).square().mean()


def backward(model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, inputs)
    loss.backward()
    return loss.item()


def numbers(model: nn.Module) -> list[float]:
    """All parameters, whole ones if they are spread."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def sgd_one(parameters: Any) -> torch.optim.Optimizer:
    """The outer optimizer that takes the mean."""
    return torch.optim.SGD(parameters, lr=1.0)


# ---- one process computes the same


def every_step_is_synchronous_training(rank: int) -> Any:
    found = {}
    for penalty in ("off", "equal weights"):
        model, other = network(), network()
        optimizer = EDiT(
            torch.optim.SGD(model.parameters(), lr=0.1), interval=1, outer=sgd_one, clip=None,
            penalty=None if penalty == "off" else Penalty(temperature=math.inf),
        )  # fmt: skip
        alone = torch.optim.SGD(other.parameters(), lr=0.1)
        for step in range(8):
            backward(model, optimizer, batch(step, rank))
            optimizer.step()
            backward(other, alone, torch.cat([batch(step, each) for each in range(RANKS)]))
            alone.step()
        found[penalty] = [numbers(model), numbers(other)]
    return found


def a_warm_up_is_synchronous_training(rank: int) -> Any:
    model, other = network(), network()
    optimizer = DiLoCo(torch.optim.AdamW(model.parameters(), lr=0.01), interval=3, warmup=5)
    alone = torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in range(5):
        backward(model, optimizer, batch(step, rank))
        optimizer.step()
        backward(other, alone, torch.cat([batch(step, each) for each in range(RANKS)]))
        alone.step()
    return [numbers(model), numbers(other), optimizer.syncs]


def a_warm_up_with_unused_parameters_and_overflows(rank: int) -> Any:
    """Each replica uses other parameters, and none uses the last; the gradients of one overflow in the second step."""
    values = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    optimizer = DiLoCo(torch.optim.SGD(values, lr=1.0), interval=2, warmup=3, outer=sgd_one)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    places = []
    for step in range(5):
        optimizer.zero_grad()
        factor = math.inf if rank == 1 and step == 1 else float(rank + 1)
        used = [value for number, value in enumerate(values[:3]) if number != rank]
        scaler.scale(factor * sum(value.sum() for value in used)).backward()
        scaler.step(optimizer)
        scaler.update()
        places.append([value[0].item() for value in values])
    return {"places": places, "syncs": optimizer.syncs, "unused": values[3].grad is None}


def several_replicas_are_simulated(rank: int) -> Any:
    """The same by hand: AdamW on each replica, Nesterov momentum on the mean difference."""
    model = network()
    optimizer = DiLoCo(torch.optim.AdamW(model.parameters(), lr=0.01), interval=4)
    for step in range(12):
        backward(model, optimizer, batch(step, rank))
        optimizer.step()
    replicas = [network() for _ in range(RANKS)]
    inner = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in replicas]
    shared = network()
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(12):
        for number, (each, own) in enumerate(zip(replicas, inner, strict=True)):
            backward(each, own, batch(step, number))
            own.step()
        if step % 4 == 3:
            with torch.no_grad():
                for index, value in enumerate(shared.parameters()):
                    places = [list(each.parameters())[index] for each in replicas]
                    value.grad = torch.stack([value - place for place in places]).mean(0)
                outer.step()
                for each in replicas:
                    for value, place in zip(shared.parameters(), each.parameters(), strict=True):
                        place.copy_(value)
    return [numbers(model), numbers(shared)]


# ---- eight bits


def eight_bits(rank: int) -> Any:
    """The same training in 32 and in 8 bits, and in 8 bits without what was cut off."""
    found = {}
    for name in ("32", "8", "8 without feedback"):
        torch.manual_seed(0)
        value = nn.Parameter(torch.zeros(3000))
        optimizer = DiLoCo(
            torch.optim.SGD([value], lr=1.0), interval=1, outer=sgd_one,
            bits=32 if name == "32" else 8,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(rank)
        gradient = torch.rand(3000, generator=generator) * 2e-2
        gradient[::100] = 10.0  # the scale of each block; the others are far below its 127th part
        for _ in range(60):
            value.grad = gradient.clone()
            optimizer.step()
            if "without" in name:
                optimizer._fragments[0].residuals.__init__()
        found[name] = value.detach().tolist()
    return found


def eight_bits_of_other_parts(rank: int) -> Any:
    """One replica leaves and another one comes: each of the others codes another part of the sum than before."""
    before, after = dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])
    value, size = (
        nn.Parameter(torch.zeros(3 * 256)),
        torch.tensor([1e-4, 1e3, 1e-4]).repeat_interleave(256),
    )
    group = before
    optimizer = DiLoCo(
        torch.optim.SGD([value], lr=1.0), lambda: group, interval=1, outer=sgd_one, bits=8
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(3 if rank < 3 else 0):
        value.grad = size * torch.rand(3 * 256, generator=generator)
        optimizer.step()
    group = after
    if rank == 3:
        optimizer.sync()
        return None
    if rank == 0:
        return None
    start = value.detach().clone()
    value.grad = size * torch.rand(3 * 256, generator=generator)
    optimizer.step()
    return ((start - value.detach() - value.grad).abs() / size).max().item()


# ---- replicas that go wrong


def one_replica_goes_wrong(rank: int) -> Any:
    """Rank 2 has a gradient of another size, or none that is finite, in the steps 30 to 33 of 80."""
    found = {}
    evaluation = torch.cat([batch(10_000, each, 64) for each in range(RANKS)])
    for name, kind in (("EDiT", EDiT), ("DiLoCo", DiLoCo)):
        for factor in ("1", "nan", "inf", "1000"):
            model = network()
            inner = torch.optim.AdamW(model.parameters(), lr=0.01)
            if factor == "1000":  # AdamW would not notice
                inner = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = kind(inner, interval=5)
            losses, reasons, weights = [], [], []
            for step in range(80):
                backward(model, optimizer, batch(step, rank))
                if rank == 2 and 30 <= step < 34:
                    for each in model.parameters():
                        each.grad *= float(factor)
                before = optimizer.syncs
                optimizer.step()
                if optimizer.syncs > before:
                    losses.append(loss_of(model, evaluation).item())
                    reasons.append(optimizer.latest.reasons)
                    weights.append(optimizer.latest.weights)
            found[f"{name} {factor}"] = {
                "losses": losses, "reasons": reasons, "weights": weights, "end": numbers(model),
            }  # fmt: skip
    return found


def all_replicas_go_wrong(rank: int) -> Any:
    model = network()
    optimizer = EDiT(torch.optim.AdamW(model.parameters(), lr=0.01), interval=5, bits=8)
    after = []
    momentum = []
    for step in range(20):
        backward(model, optimizer, batch(step, rank))
        if step == 12:
            for each in model.parameters():
                each.grad *= math.nan
        optimizer.step()
        if step in (9, 14, 19):
            after.append(numbers(model))
            state = optimizer.state_dict()["state"][0]
            momentum.append(state["local_sgd.outer.momentum_buffer"].tolist())
    return {"parameters": after, "momentum": momentum}


# ---- replicas that come, go, and are slow


def replicas_come_and_go(rank: int) -> Any:
    """Ranks 0 and 1 from the beginning; 2 and 3 come at the third sync; 1 leaves at the sixth."""
    groups = {members: dist.new_group(list(members)) for members in ((0, 1), (0, 1, 2, 3), (0, 2, 3))}  # fmt: skip
    model = network(seed=0 if rank < 2 else rank)
    optimizer: Any = None

    def members() -> Any:
        if optimizer.syncs < 2 and rank < 2:
            return groups[0, 1]
        return groups[0, 1, 2, 3] if optimizer.syncs < 5 else groups[0, 2, 3]

    optimizer = EDiT(torch.optim.AdamW(model.parameters(), lr=0.01), members, interval=4, bits=8)
    found = []
    if rank >= 2:
        optimizer.sync()  # the third one
    while optimizer.syncs < (5 if rank == 1 else 9):
        backward(model, optimizer, batch(100 + optimizer._steps, rank))
        before = optimizer.syncs
        optimizer.step()
        if optimizer.syncs > before:
            found.append([optimizer.syncs, numbers(model), optimizer.latest.weights])
    dist.barrier()
    return found


def fragments_end_together(rank: int) -> Any:
    """After a multiple of ``interval`` steps, and a sync of each of the other fragments."""
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = EDiT(inner, interval=6, fragments=3, delay=1)
    for step in range(12):
        backward(model, optimizer, batch(step, rank))
        optimizer.step()
    before = numbers(model)
    for _ in range(2):
        optimizer.sync()
    return [before, numbers(model)]


def a_slow_replica_and_its_own_clock(rank: int) -> Any:
    """A step of rank 3 takes 5 seconds, of others 1; nobody waits in real time."""
    model = network()
    now = 0.0
    optimizer = AEDiT(
        torch.optim.AdamW(model.parameters(), lr=0.01), seconds=10.0, clock=lambda: now,
    )  # fmt: skip
    steps, found = 0, []
    while optimizer.total_steps < 160:
        backward(model, optimizer, batch(steps, rank))
        now += 5.0 if rank == 3 else 1.0
        steps += 1
        before = optimizer.syncs
        optimizer.step()
        if optimizer.syncs > before:
            found.append(now)
    return {"steps": steps, "syncs": found, "total": optimizer.total_steps, "end": numbers(model)}


# ---- sharded replicas


def clocks_of_one_replica_differ(rank: int) -> Any:
    """The clock of one rank of each replica is fast; the ranks of a replica must stop in the same step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shards"])
    now = 0.0
    optimizer = AEDiT(
        torch.optim.AdamW(model.parameters(), lr=0.01), mesh["replicas"].get_group(),
        seconds=10.0, fragments=2, clock=lambda: now,
    )  # fmt: skip
    found = []
    for step in range(40):
        backward(model, optimizer, batch(step, rank // 2))
        now += 1.5 if rank % 2 else 1.0
        before = optimizer.syncs
        if rank == 2 and step == 20:  # one shard of one replica
            model[0].weight.grad.to_local().fill_(math.nan)
        optimizer.step()
        if optimizer.syncs > before:
            found.append([step, optimizer.latest.weights])
    own = [optimizer.state[each]["step"].item() for each in model.parameters()]
    return {"syncs": found, "end": numbers(model), "own steps": own}


def two_sharded_replicas(rank: int) -> Any:
    """Replicas of two ranks with FSDP2, against replicas of one rank with the same data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    replica = rank // 2
    alone = dist.new_group([0, 2]), dist.new_group([1, 3])
    found: dict[str, Any] = {}

    def make(inner: Any, sharded: bool, **options: Any) -> tuple[nn.Module, Any]:
        model = network()
        if sharded:
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=mesh["shards"])
        group = mesh["replicas"].get_group() if sharded else alone[rank % 2]
        options = {"interval": 3, "clip": 0.05, **options}
        return model, EDiT(inner(model), group, fragments=2, delay=1, alpha=0.25, **options)

    for name, inner in (
        ("AdamW", lambda model: torch.optim.AdamW(model.parameters(), lr=0.02)),
        ("AGD", lambda model: AGD(model.parameters(), lr=0.02)),
    ):
        ends = []
        for sharded in (True, False):
            model, optimizer = make(inner, sharded, interval=6)
            weights = []
            for step in range(20):
                backward(model, optimizer, batch(step, replica))
                before = optimizer.syncs
                optimizer.step()
                if optimizer.syncs > before:
                    weights.append(optimizer.latest.weights)
            ends.append([numbers(model), weights])
        found[name] = ends
    return found


def sharded_parameters(rank: int) -> Any:
    """Optimizers that need norms over shards: by rows, and by columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))["shards"]
    found: dict[str, Any] = {}
    makes: dict[str, Callable[[nn.Module], Any]] = {
        "WSAM": lambda model: WSAM(model, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=1.0),
        "adaptive": lambda model: WSAM(
            model, torch.optim.SGD(model.parameters(), lr=0.1), adaptive=True, decouple=False
        ),
        "GroupAdam": lambda model: GroupAdam(model.parameters(), lr=0.01, l1=0.01, l21=0.01),
    }  # fmt: skip
    for name, make in makes.items():
        for spread in ("no", "rows", "columns"):
            model = network()
            if spread == "rows":
                for layer in (model[0], model[2], model):
                    fully_shard(layer, mesh=mesh)
            elif spread == "columns":
                parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
            optimizer = make(model)
            for step in range(4):

                def closure(model=model, optimizer=optimizer, step=step):
                    return backward(model, optimizer, batch(step, 0))

                if name == "GroupAdam":
                    closure()
                    optimizer.step()
                else:
                    optimizer.step(closure)
            found.setdefault(name, []).append(numbers(model))
    return found


def states_of_sharded_replicas(rank: int, out: Path) -> Any:
    """A training is continued from DCP's form of the state dict, and from Flash Checkpoint.

    Both replicas train on the same data: of equal extents, a checkpoint keeps one.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))

    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 131), nn.Tanh(), nn.Linear(131, 1))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["shards"])
        inner = AGD8bit(model.parameters(), lr=1e-3)
        return model, EDiT(inner, mesh["replicas"].get_group(), interval=2)

    def train(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (model(inputs) - inputs[:, :1]).square().mean().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, range(5))
    kept = copy.deepcopy(
        [dcp_state.get_model_state_dict(model), dcp_state.get_optimizer_state_dict(model, optimizer)]
    )  # fmt: skip
    checkpointer = Checkpointer(out / "checkpoints", linger=60.0)
    checkpointer.save(5, {"model": model, "optimizer": optimizer}, to="memory")
    checkpointer.wait()
    train(model, optimizer, range(5, 9))
    by_dcp, its_optimizer = make()
    dcp_state.set_model_state_dict(by_dcp, kept[0])
    dcp_state.set_optimizer_state_dict(by_dcp, its_optimizer, kept[1])
    train(by_dcp, its_optimizer, range(5, 9))
    by_flash, its_optimizer = make()
    record = checkpointer.load({"model": by_flash, "optimizer": its_optimizer})
    train(by_flash, its_optimizer, range(5, 9))
    checkpointer.close()
    return {
        "source": record and record.source, "syncs": [optimizer.syncs, its_optimizer.syncs],
        "end": numbers(model), "dcp": numbers(by_dcp), "flash": numbers(by_flash),
        "keys": sorted(kept[1]["state"]["0.weight"]),
    }  # fmt: skip


def a_replica_dies(rank: int, out: Path) -> Any:
    """Rank 3 dies before the third sync; the others form a new group, and their next step tries again."""
    model = network()
    group: Any = dist.group.WORLD
    optimizer = EDiT(torch.optim.AdamW(model.parameters(), lr=0.01), lambda: group, interval=4)
    found: dict[str, Any] = {"errors": 0}
    for step in range(21):
        backward(model, optimizer, batch(step, rank))
        if rank == 3 and step == 11:
            os._exit(0)
        try:
            optimizer.step()
        except InfrastructureError as error:
            found["errors"] += 1
            found["message"] = str(error).partition(":")[0]
            found["syncs"] = optimizer.syncs
        if found["errors"] and dist.get_world_size() == 4:  # the error held on to the group
            group = None
            dist.destroy_process_group()
            store = dist.FileStore(str(out / "store"), 3)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
            group = dist.group.WORLD
    return {**found, "end": [optimizer.syncs, numbers(model), optimizer.latest.weights]}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cases: list[Callable[[int], Any]] = [
        every_step_is_synchronous_training, a_warm_up_is_synchronous_training,
        a_warm_up_with_unused_parameters_and_overflows, several_replicas_are_simulated,
        eight_bits, eight_bits_of_other_parts, one_replica_goes_wrong,
        all_replicas_go_wrong, replicas_come_and_go, fragments_end_together, a_slow_replica_and_its_own_clock,
        clocks_of_one_replica_differ, two_sharded_replicas, sharded_parameters,
    ]  # fmt: skip
    found = {case.__name__: case(rank) for case in cases}
    for last in (states_of_sharded_replicas, a_replica_dies):
        found[last.__name__] = last(rank, out)
        (out / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
