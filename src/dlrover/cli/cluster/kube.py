"""Options and helpers that the commands for Kubernetes share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Annotated

import typer

from dlrover import __version__, extras

IMAGE = f"dlrover:{__version__}"
"""Image of this release."""

Kubeconfig = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="Kubeconfig; default: the pod's service account, KUBECONFIG or ~/.kube/config.",
    ),
]
MasterImage = Annotated[
    str, typer.Option(help="Image of masters for jobs that name none; it must contain dlrover.")
]


def extra() -> AbstractContextManager[None]:
    """Wrap imports that need the extra ``kubernetes``; see `extras.needed`."""
    return extras.needed("Kubernetes", "kubernetes")
