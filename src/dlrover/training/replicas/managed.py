"""The process groups of an unchanged program that survive losses: of all ranks, and of those that have the same part.

Ranks and the world's size stay as they are. A collective works among the ranks that train: sums and means leave out
those that do not, and a gather has the lowest rank's part in their places. It is carried out when it is called; one
in which a rank is lost is repeated by the others. In a program whose replicas are spread over rows of ranks (HSDP),
there are also groups of the ranks with the same place in their rows; all ranks use theirs at the same place of the program.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dlrover import launched
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.training.replicas.groups import Group, Peers, done
from dlrover.training.replicas.rows import RowGroup
from dlrover.training.replicas.unchanged import Unchanged

NAME = "dlrover"
"""Name of the backend, as ``torch.distributed.get_backend`` returns it."""


class NotWholeError(InfrastructureError):
    """A rank was lost while all saved a checkpoint together."""


class ManagedGroup(Group):
    """A process group whose collectives go on without lost ranks."""

    def __init__(self, ranks: list[int], own: int, unchanged: Unchanged) -> None:
        super().__init__(ranks.index(own), len(ranks))
        self.ranks, self.own = ranks, own
        """The group's ranks and this rank, as numbered in the world."""
        self._unchanged, self._size = unchanged, len(ranks)

    @property
    def whole(self) -> bool:
        """True if all ranks of the world are in the group."""
        return self._size == launched.given.world_size

    def as_row(self) -> RowGroup | None:
        """Return this group as that of a row, if the row has all ranks: torch makes no other one for it."""
        row = self._unchanged.row
        if row is None or row.size != self._size:
            return None
        return RowGroup(row, lambda: self._unchanged.replaying)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return NAME

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce tensors among the ranks that train."""
        reduction = getattr(opts, "reduceOp", dist.ReduceOp.SUM)

        def operation(group: Peers) -> list[torch.Tensor]:
            copies = [tensor.detach().cpu().clone() for tensor in tensors]
            group.reduce(copies, reduction)
            return copies

        return self._run(operation, tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce tensors among the ranks that train."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Send tensors of a rank to the others; if it does not train, those of the lowest rank that does."""
        root = self.ranks[getattr(opts, "rootRank", 0)]

        def operation(group: Peers) -> list[torch.Tensor]:
            copies = [tensor.detach().cpu().clone().contiguous() for tensor in tensors]
            group.send_all(copies, root if root in group.ranks else group.ranks[0])
            return copies

        return self._run(operation, tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Gather a tensor of each rank."""
        return self._gather(outputs[0], inputs[0])

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        """Gather a tensor of each rank into one."""
        return self._gather(list(output.view(self._size, *own.shape)), own)

    # As torch calls them since version 2.13.
    all_gather_single = _allgather_base

    def _gather(self, outputs: list[torch.Tensor], own: torch.Tensor) -> Any:
        def operation(group: Peers) -> list[torch.Tensor]:
            found = group.gather(own.detach().cpu().contiguous())
            by_rank = dict(zip(group.ranks, found, strict=True))
            return [by_rank.get(rank, found[0]) for rank in self.ranks]

        return self._run(operation, outputs, [own] * self._size)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Gather a tensor of each rank in one of them."""
        own = inputs[0]
        return self._gather(
            (outputs and outputs[0]) or [torch.empty_like(own) for _ in range(self._size)], own
        )

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce tensors in one rank; those of the others stay as they are."""
        root = self.ranks[getattr(opts, "rootRank", 0)]
        return self.allreduce(
            tensors if root == self.own else [tensor.clone() for tensor in tensors], opts
        )

    def exchange(self, objects: Any, root: int) -> Any:
        """Return the objects of a rank, or those of the lowest rank that trains; None while this rank replays, beyond the first step.

        Raises:
            NotWholeError: The rank is lost, while all save.
        """
        source = root

        def operation(group: Peers) -> list[torch.Tensor]:
            nonlocal source
            source = root if root in group.ranks else group.ranks[0]
            own = _packed(objects)
            length = torch.tensor([len(own)], device="cpu")
            group.send_all([length], source)
            data = (
                own
                if source == self.own
                else torch.empty(int(length), dtype=torch.uint8, device="cpu")
            )
            group.send_all([data], source)
            return [data]

        results = self._unchanged.objects(operation, whole=self.whole)
        if source != root and self._unchanged.saving:
            raise NotWholeError(f"rank {root} is lost")
        return _unpacked(results[0]) if results else None

    def gather_objects(self, own: Any) -> list[Any]:
        """Return the object of each rank, that of the lowest one for a rank that does not train.

        While all save by torch's distributed checkpoints, a lost one's is an error, as these have it.
        """
        saving = self._unchanged.saving
        error = NotWholeError("the rank is lost"), traceback.StackSummary()

        def operation(group: Peers) -> list[torch.Tensor]:
            data = _packed(own)
            lengths = [
                int(length) for length in group.gather(torch.tensor([len(data)], device="cpu"))
            ]
            padded = torch.nn.functional.pad(data, (0, max(lengths) - len(data)))
            found = zip(group.ranks, group.gather(padded), lengths, strict=True)
            by_rank = {rank: one[:length] for rank, one, length in found}
            other = _packed(error) if saving else by_rank[group.ranks[0]]
            return [by_rank.get(rank, other) for rank in self.ranks]

        results = self._unchanged.objects(operation, whole=self.whole)
        return [_unpacked(result) for result in results] if results else [own] * self._size

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks that train."""
        token = [torch.zeros(1, device="cpu")]
        return self._run(lambda group: group.gather(token[0])[:1], token)

    def _run(
        self,
        operation: Callable[[Peers], list[torch.Tensor]],
        outputs: list[torch.Tensor],
        alone: list[torch.Tensor] | None = None,
    ) -> Any:
        """Carry out an operation and write its results to ``outputs``."""
        results = self._unchanged.collective(operation, alone or outputs, whole=self.whole)
        with torch.no_grad():
            for output, result in zip(outputs, results, strict=True):
                if output is not result:
                    output.copy_(result.view_as(output))
        return done(outputs)


def _packed(objects: Any) -> torch.Tensor:
    """Return objects as bytes, as torch's own functions for objects do."""
    data, _length = c10d._object_to_tensor(objects, torch.device("cpu"), None)  # noqa: SLF001
    return torch.as_tensor(data)


def _unpacked(data: torch.Tensor) -> Any:
    return c10d._tensor_to_object(data, data.numel(), None)  # noqa: SLF001


def register(unchanged: Unchanged) -> None:
    """Let torch make these groups for the backend `NAME`."""
    given = launched.given

    def create(options: Any, _pg_options: Any) -> dist.ProcessGroup:
        ranks = list(options.global_ranks_in_group) or list(range(given.world_size))
        row, size = unchanged.row, unchanged.row.size if unchanged.row is not None else 1
        column = list(range(given.rank % size, given.world_size, size))
        if row is not None and ranks == list(range(given.rank - row.place, given.rank - row.place + size)):  # fmt: skip
            return RowGroup(row, lambda: unchanged.replaying)
        if len(ranks) == given.world_size or ranks == column:
            return ManagedGroup(ranks, given.rank, unchanged)
        raise ConfigurationError(
            f"--survive: a group of {len(ranks)} of the {given.world_size} ranks cannot survive the loss of a rank; the program"
            " can have groups of all ranks, and those of a device mesh (replicas, ranks of a replica) for HSDP."
        )

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
