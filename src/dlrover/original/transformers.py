"""The original's ``Trainer``, on `dlrover.integrations.transformers`."""

from __future__ import annotations

import os
from typing import Any

from transformers import Trainer

from dlrover.integrations.transformers import FlashCallback

FOLDER = "flash"
"""The checkpoint directory, in the Trainer's ``output_dir``."""


class FlashCkptTrainer(Trainer):
    """A Trainer that saves to memory after each step, and to storage, in the background, when it would write a folder.

    It writes no folders of its own, unless ``load_best_model_at_end`` needs them; ``save_total_limit`` is the number of
    stored steps that are kept.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._flash = FlashCallback(
            os.path.join(self.args.output_dir, FOLDER), keep=self.args.save_total_limit or 3
        )
        self.add_callback(self._flash)

    def get_last_checkpoint(self) -> str | bool:
        """Return the argument of ``train(resume_from_checkpoint=...)``; False if nothing was ever saved. Collective."""
        return self._flash.resume() or False

    def wait_latest_checkpoint(self, timeout: float = 1800) -> None:
        """Return at once: the end of ``train`` has waited."""

    def _save_checkpoint(self, model: Any, trial: Any, *more: Any) -> None:
        if self.args.load_best_model_at_end:
            super()._save_checkpoint(model, trial, *more)
