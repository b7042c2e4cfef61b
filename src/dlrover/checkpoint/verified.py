"""Copies out of a generation, checked meanwhile: each chunk is hashed while the processor has it at hand.

Hashing apart from the copy reads the memory once more, and memory bandwidth is what limits a load.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from dlrover.checkpoint.layout import TensorEntry, name
from dlrover.checkpoint.memory import Generation

LARGE = 1 << 20
"""Bytes from which on a tensor is checked here; the saver checks the others, so that both have work."""
CHUNK = 4 << 20
"""Bytes that are hashed and copied at a time: they must fit in a cache that the cores share."""
THREADS = 4
"""At most so many at once; beyond that the memory is the limit."""

_Job = tuple[int, torch.Tensor | None]
"""The number of a tensor, and where it goes; None: it is only checked."""


class VerifiedCopy:
    """Copies tensors of one generation. Call `copy` any number of times, then `problem` once.

    Args:
        generation: Where they are.
        entries: What they are.
        sums: Their checksums.
        share: How many processes of this machine do the same at the same time.
    """

    def __init__(
        self,
        generation: Generation,
        entries: Sequence[TensorEntry],
        sums: Sequence[int],
        share: int,
    ) -> None:
        self._generation = generation
        self._entries = entries
        self._sums = sums
        self._threads = max(1, min(THREADS, len(os.sched_getaffinity(0)) // share))
        self._base = torch.frombuffer(generation.data, dtype=torch.uint8).data_ptr()
        self._large = {
            entry.offset: index for index, entry in enumerate(entries) if entry.nbytes >= LARGE
        }
        self._checked: set[int] = set()
        self._damaged: list[int] = []

    def copy(self, targets: Sequence[torch.Tensor], contents: Sequence[torch.Tensor]) -> None:
        """Give each target its content; they are equal in shape."""
        jobs: list[_Job] = []
        others: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for target, content in zip(targets, contents, strict=True):
            index = self._whole(content) if is_plain(target) else None
            if index is not None and target.dtype == content.dtype:
                jobs.append((index, target))
            else:
                others[0].append(target)
                others[1].append(content)
        if others[0]:
            torch._foreach_copy_(*others)
        self._run(jobs)

    def problem(self) -> str:
        """Check what was not copied here; what is wrong, or an empty text."""
        missing = [index for index in self._large.values() if index not in self._checked]
        self._run([(index, None) for index in missing])
        if not self._damaged:
            return ""
        return f"The tensor {name(self._entries[min(self._damaged)].path)} in memory is damaged."

    def _whole(self, content: torch.Tensor) -> int | None:
        """The number of the large tensor that this is; None if it is none, or only a part of one."""
        index = self._large.get(content.data_ptr() - self._base)
        if index is None or index in self._checked or not is_plain(content):
            return None
        return index if content.nbytes == self._entries[index].nbytes else None

    def _run(self, jobs: list[_Job]) -> None:
        self._checked.update(index for index, _ in jobs)
        with ThreadPoolExecutor(self._threads) as pool:
            for index, digest in pool.map(self._hash, jobs):
                if digest != self._sums[index]:
                    self._damaged.append(index)

    def _hash(self, job: _Job) -> tuple[int, int]:
        index, target = job
        data = self._generation.tensor_bytes(self._entries[index])
        digest = xxhash.xxh3_64()
        if target is None:
            digest.update(data)
            return index, digest.intdigest()
        source = torch.frombuffer(data, dtype=torch.uint8)
        flat = target.detach().view(-1).view(torch.uint8)
        with torch.no_grad():
            for start in range(0, len(data), CHUNK):
                digest.update(data[start : start + CHUNK])
                flat[start : start + CHUNK].copy_(source[start : start + CHUNK])
        return index, digest.intdigest()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is the bytes that lie one behind the other in this process's memory."""
    plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and not tensor.is_conj() and not tensor.is_neg()
