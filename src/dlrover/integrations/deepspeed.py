"""Flash Checkpoint as the checkpoint engine of DeepSpeed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Literal

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.pipe.module import PipelineModule

from dlrover.checkpoint.engine.checkpointer import Checkpointer
from dlrover.checkpoint.machine.policies import Policy
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.integrations import objects

__all__ = ["FlashCheckpointEngine", "attach"]

_MARK = b"This file is in a DLRover flash checkpoint.\n"  # in place of DeepSpeed's own


def attach(
    engine: Any,
    path: str | os.PathLike[str],
    keep: int | Policy = 3,
    storage_every: int = 1,
    *,
    trusted: bool = False,
) -> FlashCheckpointEngine:
    """Make ``engine.save_checkpoint`` and ``load_checkpoint`` use memory first. Collective.

    Call this before ``load_checkpoint``: it points ``latest`` to the newest tag that can be loaded.

    Args:
        engine: the engine from ``deepspeed.initialize``.
        path: the checkpoint directory; all ranks must see the same one.
        keep: the number of newest stored steps to keep, or a policy of `dlrover.checkpoint`.
        storage_every: one save in ``storage_every`` also goes to storage.
        trusted: allow reading pickled objects in these checkpoints and in DeepSpeed's own files, which can
            run any code. Without it, loading such objects is an error.

    Raises:
        ConfigurationError: an argument is wrong, or the model is a pipeline.
        InfrastructureError: checkpoints existed, and none can be loaded.
    """
    if storage_every < 1:
        raise ConfigurationError(f"storage_every is {storage_every}; it must be at least 1 save.")
    if isinstance(engine.module, PipelineModule):
        raise ConfigurationError("A PipelineModule is not supported.")
    flash = FlashCheckpointEngine(engine, Checkpointer(path, keep=keep), storage_every, trusted)
    flash.point_to_newest()
    engine.checkpoint_engine = flash
    engine.save_non_zero_checkpoint = True  # each rank saves what it will load
    return flash


class FlashCheckpointEngine(CheckpointEngine):
    """DeepSpeed checkpoint engine in which the files of one tag are one step. `attach` creates it."""

    def __init__(
        self, engine: Any, checkpointer: Checkpointer, storage_every: int, trusted: bool
    ) -> None:
        super().__init__()
        self.name = "FlashCheckpointEngine"
        self._engine, self._checkpointer = engine, checkpointer
        self._storage_every, self._saves = storage_every, 0
        self._trusted = trusted
        self.to: Literal["memory", "storage"] | None = None
        """Where the saves go from now on; None: as ``storage_every`` says."""
        self._folder = Path()
        self._files: dict[str, Any] = {}
        self._marks: list[Path] = []

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin to collect the files of a tag."""
        self._folder, self._files = Path(info.save_dir, info.tag).absolute(), {}

    def save(self, state_dict: Any, path: str) -> None:
        """Add a file to the tag; write one that is none of its files, as that of ``save_16bit_model``."""
        file = Path(path).absolute()
        if file.is_relative_to(self._folder):
            self._files[str(file.relative_to(self._folder))] = objects.encode(state_dict)
        else:
            torch.save(state_dict, file)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Save the collected files."""
        if not self._files:
            return True
        self._saves += 1
        about = {
            "folder": str(self._folder),
            "names": list(self._files),
            "latest": info.save_latest,
        }
        self._checkpointer.save(
            self._engine.global_steps,
            {"about": about, **self._files},
            to=self.to or ("memory" if self._saves % self._storage_every else "storage"),
        )
        self._mark(self._folder, list(self._files))
        self._files = {}
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load one file of the newest step, or one that DeepSpeed itself has written. Collective."""
        file, name = Path(path).absolute(), Path(path).name
        if not _is_mark(file):
            return objects.load(path, path, map_location, trusted=self._trusted)
        found = objects.read(self._checkpointer, ("about", name), trusted=self._trusted)
        newest = None if found is None else found[1]["about"]["folder"]
        if found is None or newest != str(file.parent):
            raise InfrastructureError(f"{path} is not held any more; the newest tag is {newest}.")
        if name not in found[1]:
            raise ConfigurationError(f"{path} was saved by another rank, which is not supported.")
        return found[1][name]

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return True: every rank saves all that it will load."""
        return True

    def wait(self) -> None:
        """Wait until every save for storage is durable."""
        self._checkpointer.wait()

    def cleanup(self) -> None:
        """Wait until everything is durable, and disconnect. Call this at the end of the training."""
        with contextlib.closing(self._checkpointer):
            self._checkpointer.wait()

    def point_to_newest(self) -> None:
        """Write the marks of the newest step, and its tag to ``latest``."""
        found = objects.read(self._checkpointer, ("about",), trusted=self._trusted)
        if found is None:
            return
        about = found[1]["about"]
        folder = Path(about["folder"])
        self._mark(folder, about["names"])
        latest = folder.parent / "latest"
        wanted = about["latest"] or latest.exists()  # its tag has no files any more
        if torch.distributed.get_rank() == 0 and wanted and _is_ours(latest):
            latest.write_text(folder.name)
        torch.distributed.barrier()

    def _mark(self, folder: Path, names: list[str]) -> None:
        """Write marks where DeepSpeed looks for files, and remove those of the previous step."""
        folder.mkdir(parents=True, exist_ok=True)
        marks = [folder / name for name in names]
        for mark in marks:
            mark.write_bytes(_MARK)
        for old in set(self._marks) - set(marks):
            old.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                old.parent.rmdir()  # the last one of its tag
        self._marks = marks


def _is_mark(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK


def _is_ours(latest: Path) -> bool:
    """Return whether ``latest`` is missing, or its tag has no files that DeepSpeed itself has written."""
    if not latest.exists():
        return True
    return all(_is_mark(path) for path in (latest.parent / latest.read_text().strip()).glob("*.pt"))
