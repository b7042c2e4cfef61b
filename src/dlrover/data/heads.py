"""Thread that asks a broker for a stream's growth while nothing of it is left to lease."""

from __future__ import annotations

import threading

from dlrover.data.client import CLOSE_WAIT, ShardClient
from dlrover.data.feed import Feed
from dlrover.data.sources.stream import Stream
from dlrover.errors import DLRoverError

INTERVAL = 0.3
"""Seconds between two questions."""


class Heads:
    """Reporter of the partitions' ends to a client until that closes; ``ends``: the ends at its opening."""

    def __init__(self, stream: Stream[object], client: ShardClient, ends: tuple[int, ...]) -> None:
        self._client = client
        self._feed = Feed(stream, client.wait_for_close, ends)
        self._begins = client.spec.begins
        self._thread = threading.Thread(target=self._run, name="dlrover-heads", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._client.wait_for_close(INTERVAL):
                if self._client.wait_for_need(INTERVAL):
                    self._client.extend(self._feed.ends(self._begins))
        except DLRoverError as error:
            self._client.break_off(error)
        finally:
            self._feed.close()

    def join(self) -> None:
        """Wait for the end of a closed client's thread."""
        self._thread.join(CLOSE_WAIT)
