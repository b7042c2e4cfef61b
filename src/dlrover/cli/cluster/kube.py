"""Options and helpers that the commands for Kubernetes share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from dlrover import __version__
from dlrover.errors import ConfigurationError

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


@contextlib.contextmanager
def extra() -> Iterator[None]:
    """Wrap imports that need the extra ``kubernetes``.

    Raises:
        ConfigurationError: the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"The module {error.name} is missing: Kubernetes needs pip install 'dlrover[kubernetes]'."
        ) from error
