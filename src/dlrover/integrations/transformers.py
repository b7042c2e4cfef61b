"""Flash Checkpoint for the ``Trainer`` of Hugging Face Transformers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.training_args import ParallelMode

from dlrover.checkpoint.engine.checkpointer import Checkpointer
from dlrover.errors import ConfigurationError
from dlrover.integrations import objects, randomness
from dlrover.integrations.objects import Portable

__all__ = ["FlashCallback"]


class FlashCallback(TrainerCallback):
    """Callback that saves a ``Trainer``'s whole state to memory, and to storage when the Trainer saves.

    A callback cannot set where in the data the Trainer continues; `resume` can::

        flash = FlashCallback("out/flash")
        trainer = Trainer(..., callbacks=[flash])
        trainer.train(resume_from_checkpoint=flash.resume())

    Args:
        path: the checkpoint directory; all ranks must see the same one.
        keep: the number of newest stored steps to keep.
        memory_every: steps between two saves to memory.
        storage_every: steps between two saves to storage, in addition to the Trainer's own saves.

    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: int = 3,
        memory_every: int = 1,
        storage_every: int | None = None,
    ) -> None:
        if memory_every < 1 or (storage_every is not None and storage_every < 1):
            raise ConfigurationError("memory_every and storage_every must be at least 1 step.")
        self._path, self._keep = path, keep
        self._memory_every, self._storage_every = memory_every, storage_every
        self._opened: Checkpointer | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._saved: int | None = None
        """The newest step that this training has saved; -1 before its first, None outside of a training."""
        self._stored = -1
        self._history: list[str] = []
        """Entries of the Trainer's log as JSON, kept so that only new ones are encoded."""

    def resume(self) -> str | None:
        """Return the argument for ``train``; None if nothing was ever saved. Collective.

        It is a folder with the Trainer's own record of the newest step. Model and optimizer are restored
        when the training begins.

        Raises:
            InfrastructureError: checkpoints existed, and none can be loaded.
        """
        found = objects.read(self._checkpointer(), ("trainer", "rng", "ranks"), trusted=True)
        if found is None:
            return None
        self._folder = tempfile.TemporaryDirectory(prefix="flash-resume-")
        folder, state = Path(self._folder.name), found[1]
        (folder / "trainer_state.json").write_text(state["trainer"], encoding="utf-8")
        if state["ranks"] == _ranks():
            name = f"rng_state_{dist.get_rank()}.pth" if _ranks() > 1 else "rng_state.pth"
            _write(state["rng"], folder / name)
        _write(state["model"], folder / "pytorch_model.bin")  # zeros: the Trainer requires it
        return str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Restore the newest step."""
        kind = live["optimizer"].accelerator_state.distributed_type.value
        if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            raise ConfigurationError(f"FlashCallback does not work with {kind}.")
        self._history.clear()
        self._saved = self._stored = -1
        record = self._checkpointer().load({**self._state(args, state, live), "rng": None})
        if record is not None and record.step != state.global_step:
            raise ConfigurationError(
                f"{self._path} holds step {record.step}, but the Trainer begins at step {state.global_step};"
                " call train(resume_from_checkpoint=flash.resume()), or remove the directory."
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Save to memory or storage as the intervals say; save the last step to storage."""
        step, every = state.global_step, self._storage_every
        if control.should_training_stop or (every is not None and step % every == 0):
            self.on_save(args, state, control, **live)
        elif step % self._memory_every == 0:
            self._save("memory", args, state, live)

    def on_evaluate(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Save a saved step again: evaluating has drawn random numbers, and is not repeated."""
        if self._saved == state.global_step:
            to_storage = control.should_training_stop or self._stored == self._saved
            self._save("storage" if to_storage else "memory", args, state, live)

    def on_save(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Save to storage, unless this step was saved there already."""
        if self._stored != state.global_step:
            self._save("storage", args, state, live)

    def on_log(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Save to storage if the training is about to stop; the Trainer's last entry comes before the best model."""
        if control.should_training_stop and self._saved is not None:
            self.on_save(args, state, control, **live)

    def on_train_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Wait until all steps for storage are durable, and disconnect."""
        checkpointer, self._opened, self._saved = self._checkpointer(), None, None
        if self._folder is not None:
            self._folder.cleanup()
        with contextlib.closing(checkpointer):
            checkpointer.wait()

    def _checkpointer(self) -> Checkpointer:
        if self._opened is None:
            self._opened = Checkpointer(self._path, keep=self._keep, local=("rng",))
        return self._opened

    def _save(
        self, to: Literal["memory", "storage"], args: Any, state: Any, live: dict[str, Any]
    ) -> None:
        step = self._saved = state.global_step
        if to == "storage":
            self._stored = step
        self._checkpointer().save(step, self._state(args, state, live), to=to)

    def _state(self, args: Any, state: Any, live: dict[str, Any]) -> dict[str, Any]:
        self._history += [json.dumps(entry) for entry in state.log_history[len(self._history) :]]
        rest = json.dumps({k: v for k, v in vars(state).items() if k != "log_history"})
        scaler = live["optimizer"].scaler
        every = args.parallel_mode == ParallelMode.DISTRIBUTED  # as in the Trainer's own files
        return {
            "model": live["model"],
            "optimizer": live["optimizer"],
            "scheduler": Portable(live["lr_scheduler"]),
            "scaler": scaler and Portable(scaler),
            "trainer": f'{rest[:-1]}, "log_history": [{", ".join(self._history)}]}}',
            "rng": objects.encode(randomness.states(every_device=every)),
            "ranks": _ranks(),
        }


def _write(value: Any, path: Path) -> None:
    """Write a file, also in a rank that returns to the others of ``--survive``: there, torch writes none.

    It must not look newer to the rank than the checkpoints with which the others have begun.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.write_bytes(buffer.getvalue())
    os.utime(path, (0, 0))


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
