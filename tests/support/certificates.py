"""A certificate for the servers of this machine."""

from __future__ import annotations

from pathlib import Path

from dlrover.kubernetes.machine import tls
from dlrover.kubernetes.operator import certificates
from dlrover.spec.jobdir import TlsFiles


def made(folder: Path, *addresses: str) -> TlsFiles:
    """The files in ``folder``, as the operator makes them for a job; the certificate names further addresses, too."""
    for name, text in certificates.make(["localhost", "127.0.0.1", *addresses]).items():
        (folder / name).write_text(text)
    files = (str(folder / name) for name in (tls.CERTIFICATE, tls.KEY, tls.AUTHORITY))
    return TlsFiles(*files)


def settings(files: TlsFiles) -> dict[str, str]:
    """The variables of a job with these files."""
    return {
        "DLROVER_TLS_CERT": files.cert,
        "DLROVER_TLS_KEY": files.key,
        "DLROVER_TLS_CA": files.ca,
    }
