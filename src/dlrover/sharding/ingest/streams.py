"""The streams of an endpoint: each a number of partitions, in a directory."""

from __future__ import annotations

import fcntl
import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlrover.errors import ConfigurationError
from dlrover.sharding.ingest.log import Appended, PartitionLog, Refused

MAX_PARTITIONS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Streams:
    """What producers push and trainings read.

    Args:
        directory: where the records are kept; one process at a time may have it.
        partitions: how many each stream has; a number that was used before cannot become another.
        most: bytes on the disk from which on nothing more is taken.
        keep: seconds that records are kept; None: until a reader drops them.

    Raises:
        ConfigurationError: a name or a number is not accepted.
        InfrastructureError: files are damaged.
    """

    def __init__(
        self, directory: Path, partitions: Mapping[str, int], most: int, keep: float | None = None
    ) -> None:
        self._most, self._keep = most, keep
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = (directory / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigurationError(f"Another process has the streams in {directory}.") from None
        try:
            self._logs = {
                name: _opened(directory, name, count) for name, count in partitions.items()
            }
        except BaseException:
            self._lock.close()
            raise
        self._counted = threading.Lock()
        self._size = self._measured()

    def close(self) -> None:
        """Let another process have the directory."""
        self._lock.close()

    def logs(self, name: str) -> Sequence[PartitionLog] | None:
        """The partitions of a stream; None: there is no such stream."""
        return self._logs.get(name)

    def append(
        self,
        name: str,
        partition: int | None,
        producer: str,
        sequence: int,
        records: Sequence[bytes],
    ) -> tuple[int, Appended | Refused]:
        """Keep a batch; the partition that it went to, and where it stands.

        Without a partition, a producer's batches all go to the same one.
        """
        logs = self._logs[name]
        if partition is None:
            partition = zlib.crc32(producer.encode()) % len(logs)
        size = sum(map(len, records))
        with self._counted:
            if self._size + size > self._most:
                reason = f"{self._size} bytes are kept, and {self._most} are the most"
                return partition, Refused(429, reason)
            self._size += size
        found = logs[partition].append(producer, sequence, records)
        if isinstance(found, Refused) or found.repeated:
            with self._counted:
                self._size -= size
        return partition, found

    def drop(self, name: str, partition: int, before: int) -> None:
        """Readers need nothing before an offset any more."""
        self._logs[name][partition].drop(before)
        self.tidy()

    def tidy(self) -> None:
        """Remove what is too old, and see how much there is."""
        for logs in self._logs.values():
            for log in logs:
                if self._keep is not None:
                    log.drop(0, self._keep)
        size = self._measured()
        with self._counted:
            self._size = size

    def _measured(self) -> int:
        return sum(log.size for logs in self._logs.values() for log in logs)


def _opened(directory: Path, name: str, count: int) -> list[PartitionLog]:
    """The partitions of a stream."""
    if not _NAME.fullmatch(name) or not 1 <= count <= MAX_PARTITIONS:
        raise ConfigurationError(
            f"--stream {name}:{count}: a name has letters, digits and ._-, and there are 1 to"
            f" {MAX_PARTITIONS} partitions."
        )
    folder = directory / "streams" / name
    there = len(list(folder.glob("[0-9]*")))
    if there not in (0, count):
        raise ConfigurationError(
            f"--stream {name}:{count}: it has {there} partitions in {directory} already."
        )
    return [PartitionLog(folder / str(number)) for number in range(count)]
