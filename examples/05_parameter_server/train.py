"""Learn who clicks on what, with the parameters on servers of their own, through any kill and at any size.

    dlrover-run --nnodes 1:3 --local-nodes 1 --servers 1:2 --auto-scale \
        examples/05_parameter_server/train.py --out out/servers

A factorization machine whose table is spread over the servers. The workers are dealt the data, and wait for
each other only to save. Which server has which rows is decided anew whenever the job gets another size, so
that each has the same load; see ``table.py``. In a job without servers the last ``--servers`` ranks serve.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from clicks import Clicks
from table import BLOCKS, SAVE, STOP, Server, Table, Toil, divide, shards
from torch import Tensor
from torch.nn import functional

from dlrover.checkpoint import Checkpointer
from dlrover.data import ElasticDataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the checkpoint")
    add("--clicks", type=int, default=100_000, help="samples in an epoch")
    add("--epochs", type=int, default=1)
    add("--batch-size", type=int, default=100, help="samples in a step of one worker")
    add("--lr", type=float, default=0.1)
    add("--save-every", type=int, default=50, help="steps of rank 0 between two checkpoints")
    add("--servers", type=int, default=1, help="how many ranks serve, if the job has no servers")
    add("--step-time", type=float, default=0.0, help="seconds that a worker idles in every step")
    add("--row-time", type=float, default=0.0, help="seconds that a server idles for every row")
    add("--row-work", type=float, default=0.0, help="seconds that it computes for every row")
    return parser.parse_args()


class Roles(NamedTuple):
    """Who is what in this world: the workers come first."""

    rank: int
    workers: int
    servers: int

    @property
    def server(self) -> int:
        """The number of this server; negative for a worker."""
        return self.rank - self.workers


def find_roles(rank: int, world_size: int, servers: int) -> Roles:
    """As the launcher says; ``servers`` where it knows of no servers."""
    role = os.environ.get("ROLE_NAME")
    if role in ("worker", "ps"):
        alike = int(os.environ["ROLE_WORLD_SIZE"])
        servers = alike if role == "ps" else world_size - alike
    if not 0 < servers < world_size:
        raise SystemExit(f"A world of {world_size} with {servers} servers: both kinds are needed.")
    return Roles(rank, world_size - servers, servers)


class Pushes(torch.optim.Optimizer):
    """An optimizer whose servers do the work: a step sends them the gradients of the rows in use."""

    def __init__(self, table: Table) -> None:
        super().__init__([torch.nn.Parameter(torch.empty(0))], {})
        self._table = table

    @torch.no_grad()
    def step(self, rows: Tensor, parameters: Tensor) -> None:
        """``parameters`` have their gradients."""
        self._table.push(rows, parameters.grad)


def logits_of(parameters: Tensor, words: Tensor) -> Tensor:
    """A factorization machine: the words' weights, and the products of all pairs of their vectors."""
    found = parameters[words]
    weights, vectors = found[..., 0], found[..., 1:]
    pairs = vectors.sum(1).square() - vectors.square().sum(1)
    return weights.sum(1) + pairs.sum(1) / 2


class Training:
    """What all ranks of one world do together."""

    def __init__(self, args: argparse.Namespace, store: dist.Store, roles: Roles) -> None:
        self.args, self.store, self.roles = args, store, roles
        self.checkpointer = Checkpointer(args.out / "checkpoint", interval=10 * args.save_every)
        known = self.checkpointer.read({"load"})
        load = torch.zeros(BLOCKS, dtype=torch.float64) if known is None else known[1]["load"]
        self.owners = divide(load, roles.servers)
        self.server = Server(
            [block for block in range(BLOCKS) if self.owners[block] == roles.server],
            args.lr,
            Toil(args.row_time, args.row_work),
        )
        data = ElasticDataset(Clicks(args.clicks), name="clicks", epochs=args.epochs, shuffle=True)
        self.data = data
        self.state: dict[str, Any] = {
            "step": 0,
            "load": load,
            "learned": torch.zeros(2, dtype=torch.float64),
            "table": shards(self.server.blocks()),
            "data": data,
        }
        self.checkpointer.load(self.state)
        self.table = Table(self.owners, range(roles.workers, roles.workers + roles.servers))
        self.sums = torch.zeros(2, dtype=torch.float64)  # since the last save: samples, their loss
        self.saved = 0
        self.next_save = self.state["step"] + args.save_every

    def save(self) -> None:
        """Save what all ranks have; those of the servers only once no worker has anything to push."""
        if self.roles.server < 0:
            self.table.tell(SAVE)
        step = self.state["step"] if self.roles.rank == 0 else 0
        new = torch.cat(
            [torch.tensor([float(step)], dtype=torch.float64), self.sums, self.table.load]
        )
        dist.all_reduce(
            new
        )  # every push was answered before: the servers take part when all have said so
        self.sums.zero_()
        self.table.load.zero_()
        self.saved += 1
        self.state["step"] = int(new[0])
        self.next_save = self.state["step"] + self.args.save_every
        self.state["learned"] += new[1:3]
        self.state["load"] += new[3:]
        self.checkpointer.save(self.state["step"], self.state)
        if self.roles.rank == 0:
            self._tell(new[1:3], new[3:])

    def _tell(self, lately: Tensor, load: Tensor) -> None:
        count, loss = lately.tolist()
        parts = torch.zeros(self.roles.servers, dtype=torch.float64)
        parts.index_add_(0, torch.tensor(self.owners), load)
        shares = " ".join(f"{share:.0%}" for share in (parts / load.sum().clamp(min=1)).tolist())
        print(
            f"step {self.state['step']}: {self.state['learned'][0]:.0f} clicks, "
            f"loss {loss / max(count, 1):.3f} lately; rows by server: {shares}",
            flush=True,
        )

    # ---- a worker

    def work(self) -> None:
        """Learn from what this worker is dealt."""
        optimizer = Pushes(self.table)
        for _ in self.data.until_end():
            for words, clicked in self.data.loader(self.args.batch_size):
                self._learn(optimizer, words, clicked)
                self._save_if_asked()
        self.store.add("ended", 1)
        while self.store.add("ended", 0) < self.roles.workers:
            self._save_if_asked()  # the others are at their last batches
            time.sleep(0.01)
        self.save()
        self.table.tell(STOP)

    def _learn(self, optimizer: Pushes, words: Tensor, clicked: Tensor) -> None:
        rows, places = words.unique(return_inverse=True)
        parameters = self.table.pull(rows).requires_grad_()
        time.sleep(self.args.step_time)
        loss = functional.binary_cross_entropy_with_logits(logits_of(parameters, places), clicked)
        loss.backward()
        optimizer.step(rows, parameters)
        self.sums += torch.tensor([len(clicked), loss.item() * len(clicked)])
        self.state["step"] += 1

    def _save_if_asked(self) -> None:
        """Rank 0 asks for it; the others see that after their next step."""
        asked = f"save {self.saved}"
        if self.roles.rank == 0 and self.state["step"] >= self.next_save:
            self.store.set(asked, "")
        if self.store.check([asked]):
            self.save()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    store, rank, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    roles = find_roles(rank, world_size, args.servers)
    training = Training(args, store, roles)
    what = "worker" if roles.server < 0 else "server"
    print(f"rank {rank} of {world_size} is a {what}: process {os.getpid()}\n", end="", flush=True)
    if roles.server < 0:
        training.work()
    else:
        training.server.serve(roles.workers, training.save)
    training.checkpointer.wait()
    training.checkpointer.close()
    training.data.close()
    dist.barrier()  # rank 0 has the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
