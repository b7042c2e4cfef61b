"""Flash Checkpoint for Hugging Face Accelerate: ``save_state`` and ``load_state`` through memory."""
# ruff: noqa: SLF001  # what is prepared is known to the Accelerator alone

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, Literal

from accelerate.data_loader import SeedableRandomSampler, get_sampler
from accelerate.utils import DistributedType
from torch.utils.data import RandomSampler

from dlrover.checkpoint.engine.checkpointer import Checkpointer, LoadRecord
from dlrover.errors import ConfigurationError
from dlrover.integrations import objects, randomness
from dlrover.integrations.objects import Portable

__all__ = ["FlashAccelerator"]

logger = logging.getLogger(__name__)


class FlashAccelerator:
    """Checkpoints of everything that is prepared by or registered with an ``Accelerator``.

    These are models, optimizers, schedulers, sampler seeds and epochs, random number states, the gradient
    scaler, and objects given to ``register_for_checkpointing``. Create one in every rank, after
    ``accelerator.prepare``; that is collective.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        path: the checkpoint directory; all ranks must see the same one.
        keep: the number of newest stored steps to keep.

    Raises:
        ConfigurationError: an argument is wrong, or the kind of training is not supported.
        InfrastructureError: the saver cannot be started, or another job uses the directory.
    """

    def __init__(self, accelerator: Any, path: str | os.PathLike[str], keep: int = 3) -> None:
        kind = accelerator.distributed_type
        fsdp1 = kind == DistributedType.FSDP and accelerator.state.fsdp_plugin.fsdp_version == 1
        if fsdp1 or kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ConfigurationError(f"FlashAccelerator does not work with {kind.value}.")
        if any(_cannot_repeat(loader) for loader in accelerator._dataloaders):
            logger.warning(
                "The order of shuffled data cannot be restored within an epoch; use"
                " Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))"
            )
        if accelerator._save_model_state_pre_hook:
            logger.warning(
                "The functions of register_save_state_pre_hook are not called; what they save, such as averaged"
                " weights, is not in the checkpoints unless it is passed to register_for_checkpointing"
            )
        self._accelerator = accelerator
        self._due = False
        """True if the next save goes to storage, whatever it is for."""
        self._random_states: dict[str, Any] | None = None
        self._continued: tuple[Any, Any] | None = None
        """A prepared loader and the one that yields the rest of its epoch."""
        self._checkpointer = Checkpointer(path, keep=keep, local=("rng",))

    def save_state(self, step: int, to: Literal["memory", "storage"] = "memory") -> None:
        """Copy everything to memory; with ``to="storage"`` also store it, in the background.

        Within an accumulation of gradients, which a checkpoint does not hold, this saves nothing; the next
        save then goes to storage, if this one was for storage.

        Raises:
            ConfigurationError: something cannot be kept.
            InfrastructureError: the saver failed, or lacks memory after a restart.
        """
        self._due |= to == "storage"
        if self._accelerator.sync_gradients:
            self._checkpointer.save(step, self._state(), to="storage" if self._due else "memory")
            self._due = False

    def load_state(self) -> LoadRecord | None:
        """Restore the newest step that all ranks can load; None if nothing was ever saved. Collective.

        Use `skip_first_batches` to continue within an epoch.

        Raises:
            ConfigurationError: the saved state has other keys, types or shapes.
            InfrastructureError: checkpoints existed, and none can be loaded.
        """
        state = {**self._state(), "rng": None, "loaders": None}
        record = self._checkpointer.load(state)
        if record is None:
            return None
        self._accelerator.step = state["step"]
        for loader, saved in zip(self._accelerator._dataloaders, state["loaders"], strict=True):
            _restore_loader(loader, objects.decode(saved, trusted=True))
        if state["rng"] is not None:  # as many ranks as saved it
            self._random_states = objects.decode(state["rng"], trusted=True)
            randomness.restore(self._random_states)
        return record

    def skip_first_batches(self, loader: Any, batches: int) -> Iterator[Any]:
        """Yield the rest of an epoch, which may be none; restore the loaded random number states before its first batch.

        Starting to iterate the data uses random numbers, which the original training did long before.
        """
        saved, self._random_states = self._random_states, None
        if not batches:
            yield from loader
            return
        rest = self._accelerator.skip_first_batches(loader, batches)
        self._continued = loader, rest
        left = False
        for batch in rest:
            if saved is not None:
                randomness.restore(saved)
                saved = None
            left = True
            yield batch
        if saved is not None:  # of the end of an epoch
            randomness.restore(saved)
        if left and hasattr(loader, "iteration"):  # else the save has counted the epoch
            loader.iteration += 1  # as the loader itself does at the end of an epoch

    def close(self) -> None:
        """Wait until all steps for storage are durable, and disconnect.

        Raises:
            InfrastructureError: a step was not stored; the message says which.
        """
        with contextlib.closing(self._checkpointer):
            self._checkpointer.wait()

    def _state(self) -> dict[str, Any]:
        of = self._accelerator
        return {
            "models": [of.unwrap_model(model) for model in of._models],
            "optimizers": list(of._optimizers),
            "schedulers": [Portable(scheduler) for scheduler in of._schedulers],
            "scaler": None if of.scaler is None else Portable(of.scaler),
            "objects": [Portable(item) for item in of._custom_objects],
            "loaders": [objects.encode(self._loader_state(loader)) for loader in of._dataloaders],
            "step": of.step,
            "rng": objects.encode(randomness.states(every_device=True)),
        }

    def _loader_state(self, loader: Any) -> dict[str, Any]:
        sampler = get_sampler(loader)
        stateful = getattr(loader, "use_stateful_dataloader", False)
        return {
            "iteration": getattr(loader, "iteration", 0) + self._has_yielded_all(loader),
            "seed": sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
            "state": loader.state_dict() if stateful else None,
        }

    def _has_yielded_all(self, loader: Any) -> bool:
        """Return whether the program is at the last batch of the loader's epoch, which it has not counted yet."""
        of, iterated = self._accelerator.gradient_state, [loader]
        if self._continued is not None and self._continued[0] is loader:
            iterated.append(self._continued[1])
        return any(one in of.dataloader_references and one.end_of_dataloader for one in iterated)


def _cannot_repeat(loader: Any) -> bool:
    sampler = get_sampler(loader)
    return isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler)


def _restore_loader(loader: Any, saved: dict[str, Any]) -> None:
    sampler = get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler) and saved["seed"] is not None:
        sampler.initial_seed, sampler.generator = saved["seed"], None
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(saved["iteration"])
    if saved["state"] is not None:
        loader.load_state_dict(saved["state"])
