"""Verified copies out of a generation: each chunk is hashed while it is in the processor's cache.

Hashing apart from the copy would read the memory a second time, and memory bandwidth limits a load.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from dlrover.checkpoint.machine.layout import TensorEntry, name
from dlrover.checkpoint.saver.memory import Generation

LARGE = 1 << 20
"""Minimum bytes of a tensor checked here; the saver checks smaller ones, so both processes have work."""
CHUNK = 4 << 20
"""Bytes hashed and copied at a time: they must fit in a cache that the cores share."""
THREADS = 4
"""Maximum number of threads; beyond it, memory bandwidth is the limit."""

_Job = tuple[int, torch.Tensor | None]
"""Number of a tensor, and its target; None if the tensor is only checked."""


class VerifiedCopy:
    """Verified copy of one generation's tensors. Call `copy` any number of times, then `problem` once.

    Args:
        generation: The generation that holds the tensors.
        entries: The descriptions of the tensors.
        sums: The checksums of the tensors.
        share: The number of processes on this machine that do the same at the same time.
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
        """Copy each content to its target; both have the same shape."""
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
        """Check the large tensors not copied by `copy`; return the first problem, or an empty text."""
        missing = [index for index in self._large.values() if index not in self._checked]
        self._run([(index, None) for index in missing])
        if not self._damaged:
            return ""
        return f"The tensor {name(self._entries[min(self._damaged)].path)} in memory is damaged."

    def _whole(self, content: torch.Tensor) -> int | None:
        """Return the number of a whole large tensor not checked yet; None for any other content."""
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
    """Return True if the tensor is exactly its contiguous bytes in this process's memory."""
    plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and not tensor.is_conj() and not tensor.is_neg()
