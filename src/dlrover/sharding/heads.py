"""A thread that asks a broker how far a stream has grown, while nothing of it is left to take."""

from __future__ import annotations

import threading

from dlrover.errors import DLRoverError
from dlrover.sharding.client import CLOSE_WAIT, ShardClient
from dlrover.sharding.feed import Feed
from dlrover.sharding.sources.stream import Stream

INTERVAL = 0.3
"""Seconds between two questions."""


class Heads:
    """Tells a client where the partitions end, until that is closed; ``ends``: where they ended when it was opened."""

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
