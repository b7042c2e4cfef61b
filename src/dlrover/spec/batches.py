"""Allowed global batches of a job, and the noise of its gradients."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Samples = Annotated[int, Meta(ge=1, le=2**40)]
Norm = Annotated[float, Meta(ge=0, le=1e300)]


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """Allowed range of a job's global batch: the samples of one optimizer step over all workers."""

    least: Samples
    """The program's own global batch."""
    most: Samples
    """Largest global batch; equals ``least`` if the global batch is fixed."""
    pass_most: Samples
    """Maximum number of samples in one pass of a worker."""
    square: Norm = 0.0
    """Squared norm of the mean gradient; 0: not measured."""
    variance: Norm = 0.0
    """Variance of a single sample's gradient, summed over the parameters; 0: not measured."""
