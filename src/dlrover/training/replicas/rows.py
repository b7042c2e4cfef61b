"""The ranks that have a replica together: a row of the device mesh of an unchanged program (HSDP).

A row trains, is lost and starts again as a whole. So its connection is made once, and never anew in a living process:
where it fails, another rank of the row is lost, and the agent is about to end this process, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from dlrover import launched
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.training.machine.places import EXCLUDED_LIMIT
from dlrover.training.replicas.groups import PATIENCE, TIMEOUT, Changed, Group, MeetingStore, done
from dlrover.training.replicas.link import Link

Tensors: TypeAlias = list[torch.Tensor]
Start: TypeAlias = Callable[[Any, Tensors, Tensors], Any]
CONNECT_TIMEOUT = timedelta(seconds=60) / PATIENCE
"""Time limit for the connection to a rank of the row that has said where it is."""


class Row:
    """This rank's connection with the others of its row."""

    def __init__(
        self,
        link: Link,
        given: launched.Given,
        size: int,
        check: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        """Connect; ``check`` is called meanwhile and raises an error if the wait has no sense.

        ``leave`` ends this process, once the connection has failed, if the others have finished the training without it.
        """
        self.size = size
        self.place = given.rank % size
        self._link, self._given, self._leave = link, given, leave
        number = given.rank // size
        store = MeetingStore(link, given.round, given.attempt, {}, number)
        store.look = check
        try:
            with store.kept():
                self._backend = dist.ProcessGroupGloo(store, self.place, size, CONNECT_TIMEOUT)
        except (RuntimeError, Changed) as error:
            self._lost(error)
        self._backend._set_default_timeout(TIMEOUT)  # noqa: SLF001

    def most(self, *values: int) -> list[int]:
        """Return the greatest of each value among the ranks of the row; all of them call this."""
        found = torch.tensor(values, dtype=torch.int64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.run(lambda backend: backend.allreduce([found], options))
        return [int(value) for value in found]

    def run(self, start: Callable[[Any], Any]) -> None:
        """Carry out a collective of the row."""
        work = start(self._backend)
        try:
            work.wait()
        except RuntimeError as error:
            self._lost(error)

    def _lost(self, error: Exception) -> NoReturn:
        """Wait for the end of this process, since another one of its row has ended.

        The master may know of the loss only after the other's core dump, or the time for its node to reconnect.

        Raises:
            InfrastructureError: The agent does not end it in time.
            RuntimeError: No rank of the row is lost: the error is the collective's own.
        """
        given, ended = self._given, threading.Event()  # never set
        out = self._link.wait(
            lambda m: m.over or m.attempts.get(given.rank) != given.attempt, EXCLUDED_LIMIT
        )
        self._leave()
        if out is None and isinstance(error, RuntimeError):
            raise error
        ended.wait(EXCLUDED_LIMIT)
        raise InfrastructureError(
            f"--survive: rank {given.rank} has lost another rank of its row; the row starts again: {error}"
        ) from None


class RowGroup(Group):
    """torch's process group of a row. Each collective is carried out when it is called.

    While the rank replays, collectives have no effect: the results are as if all ranks had this one's tensors.
    """

    def __init__(self, row: Row, replays: Callable[[], bool]) -> None:
        super().__init__(row.place, row.size)
        self._row, self._replays = row, replays

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return "gloo"

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce tensors."""
        options = _or(opts, "Allreduce")
        return self._reduce(options, tensors, [], lambda b, own, _: b.allreduce(own, options))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce tensors."""
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp if opts is not None else options.reduceOp
        for tensor in tensors:
            self.allreduce([tensor], options)
        return done(tensors)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        """Send tensors of one rank to the others."""
        return self._run(tensors, [], lambda b, own, _: b.broadcast(own, _or(opts, "Broadcast")))

    def reduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce tensors in one rank."""
        options = _or(opts, "Reduce")
        return self._reduce(options, tensors, [], lambda b, own, _: b.reduce(own, options))

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Gather a tensor of each rank."""
        return self._run(
            outputs[0], inputs, lambda b, all_, own: b.allgather([all_], own), inputs * self._row.size
        )  # fmt: skip

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        """Gather a tensor of each rank into one."""
        return self._run(
            [output], [own], lambda b, all_, one: b._allgather_base(all_[0], one[0]),  # noqa: SLF001
            [own.reshape(-1).repeat(self._row.size)],
        )  # fmt: skip

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Gather a tensor of each rank in one of them."""
        every = outputs[0] if outputs else []
        return self._run(
            every, inputs,
            lambda b, all_, own: b.gather([all_] if outputs else [], own, _or(opts, "Gather")),
            inputs * len(every),
        )  # fmt: skip

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        """Send a tensor of one rank to each."""
        every = inputs[0] if inputs else []
        return self._run(
            outputs, every,
            lambda b, own, all_: b.scatter(own, [all_] if inputs else [], _or(opts, "Scatter")),
            every[self._row.place :][:1] or outputs,
        )  # fmt: skip

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        """Reduce as many tensors as the row has ranks; each gets one."""
        options = _or(opts, "ReduceScatter")
        return self._reduce(
            options, outputs, inputs[0], lambda b, own, all_: b.reduce_scatter(own, [all_], options),
            [inputs[0][self._row.place]],
        )  # fmt: skip

    def _reduce_scatter_base(self, own: torch.Tensor, every: torch.Tensor, opts: Any = None) -> Any:
        """Reduce a tensor; each rank gets a part."""
        options = _or(opts, "ReduceScatter")
        return self._reduce(
            options, [own], [every], lambda b, one, all_: b._reduce_scatter_base(one[0], all_[0], options),  # noqa: SLF001
            [every.reshape(self._row.size, -1)[self._row.place]],
        )  # fmt: skip

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Reduce tensors; each rank gets parts."""
        for own, every in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(own, every, opts)
        return done(outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Exchange tensors with each rank."""
        options, none = _or(opts, "AllToAll"), [torch.zeros_like(output) for output in outputs]
        return self._run(outputs, inputs, lambda b, got, own: b.alltoall(got, own, options), none)

    def alltoall_base(
        self, output: torch.Tensor, own: torch.Tensor, got: Any, given: Any, opts: Any = None
    ) -> Any:
        """Exchange parts of a tensor with each rank."""
        options = _or(opts, "AllToAll")
        return self._run(
            [output], [own], lambda b, one, two: b.alltoall_base(one[0], two[0], got, given, options),
            [torch.zeros_like(output)],
        )  # fmt: skip

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self._run([], [], lambda b, _, __: b.barrier(_or(opts, "Barrier")))

    # As torch calls them since version 2.13.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    @contextlib.contextmanager
    def carried_out(self) -> Iterator[None]:
        """Carry out collectives within this context, also while the row replays: all its ranks come here."""
        replays, self._replays = self._replays, lambda: False
        try:
            yield
        finally:
            self._replays = replays

    def _reduce(
        self,
        options: Any,
        outputs: Tensors,
        inputs: Tensors,
        start: Start,
        alone: Tensors | None = None,
    ) -> Any:
        """Carry out a collective that reduces. gloo takes a mean for a sum in earlier versions of torch, or refuses it."""
        average = options.reduceOp == dist.ReduceOp.AVG
        if options.reduceOp == dist.ReduceOp.PREMUL_SUM:
            raise ConfigurationError(
                "--survive: a sum with a factor within a row (set_gradient_divide_factor) is not possible; use a mean or a"
                " sum, or start the program without --survive."
            )
        if average:
            options.reduceOp = dist.ReduceOp.SUM
        work = self._run(outputs, inputs, start, alone, view=lambda tensor: tensor)
        if average:
            options.reduceOp = dist.ReduceOp.AVG
            with torch.no_grad():
                for output in outputs if not self._replays() else ():
                    output.copy_(output / self._row.size)  # integers, too
        return work

    def _run(
        self,
        outputs: Tensors,
        inputs: Tensors,
        start: Start,
        alone: Tensors | None = None,
        view: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: _bytes(tensor),  # noqa: PLW0108
    ) -> Any:
        """Carry out a collective in host memory; ``alone`` are its results while this rank replays."""
        with torch.no_grad():
            results = outputs if alone is None else alone
            if not self._replays():
                results = [tensor.cpu() for tensor in outputs]  # the tensor itself if it is there
                given = [tensor.cpu() for tensor in inputs]
                self._row.run(
                    lambda backend: start(backend, [*map(view, results)], [*map(view, given)])
                )
            for output, result in zip(outputs, results, strict=True):
                if output is not result:
                    output.copy_(result.view_as(output))
        return done(outputs)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of numbers of 8 bits, which gloo does not know, as bytes."""
    small = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.view(torch.uint8) if small else tensor


def _or(options: Any, name: str) -> Any:
    """Return the options of a collective, those by default if there are none."""
    return options if options is not None else getattr(dist, f"{name}Options")()
