"""Tensors sent from rank to rank while all ranks load: each rank sends what it can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import torch
import torch.distributed as dist

from dlrover._util import decoding
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.loading.plan import Read
from dlrover.checkpoint.machine.extent import Box, Piece

BATCH = 1 << 26
"""Maximum bytes per message, unless one piece is larger."""

_pieces = decoding.msgpack_decoder(list[tuple[int, int, tuple[int, ...], tuple[int, ...]]])


def fetch(
    world: TorchWorld,
    servers: Mapping[int, int],
    wanted: Sequence[Piece],
    itemsize: Callable[[Piece], int],
    read: Read,
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield the bytes of pieces, in any order. Collective: exhaust it on every rank.

    Args:
        world: the ranks.
        servers: the rank that sends a saved rank's pieces, by saved rank; the same on all ranks.
        wanted: the pieces that this rank needs.
        itemsize: returns the bytes per element of a piece.
        read: returns the elements of a piece that this rank sends.
    """
    asked = [(p.rank, p.entry, p.box.in_source, p.box.shape) for p in wanted]
    everyone = [_pieces.decode(data) for data in world.gather(msgspec.msgpack.encode(asked))]
    for shift in range(world.size):
        receiver = (world.rank + shift) % world.size
        sender = (world.rank - shift) % world.size
        outgoing = _batches(
            [_piece(ask) for ask in everyone[receiver] if servers[ask[0]] == world.rank], itemsize
        )
        incoming = _batches([p for p in wanted if servers[p.rank] == sender], itemsize)
        for number in range(max(len(outgoing), len(incoming))):
            parts = _read(outgoing[number], read) if number < len(outgoing) else None
            if shift == 0:
                data = parts
            else:
                sent = _send(world, parts, receiver)
                data = _receive(world, incoming, number, sender, itemsize)
                if sent is not None:
                    sent.wait()
            if data is not None and number < len(incoming):
                yield from _split(data, incoming[number], itemsize)


def _piece(ask: tuple[int, int, tuple[int, ...], tuple[int, ...]]) -> Piece:
    rank, entry, start, shape = ask
    return Piece(rank, entry, Box(shape, start, (0,) * len(shape)))


def _batches(found: Sequence[Piece], itemsize: Callable[[Piece], int]) -> list[list[Piece]]:
    batches: list[list[Piece]] = []
    size = BATCH
    for piece in found:
        nbytes = _nbytes(piece, itemsize)
        if size + nbytes > BATCH:
            batches.append([])
            size = 0
        batches[-1].append(piece)
        size += nbytes
    return batches


def _nbytes(piece: Piece, itemsize: Callable[[Piece], int]) -> int:
    count = itemsize(piece)
    for size in piece.box.shape:
        count *= size
    return count


def _read(batch: list[Piece], read: Read) -> torch.Tensor:
    return torch.cat([read(piece).contiguous().reshape(-1).view(torch.uint8) for piece in batch])


def _send(world: TorchWorld, data: torch.Tensor | None, to: int) -> dist.Work | None:
    return None if data is None else dist.isend(data, group=world.group, group_dst=to)


def _receive(
    world: TorchWorld,
    incoming: list[list[Piece]],
    number: int,
    sender: int,
    itemsize: Callable[[Piece], int],
) -> torch.Tensor | None:
    if number >= len(incoming):
        return None
    nbytes = sum(_nbytes(piece, itemsize) for piece in incoming[number])
    data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    dist.recv(data, group=world.group, group_src=sender)
    return data


def _split(
    data: torch.Tensor, batch: list[Piece], itemsize: Callable[[Piece], int]
) -> Iterator[tuple[Piece, torch.Tensor]]:
    start = 0
    for piece in batch:
        end = start + _nbytes(piece, itemsize)
        yield piece, data[start:end]
        start = end
