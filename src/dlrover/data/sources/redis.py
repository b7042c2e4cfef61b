"""Redis Streams: each key is a partition, and the offset of an entry is its id as one number."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from dlrover.data.sources.stream import (
    SHARD,
    TIMEOUT,
    Address,
    Bounds,
    Broker,
    Fetched,
    Message,
)
from dlrover.errors import ConfigurationError, InfrastructureError

_BITS = 20
"""Bits of an offset for the second part of an id; the first part, mostly milliseconds, is above."""
_MASK = (1 << _BITS) - 1
_LARGEST = (1 << 43) - 1
_CLOCK = 1 << 30
"""First parts of ids from here on count as milliseconds; lower ones as numbers chosen by the producer."""
_SHORTEST = 100
"""Minimum milliseconds in a shard: shorter ones would split a pause into many empty shards."""
_PAGE = 1000
"""Entries to count at a time."""
_PAGES = 1000
"""Maximum number of pages to count for one commit."""
_TRIES = 10
"""Times that entries are fetched again because some were removed meanwhile."""
_BEHIND = "it does not have the last changes of {} yet: a replica may be behind"
_COUNT = """
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
return {#found, #found > 0 and found[#found][1] or ''}
"""
"""Script that counts entries in the server, which has no command for that."""


class _Seen(NamedTuple):
    """What a stream had when it was looked at."""

    added: int
    """Number of entries that it ever had."""
    removed: int
    """Number of those that it has no more."""
    first: int
    """Offset of its first entry; ``end`` if it is empty."""
    end: int
    left: int
    """The offset from which on none was removed; 0 if none ever was."""

    def is_behind(self, known: _Seen) -> bool:
        """Return whether this is an earlier state of the same stream, as of a replica."""
        return self._is_less(known) and self.first <= known.first

    def continues(self, known: _Seen) -> bool:
        """Return whether this may be a later state of the same stream."""
        again = self.removed == known.removed and known.first not in (self.first, known.end)
        return not again and not self._is_less(known)

    def _is_less(self, known: _Seen) -> bool:
        return self.added < known.added or self.removed < known.removed


class Redis(Broker):
    """``redis://user:password@host:6379/0?stream=a&stream=b``; ``rediss`` with TLS."""

    sparse = True

    def __init__(self, address: Address) -> None:
        import redis  # noqa: PLC0415 - only if there is such a source
        from redis.backoff import NoBackoff  # noqa: PLC0415
        from redis.retry import Retry  # noqa: PLC0415

        super().__init__(address)
        address.accept("stream", "group")
        self.group = address.group
        self._keys = address.options.get("stream", [])
        if not all(self._keys) or not self._keys or len(set(self._keys)) < len(self._keys):
            raise ConfigurationError(f"The address {address} must name ?stream=KEY, each key once.")
        if not (address.path or "0").isdigit():
            raise ConfigurationError(f"The address {address} names no number of a data base.")
        self.transient = (
            TimeoutError,
            redis.ConnectionError,
            redis.TimeoutError,
            redis.BusyLoadingError,
            redis.exceptions.MasterDownError,
        )
        self.hopeless = (redis.AuthenticationError,)
        self._error = redis.ResponseError
        self._redis = redis.Redis(
            host=address.host,
            port=address.port or 6379,
            db=int(address.path or 0),
            username=address.user or None,
            password=address.password or None,
            ssl=address.scheme == "rediss",
            socket_timeout=TIMEOUT,
            socket_connect_timeout=TIMEOUT,
            retry=Retry(NoBackoff(), 0),  # the reader repeats what fails
        )
        self._length = 0
        self._seen: dict[str, _Seen] = {}
        """By key."""

    @property
    def identity(self) -> str:
        """The keys."""
        return f"redis {' '.join(self._keys)}"

    def bounds(self) -> list[Bounds]:
        """Return the bounds of each key; empty ones for a key that does not exist yet."""
        with self._redis.pipeline(transaction=False) as pipe:
            for key in self._keys:
                pipe.xinfo_stream(key)
            answers = pipe.execute(raise_on_error=False)
        found = []
        self._length = 0
        for answer in answers:
            if isinstance(answer, Exception):
                if "no such key" not in str(answer):
                    raise self._refusal(answer)
                found.append(Bounds(0, 0))
                continue
            key = self._keys[len(found)]
            self._left(key, answer)
            self.source_ids[key] = " ".join(map(str, self._seen[key]))
            found.append(Bounds(_first(answer), _end(answer)))
            self._length += answer["length"]
        return found

    def shard(self, bounds: list[Bounds]) -> int:
        """Return the number of offsets for about a hundred entries at average density, and at least 0.1 s."""
        reach = sum(end - first for first, end in bounds)
        average = max(1, reach * SHARD // max(1, self._length))
        return average if _are_chosen(bounds) else max(average, _SHORTEST << _BITS)

    def beginning(self, bounds: Bounds) -> int:
        """Return the first entry, or the current time if there never was one: ids are times, far from 0."""
        if bounds.end > 1:
            return bounds.first
        seconds, microseconds = self._redis.time()
        return int(seconds * 1000 + microseconds // 1000) << _BITS

    def offsets_at(self, when: datetime, bounds: list[Bounds]) -> list[int]:
        """Return the offsets by the ids, which are usually milliseconds."""
        if _are_chosen(bounds):
            raise ConfigurationError(
                f"The ids of entries of {self.address} are no times, and start and until are."
            )
        return [int(when.timestamp() * 1000) << _BITS] * len(bounds)

    def fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        """Fetch entries, and check for removed ones before them; again if some are removed meanwhile.

        This is no transaction: a server whose memory is full accepts none.
        """
        key = self._keys[partition]
        for _ in range(_TRIES):
            with self._redis.pipeline(transaction=False) as pipe:
                pipe.xinfo_stream(key)
                pipe.xrange(key, _id(start), _id(stop - 1), most)
                pipe.xinfo_stream(key)
                try:
                    before, entries, after = pipe.execute()
                except self._error as error:
                    raise self._refusal(error) from error
            self._left(key, before)
            left = self._left(key, after)
            if _removed(before) == _removed(after):
                break
        else:
            raise TimeoutError(f"entries of {key} are removed while they are read")
        if _end(before) < stop:
            raise TimeoutError(_BEHIND.format(key))
        messages = [
            Message(
                partition, _offset(entry), {_text(name): value for name, value in fields.items()}
            )
            for entry, fields in entries
        ]
        reached = stop if len(messages) < most else messages[-1].offset + 1
        return Fetched(messages, reached, max(start, left))

    def _refusal(self, error: Exception) -> Exception:
        """Return the exception for an error reply; another client's slow script passes."""
        busy = "BUSY Redis is busy" in str(error)  # of no class of its own
        return TimeoutError("it is busy running a script") if busy else error

    def _left(self, key: str, info: dict[str, Any]) -> int:
        """Return the offset from which on nothing was removed, as far as known.

        Redis reports how many entries were removed, but not which. A first entry that is not the expected one
        is no loss while that number is unchanged. An earlier number of a stream that begins where it did, or
        earlier, is of a replica that is behind; one that begins later is another stream.
        """
        if "entries-added" not in info:
            raise ConfigurationError(
                "Redis before 7.0 does not tell what was removed; it is not supported."
            )
        added, first, end = info["entries-added"], _first(info), _end(info)
        removed = _removed(info)
        seen = _Seen(added, removed, first, end, first if removed else 0)
        if key in self._seen:
            known = self._seen[key]
            if seen.is_behind(known):
                raise TimeoutError(_BEHIND.format(key))
            if not seen.continues(known):
                raise InfrastructureError(
                    f"The stream {key} of {self.address}, which had {known.added} entries so far, has {added} that do"
                    " not continue these: it was recreated or has lost messages."
                )
            if removed == known.removed:
                seen = seen._replace(left=known.left)
        self._seen[key] = seen
        return seen.left

    def is_another(self, before: str, now: str) -> bool:
        """Return whether the entries of a stream do not continue earlier ones."""
        known, seen = (_Seen(*map(int, text.split())) for text in (before, now))
        return not seen.is_behind(known) and not seen.continues(known)

    def commit(self, offsets: list[int]) -> None:
        """Set the group's last delivered id and number of read entries, from which Redis computes the lag.

        Raises:
            ConfigurationError: the group has consumers.
        """
        for key, offset in zip(self._keys, offsets, strict=True):
            if not self._redis.exists(key):
                continue  # the first entry creates the key
            info = self._redis.xinfo_stream(key)
            offset = min(offset, _end(info))  # noqa: PLW2901 - a limit may be behind the last entry
            groups = {_text(group["name"]): group for group in self._redis.xinfo_groups(key)}
            group = groups.get(self.group)
            if group is not None and group["consumers"]:
                raise ConfigurationError(
                    f"The group {self.group} of {self.address} has consumers; name a group without consumers."
                )
            read = self._read_until(key, offset, info, group)
            entry = _id(max(0, offset - 1))
            if group is None:
                self._redis.xgroup_create(key, self.group, entry, entries_read=read)
            else:
                self._redis.xgroup_setid(key, self.group, entry, entries_read=read)

    def _read_until(
        self, key: str, offset: int, info: dict[str, Any], group: dict[str, Any] | None
    ) -> int | None:
        """Return how many entries ever existed up to an offset; None if they are too many to count."""
        if offset == _end(info):
            return int(info["entries-added"])
        start, read = 0, info["entries-added"] - info["length"]
        if group is not None and group["entries-read"] is not None:
            last = _offset(group["last-delivered-id"]) + 1
            if last <= offset:
                start, read = last, group["entries-read"]
        for _ in range(_PAGES):
            if start >= offset:
                return int(read)
            count, last = self._redis.eval(_COUNT, 1, key, _id(start), _id(offset - 1), _PAGE)
            read += count
            if count < _PAGE:
                return int(read)
            start = _offset(last) + 1
        return None

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


def _text(name: bytes) -> str:
    """Return a name, in which other bytes than those of UTF-8 are surrogates, as `os.fsdecode` returns them."""
    return name.decode(errors="surrogateescape")


def _are_chosen(bounds: list[Bounds]) -> bool:
    """Return whether producers have chosen the ids; otherwise ids are times."""
    return any(0 < end >> _BITS < _CLOCK or 1 < end <= _MASK for _, end in bounds)


def _removed(info: dict[str, Any]) -> int:
    return int(info["entries-added"]) - int(info["length"])


def _first(info: dict[str, Any]) -> int:
    entry = info["first-entry"]
    return _offset(entry[0]) if entry else _end(info)


def _end(info: dict[str, Any]) -> int:
    return _offset(info["last-generated-id"]) + 1


def _offset(entry: bytes | str) -> int:
    text = entry.decode() if isinstance(entry, bytes) else entry
    major, _, minor = text.partition("-")
    if int(major) > _LARGEST or int(minor) > _MASK:
        raise ConfigurationError(
            f"The entry {text} of a Redis stream has no offset: parts of ids may be up to {_LARGEST} and {_MASK}."
        )
    return int(major) << _BITS | int(minor)


def _id(offset: int) -> str:
    return f"{offset >> _BITS}-{offset & _MASK}"
