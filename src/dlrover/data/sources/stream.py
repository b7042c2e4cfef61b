"""Streams: messages that brokers keep, by partition and offset.

The job keeps its own offsets: the master leases them, and each checkpoint holds those whose messages its
model has learned from. A broker only delivers the messages between two offsets. If the stream's address
names a group, the offsets of stored checkpoints are committed to it; they are never read back.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from dlrover import extras
from dlrover.errors import ConfigurationError
from dlrover.spec.requests.shards import Span

Sample_co = TypeVar("Sample_co", covariant=True)

TIMEOUT = 10.0
"""Seconds that a broker may take to answer."""
SHARD = 100
"""Messages in a shard, unless set."""

_BROKERS = {
    "redis": ("redis", "Redis"),
    "rediss": ("redis", "Redis"),
    "nats": ("nats", "Nats"),
    "tls": ("nats", "Nats"),
    "amqp": ("rabbitmq", "RabbitMq"),
    "amqps": ("rabbitmq", "RabbitMq"),
    "kafka": ("kafka", "Kafka"),
    "pulsar": ("pulsar", "Pulsar"),
    "pulsar+ssl": ("pulsar", "Pulsar"),
    "parquet": ("parts", "PartFolder"),
}
"""By the scheme of an address: the module below `dlrover.data.sources`, also the extra, and its class."""

FOLDERS = ("parquet",)
"""Schemes of addresses without a host."""


class Message(NamedTuple):
    """A broker's message at an offset."""

    partition: int
    offset: int
    value: Any
    """Bytes; for Redis, a dict of the entry's fields, as text, and their bytes."""
    key: bytes | None = None
    headers: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Bounds(NamedTuple):
    """Extent of a partition."""

    first: int
    """The first offset that is still kept; ``end`` if there is none."""
    end: int
    """The offset behind the last message."""


class Fetched(NamedTuple):
    """A broker's messages between two offsets."""

    messages: list[Message]
    stop: int
    """End of the range without other messages; may be behind the requested end."""
    first: int
    """If behind the requested start: messages before this offset have been removed."""


class Address:
    """Address of a stream. Show only its ``str``, which has no credentials."""

    def __init__(self, url: str) -> None:
        try:
            self._parts: SplitResult = urlsplit(url)
            self._ports = [urlsplit(f"//{server}").port for server in self.servers.split(",")]
        except ValueError:
            # The error may contain a part of the password.
            raise ConfigurationError(
                "The address of a stream has a wrong port, or a wrong host in brackets: ports are numbers up to"
                " 65535, and special characters of a password are %-escaped."
            ) from None
        self.scheme = self._parts.scheme
        self.host = self._parts.hostname or ""
        self.user = unquote(self._parts.username or "")
        self.password = unquote(self._parts.password or "")
        self.path = unquote(self._parts.path.strip("/"))
        self.options: dict[str, list[str]] = {}
        for name, value in parse_qsl(self._parts.query, keep_blank_values=True):
            self.options.setdefault(name, []).append(value)
        behind = (self._parts.path, self._parts.fragment, *self.options)
        if self._parts.netloc and any("@" in part for part in behind):
            # A / or ? in a password makes its rest a path or the name of an option, which messages show.
            raise ConfigurationError(
                "The address of a stream has an @ behind its host: special characters of a password, and an @ in a name,"
                " are %-escaped (%40)."
            )
        if not self.host and self.scheme not in FOLDERS:
            raise ConfigurationError(f"The address {self} names no host.")
        if self._parts.fragment:
            raise ConfigurationError(
                f"The address {self} has a # in it; write %23 for one that belongs to a name or a password."
            )

    def __str__(self) -> str:
        where = self._parts.netloc.rpartition("@")[2]
        return f"{self.scheme}://{where}/{self.path}"

    @property
    def port(self) -> int | None:
        """Port of the only host; None if not given."""
        if len(self._ports) > 1:
            raise ConfigurationError(
                f"The address {self} names {len(self._ports)} hosts; one is accepted."
            )
        return self._ports[0]

    @property
    def servers(self) -> str:
        """Hosts with their ports, separated by commas, as given."""
        return self._parts.netloc.rpartition("@")[2]

    def option(self, name: str, default: str = "") -> str:
        """Return the value of an option that may be given once."""
        values = self.options.get(name, [default])
        if len(values) > 1:
            raise ConfigurationError(f"The address {self} gives {name} {len(values)} times.")
        return values[0]

    def accept(self, *names: str) -> None:
        """Refuse options that are not among ``names``."""
        for name in self.options.keys() - set(names):
            known = ", ".join(names) or "none"
            raise ConfigurationError(f"The address {self} has an option {name}; accepted: {known}.")

    @property
    def group(self) -> str:
        """Consumer group that follows the job's progress; empty if not given."""
        group = self.option("group")
        if "group" in self.options and not group:
            raise ConfigurationError(f"The address {self} has an empty group.")
        return group

    def names(self, what: str) -> list[str]:
        """Return the streams that the path names, separated by commas; a comma of a name is %-escaped."""
        found = [unquote(name) for name in self._parts.path.strip("/").split(",") if name]
        if not found or len(set(found)) < len(found):
            raise ConfigurationError(f"The address {self} must name {what}, each of them once.")
        return found

    def scrubbed(self, error: BaseException) -> str:
        """Return an error's text without the password, or the token in its place."""
        text = f"{type(error).__name__}: {error}" if str(error) else repr(error)
        secret = self.password or self.user
        return text.replace(secret, "***") if secret else text


class Broker(ABC):
    """One stream of a broker, read by one thread. It connects on first use.

    Methods raise the client's own errors; those in ``transient`` may pass.
    """

    transient: tuple[type[BaseException], ...] = (OSError, TimeoutError)
    hopeless: tuple[type[BaseException], ...] = ()
    """Those of ``transient`` that do not pass."""
    group = ""
    """Group that follows stored checkpoints; empty: none."""
    sparse = False
    """True if most offsets have no message."""
    ended = False
    """True once `bounds` has returned ends that are final."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.source_ids: dict[str, str] = {}
        """By name, what tells the topics or streams of the last `bounds` from ones that are created later."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Name that tells this stream apart in a checkpoint; without the host, which may change."""

    @abstractmethod
    def bounds(self) -> list[Bounds]:
        """Return the bounds of each partition."""

    @abstractmethod
    def fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        """Return messages from offset ``start`` up to ``stop``, in order, about ``most`` of them."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; the next call opens another."""

    def shard(self, bounds: list[Bounds]) -> int:
        """Return the number of offsets in a shard."""
        return SHARD

    def is_empty(self, span: Span) -> bool:
        """Return whether a range in front of known messages has none; only sparse offsets are looked at."""
        return self.sparse and not self.fetch(span.partition, span.start, span.stop, 1).messages

    def beginning(self, bounds: Bounds) -> int:
        """Return the offset at which a job begins that reads all of a partition."""
        return bounds.first

    def is_another(self, before: str, now: str) -> bool:
        """Return whether two of `source_ids` are of different topics or streams."""
        return before != now

    def offsets_at(self, when: datetime, bounds: list[Bounds]) -> list[int]:
        """Return the first offset of each partition from a time on; its end if there is nothing.

        Raises:
            ConfigurationError: the broker does not keep times.
        """
        raise ConfigurationError(
            f"{self.address} keeps no times; start is 'earliest' or 'latest' there, and until 'now'."
        )

    def commit(self, offsets: list[int]) -> None:
        """Commit to the group the offset of each partition up to which a stored checkpoint has everything.

        Raises:
            ConfigurationError: the broker has no groups.
        """
        raise ConfigurationError(f"{self.address} has no consumer groups.")


class Stream(Generic[Sample_co]):
    """A stream as the source of ``ElasticDataset``; its address alone suffices as well.

    Args:
        url: address, for example ``redis://host:6379/0?stream=clicks``.
        decode: makes a sample of a `Message`; by default the message's ``value``.
        start: the first message for a job without a checkpoint: ``earliest`` that is kept; ``latest``, the
            first one after the start of the first worker; or a time, from which on messages are read.
        until: ``now``: end with the last message that existed when the first worker started; or a past time:
            end before the first message from then on.
        max_samples: messages that all workers of the job together learn from; then the stream ends.
        idle: seconds without a new message after which a worker stops reading.
        lost: response to messages that the broker removed before they were read, and at a start to a stream that was
            recreated: ``fail``, or ``skip``, which is logged.
        ahead: seconds of messages that a worker leases at a time. Workers may be this far apart in the
            stream, and need no master for this long.

    Raises:
        ConfigurationError: an argument is wrong, or the package of the broker's client is not installed.
    """

    def __init__(  # noqa: PLR0913 - options, by name
        self,
        url: str,
        *,
        decode: Callable[[Message], Sample_co] | None = None,
        start: str | datetime = "earliest",
        until: str | datetime | None = None,
        max_samples: int | None = None,
        idle: float | None = None,
        lost: str = "fail",
        ahead: float = 1.0,
    ) -> None:
        self.start = _moment("start", start, "earliest", "latest")
        self.until = None if until is None else _moment("until", until, "now")
        start, until = self.start, self.until
        if isinstance(start, datetime) and isinstance(until, datetime) and until <= start:
            raise ConfigurationError(f"until is {until}, which is not after start ({start}).")
        if lost not in ("fail", "skip"):
            raise ConfigurationError(f"lost is {lost!r}; accepted: 'fail' or 'skip'.")
        if idle is not None and idle <= 0:
            raise ConfigurationError(f"idle is {idle} s; it must be more than 0.")
        if ahead <= 0:
            raise ConfigurationError(f"ahead is {ahead} s; it must be more than 0.")
        if max_samples is not None and max_samples < 1:
            raise ConfigurationError(f"max_samples is {max_samples}; it must be 1 or more.")
        self._url = url
        self._decode = decode or _value
        self.skips = lost == "skip"
        self.max_samples, self.idle, self.ahead = max_samples, idle, ahead

    def __getitem__(self, message: Message) -> Sample_co:
        """Return the sample in a message."""
        return self._decode(message)

    def broker(self) -> Broker:
        """Return a broker of this stream, not yet connected."""
        address = Address(self._url)
        if address.scheme not in _BROKERS:
            known = ", ".join(f"{name}://" for name in _BROKERS)
            raise ConfigurationError(
                f"No broker has addresses such as {address}; these are read: {known}."
            )
        module, name = _BROKERS[address.scheme]
        kind: type[Broker] = getattr(import_module(f"dlrover.data.sources.{module}"), name)
        with extras.needed(f"{address.scheme}://", module):
            return kind(address)


def _value(message: Message) -> Any:
    return message.value


def _moment(name: str, value: str | datetime, *words: str) -> str | datetime:
    """Return one of ``words``, or a time."""
    if value in words:
        return value
    known = ", ".join(map(repr, words))
    try:
        when = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError):
        when = None
    if when is None or when.tzinfo is None:
        raise ConfigurationError(
            f"{name} is {value!r}; accepted: {known}, or a time with its zone such as"
            " '2026-11-21T18:00:00+00:00'."
        )
    if when.timestamp() > time.time():
        raise ConfigurationError(
            f"{name} is {when.isoformat()}, which is still to come; a time that has passed is accepted."
        )
    return when
