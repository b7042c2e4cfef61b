"""Flash Checkpoint as the checkpoint plugin of Lightning."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from dlrover._util.files import NO_ROOM
from dlrover.checkpoint.engine.checkpointer import Checkpointer
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.integrations import objects

__all__ = ["FlashCheckpointIO", "FlashDDPStrategy"]

logger = logging.getLogger(__name__)

_MARK = "This file is in a DLRover flash checkpoint, as step "
"""Start of the files that take the place of Lightning's own."""


class FlashCheckpointIO(TorchCheckpointIO):
    """Checkpoint plugin that keeps Lightning's checkpoints in memory, and stores them in the background.

    One process needs ``Trainer(plugins=[FlashCheckpointIO("out/flash")])``; several processes also need
    ``strategy=FlashDDPStrategy()``, with which every rank saves.

    Args:
        path: the checkpoint directory; all ranks must see the same one.
        keep: the number of newest stored steps to keep.
        storage_every: one save in ``storage_every`` also goes to storage.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 3, storage_every: int = 1) -> None:
        if storage_every < 1:
            raise ConfigurationError(
                f"storage_every is {storage_every}; it must be at least 1 save."
            )
        self._path, self._keep, self._storage_every = path, keep, storage_every
        self._opened: Checkpointer | None = None
        self._saves = 0
        self._last: Any = None
        """Key that distinguishes the last save from others of its step."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save in a training of one rank; Lightning's own strategies call this in one rank only.

        Raises:
            ConfigurationError: there are several ranks.
        """
        if _ranks() > 1:
            raise ConfigurationError("With several ranks, use strategy=FlashDDPStrategy().")
        self.save_in_every_rank(checkpoint, path)

    def save_in_every_rank(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Save; all ranks must call this. A second file of the same state costs nothing.

        A checkpoint of weights only becomes a file of Lightning: no training could continue from it.
        """
        if "optimizer_states" not in checkpoint:
            if _is_first():
                super().save_checkpoint(checkpoint, path)
            return
        step = checkpoint["global_step"]
        this = step, repr(checkpoint.get("loops"))
        if this != self._last:
            self._last, self._saves = this, self._saves + 1
            to_storage = self._saves % self._storage_every == 0
            self._checkpointer().save(
                step,
                {"checkpoint": objects.encode(checkpoint)},
                to="storage" if to_storage else "memory",
            )
        if _is_first():
            _write_mark(Path(path), step)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the newest step if the file names it, or any newest step for ``last*.ckpt``. Collective.

        Lightning reads the files that it has written itself.

        Raises:
            InfrastructureError: the file's step is not the newest one that can be loaded.
        """
        with Path(path).open("rb") as file:
            begin = file.read(len(_MARK) + 20)
        if not begin.startswith(_MARK.encode()):
            return super().load_checkpoint(path, map_location, weights_only)
        wanted = int(begin[len(_MARK) :])
        found = self._checkpointer().read()
        newest = None if found is None else found[0].step
        is_last = Path(path).name.startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST)
        if found is None or (newest != wanted and not is_last):
            raise InfrastructureError(
                f"{path} is step {wanted}, which is not held any more; the newest one is {newest}."
            )
        if newest != wanted:
            logger.warning("%s is step %d; the newest one is %d", path, wanted, newest)
        return objects.decode(found[1]["checkpoint"], trusted=True)

    def teardown(self) -> None:
        """Wait until all steps for storage are durable, and disconnect.

        Raises:
            InfrastructureError: a step was not stored; the message says which.
        """
        if self._opened is not None:
            checkpointer, self._opened, self._last = self._opened, None, None
            with contextlib.closing(checkpointer):
                checkpointer.wait()

    def _checkpointer(self) -> Checkpointer:
        if self._opened is None:
            self._opened = Checkpointer(self._path, keep=self._keep)
        return self._opened


class FlashDDPStrategy(DDPStrategy):
    """DDP strategy in which every rank saves, so that it finds its state in its own node's memory."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save in every rank.

        Raises:
            ConfigurationError: the checkpoint plugin is not a `FlashCheckpointIO`.
        """
        if not isinstance(self.checkpoint_io, FlashCheckpointIO):
            raise ConfigurationError("FlashDDPStrategy needs plugins=[FlashCheckpointIO(...)].")
        self.checkpoint_io.save_in_every_rank(checkpoint, filepath)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _is_first() -> bool:
    return _ranks() == 1 or dist.get_rank() == 0


def _write_mark(path: Path, step: int) -> None:
    """Write the file that names a step; on a full disk only warn, because ``last.ckpt`` loads newer steps, too."""
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(f"{_MARK}{step}\n")
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        if error.errno not in NO_ROOM:
            raise
        logger.warning(
            "%s was not written: %s. Training goes on; step %d is saved without it",
            path, error.strerror, step,
        )  # fmt: skip
