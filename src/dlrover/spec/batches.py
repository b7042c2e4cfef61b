"""Which global batches a job allows, and how noisy its gradients are."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Samples = Annotated[int, Meta(ge=1, le=2**40)]
Norm = Annotated[float, Meta(ge=0, le=1e300)]


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a job's global batch: the samples of an optimizer step of all workers."""

    least: Samples
    """The program's own."""
    most: Samples
    """The same as ``least`` where the global batch stays."""
    pass_most: Samples
    """Samples that one worker computes at once, at most."""
    square: Norm = 0.0
    """Squared norm of the mean gradient; 0: not measured."""
    variance: Norm = 0.0
    """Of the gradient of one sample, summed over the parameters; 0: not measured."""
