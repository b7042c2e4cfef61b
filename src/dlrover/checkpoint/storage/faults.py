"""Labelled points at which tests make a process die or an operation fail."""

from __future__ import annotations

from collections.abc import Callable

POINTS = frozenset(
    {
        "save.begun",
        "save.copied",
        "save.committed",
        "persist.begun",
        "persist.written",
        "persist.manifest",
        "persist.renamed",
        "persist.tracked",
        "prune.begun",
        "replicate.begun",
        "replicate.sent",
        "replicate.received",
        "replicate.kept",
    }
)
"""All labels, in the order in which a checkpoint passes them."""

hook: Callable[[str], None] | None = None
"""Called with the label of each point that is passed; None outside tests."""


def point(label: str) -> None:
    """Pass a labelled point."""
    assert label in POINTS
    if hook is not None:
        hook(label)
