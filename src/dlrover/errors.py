"""Exceptions of DLRover and their exit codes.

::

    DLRoverError
    ├── UserCodeError         the user's program failed            exit code 1
    │   └── RemoteError       a method of another role raised      exit code 1
    ├── ConfigurationError    a flag, file or variable is wrong    exit code 2
    │   └── FormatError       another version wrote the data       exit code 2
    ├── InfrastructureError   a machine, network or limit failed   exit code 3
    │   ├── CheckpointsLostError   none of the checkpoints can be loaded    exit code 3
    │   ├── DamagedJournalError    a journal cannot be read        exit code 3
    │   ├── FencedError       another master has taken over        exit code 3
    │   ├── MemberLostError   a member of a role died in a call    exit code 3
    │   └── NoRoomError       rows exceed an embedding's limits    exit code 3
    └── ProtocolError         a peer violated the protocol         exit code 3

Every message is one sentence that names the field, the value, and the accepted values.
"""

from __future__ import annotations

import contextlib
import enum
import errno
from collections.abc import Iterator

__all__ = [
    "CheckpointsLostError",
    "ConfigurationError",
    "DLRoverError",
    "DamagedJournalError",
    "ExitCode",
    "FencedError",
    "FormatError",
    "InfrastructureError",
    "MemberLostError",
    "NoRoomError",
    "ProtocolError",
    "RemoteError",
    "UserCodeError",
]


class ExitCode(enum.IntEnum):
    """Exit codes of ``dlrover-run`` and ``dlrover``: documented API, stable across releases."""

    SUCCESS = 0
    """The job, or the command, succeeded."""
    USER_CODE = 1
    """The training program failed: fix the program. A restart elsewhere would not help."""
    USAGE = 2
    """A flag, a file or a variable is wrong; nothing was started."""
    INFRASTRUCTURE = 3
    """A machine, the network or a limit failed, and the restart budget is used up."""
    NO_PROGRESS = 4
    """The job was stopped because its restarts no longer led to a new step."""
    STOPPED = 5
    """A user stopped the job with ``dlrover stop``."""
    NOT_MET = 6
    """The job succeeded, but an assertion of ``dlrover chaos`` does not hold."""
    INTERNAL = 70
    """The master in a pod ended before its job did, by an unexpected error; another one takes over."""
    SIGNAL_BASE = 128
    """128 + n: signal n ended ``dlrover-run``."""


class DLRoverError(Exception):
    """Base of every error that DLRover raises on purpose."""

    exit_code: ExitCode = ExitCode.INFRASTRUCTURE


class UserCodeError(DLRoverError):
    """The user's program failed."""

    exit_code = ExitCode.USER_CODE


class RemoteError(UserCodeError):
    """A method that was called in another process has raised an exception.

    Attributes:
        kind: Type of the exception.
        text: Its message.
        traceback: The remote traceback, as text.
    """

    def __init__(self, where: str, kind: str, text: str, traceback: str) -> None:
        super().__init__(f"{where} raised {kind}: {text}\n\n{traceback}".rstrip())
        self.kind, self.text, self.traceback = kind, text, traceback


class ConfigurationError(DLRoverError):
    """A flag, a configuration file or an environment variable is wrong."""

    exit_code = ExitCode.USAGE


class FormatError(ConfigurationError):
    """Another version of DLRover wrote the data in its own format; retrying cannot succeed."""


class InfrastructureError(DLRoverError):
    """A machine, the network or a limit failed."""

    exit_code = ExitCode.INFRASTRUCTURE


class CheckpointsLostError(InfrastructureError):
    """None of the existing checkpoints can be loaded; a restart would find no others."""


class DamagedJournalError(InfrastructureError):
    """A journal has a content that cannot be read; retrying cannot succeed.

    Attributes:
        path: Its file.
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class FencedError(InfrastructureError):
    """Another master has taken over the job; this one must exit and change nothing more."""


class MemberLostError(InfrastructureError):
    """A member of a role has died while it was called, or was not there in time."""


class NoRoomError(InfrastructureError):
    """Rows of an embedding table exceed its limits."""


class ProtocolError(DLRoverError):
    """A peer sent something that the protocol does not allow."""

    exit_code = ExitCode.INFRASTRUCTURE


def causes(error: BaseException | None, attribute: str = "") -> Iterator[BaseException]:
    """Yield an error and those that caused it; a library may keep the cause in an ``attribute`` of its own."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # ``raise error from error`` makes a circle
        yield error
        seen.append(error)
        error = getattr(error, attribute, None) or error.__cause__ or error.__context__


FAILURES = frozenset((
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO,
    errno.EUCLEAN, errno.EBADMSG,  # what a damaged file system answers
    errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNABORTED, errno.ECONNRESET, errno.ECONNREFUSED,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ENOMEM, errno.ENOBUFS, errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.EAGAIN,
))  # fmt: skip
"""Errors of a volume, network or limit that fails, whichever file is used."""


def kind_of(error: Exception) -> type[DLRoverError]:
    """Return the class of error for a file that cannot be used because of ``error``."""
    failed = isinstance(error, OSError) and error.errno in FAILURES
    return InfrastructureError if failed else ConfigurationError


@contextlib.contextmanager
def readable(what: str, hint: str = "") -> Iterator[None]:
    """Raise an error where the block cannot read ``what``; ``hint`` ends its sentence.

    Raises:
        ConfigurationError: it is not there, or of another kind.
        InfrastructureError: its volume fails.
    """
    try:
        yield
    except OSError as error:
        raise kind_of(error)(f"{what} cannot be read: {error.strerror}{hint}.") from error
