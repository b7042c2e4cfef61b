"""NATS JetStream: each stream is a partition, and the offset of a message is its sequence number."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Coroutine
from concurrent import futures
from datetime import datetime, timezone
from typing import Any, TypeVar

from dlrover._util import tasks
from dlrover.data.sources.stream import TIMEOUT, Address, Bounds, Broker, Fetched, Message
from dlrover.errors import ConfigurationError

_WAIT = TIMEOUT
"""Seconds that messages may take which the server reports as available."""
_INACTIVE = 300.0
"""Seconds after which the server forgets a reader that died, or asked for nothing."""
_CLOSE = 1.0
"""Seconds that closing a connection may take."""
_NOWHERE = -1
"""Place of a reader that cannot go on."""
_OURS = "DLRover: where the last stored checkpoint ends"
"""Description of the consumers that show a job's progress."""
_BEHIND = "the server that reads the stream does not have all of its messages yet"
Result = TypeVar("Result")


class Nats(Broker):
    """``nats://user:password@host:4222/STREAM?subject=a.*``; ``tls`` with TLS, a token as the user.

    With ``group=NAME``, a durable consumer of this name shows the job's progress.
    """

    def __init__(self, address: Address) -> None:
        import nats  # noqa: PLC0415 - only if there is such a source
        from nats.js import errors  # noqa: PLC0415

        super().__init__(address)
        address.accept("subject", "group")
        self.group = address.group
        if not re.fullmatch(r"[\w-]*", self.group, re.ASCII):
            raise ConfigurationError(
                f"The address {address} has the group {self.group!r}; letters, digits, _ and - are accepted."
            )
        self._streams = address.names("a stream as its path")
        for name in self._streams:
            if not re.fullmatch(r"[^\s.*>/\\]+", name):
                raise ConfigurationError(
                    f"The address {address} has the stream {name!r}; names have no blanks, '.', '*', '>', '/' and '\\'."
                )
        self._subject = address.option("subject")
        self.transient = (
            OSError,
            asyncio.TimeoutError,  # another class than the next one before Python 3.11
            futures.TimeoutError,
            nats.errors.Error,
            errors.ServiceUnavailableError,
        )
        self.hopeless = (
            nats.errors.AuthorizationError,
            errors.NotFoundError,
            errors.BadRequestError,
            PermissionError,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Any = None
        self._readers: dict[int, _Consumer] = {}
        self._refusal = self._cause = ""
        """What the client meets during a call that is not answered: a permission that it lacks; and anything else."""

    @property
    def identity(self) -> str:
        """The streams, and the subject read from them."""
        return f"nats {' '.join(self._streams)} {self._subject}".strip()

    def bounds(self) -> list[Bounds]:
        """Return the bounds of each stream."""
        return self._run(self._bounds())

    def fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        """Fetch messages with a consumer on the server that lasts while reading continues where it was."""
        return self._run(self._fetch(partition, start, stop, most))

    async def _bounds(self) -> list[Bounds]:
        from nats.js import api  # noqa: PLC0415 - only if there is such a source

        found = []
        for stream in self._streams:
            info = await (await self._jetstream()).stream_info(stream)
            if info.config.retention == api.RetentionPolicy.WORK_QUEUE:
                raise ConfigurationError(
                    f"The stream {stream} of {self.address} keeps each message until a consumer acknowledges it"
                    " (workqueue); streams that keep messages by limits are read."
                )
            self.source_ids[stream] = info.created.isoformat()
            found.append(Bounds(max(1, info.state.first_seq), info.state.last_seq + 1))
        return found

    async def _fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        from nats.js import errors  # noqa: PLC0415 - only if there is such a source

        reader = await self._reader(partition, start)
        try:
            got, reached = await reader.read(stop, most)
        except errors.NotFoundError:
            # The server has forgotten it after a pause. If the stream is gone, the next one is refused.
            reader.at = _NOWHERE
            reader = await self._reader(partition, start)
            got, reached = await reader.read(stop, most)
        messages = [
            Message(
                partition,
                m.metadata.sequence.stream,
                m.data,
                m.subject.encode(),
                dict(m.headers or {}),
            )
            for m in got
        ]
        info = await (await self._jetstream()).stream_info(self._streams[partition])
        if info.state.last_seq + 1 < stop:
            raise TimeoutError(_BEHIND)
        return Fetched(messages, reached, max(start, info.state.first_seq))

    async def _reader(self, partition: int, start: int) -> _Consumer:
        """Return the reader that goes on at an offset, or a new one from there on."""
        reader = self._readers.get(partition)
        if reader is None or reader.at != start:
            if reader is not None:
                await reader.end()
            jetstream, stream = await self._jetstream(), self._streams[partition]
            reader = await _Consumer.begin(jetstream, stream, self._subject, start)
            self._readers[partition] = reader
        return reader

    def offsets_at(self, when: datetime, bounds: list[Bounds]) -> list[int]:
        """Return the offsets by the time at which the server received the messages."""
        return self._run(self._offsets_at(when, bounds))

    async def _offsets_at(self, when: datetime, bounds: list[Bounds]) -> list[int]:
        from nats.js import api  # noqa: PLC0415 - only if there is such a source

        at = when.astimezone(timezone.utc).isoformat()
        begin = {"deliver_policy": api.DeliverPolicy.BY_START_TIME, "opt_start_time": at}
        found = []
        for stream, (_, end) in zip(self._streams, bounds, strict=True):
            reader = await _Consumer.begin(
                await self._jetstream(), stream, self._subject, end, **begin
            )
            found.append(await reader.first(when, end))
            await reader.end()
        return found

    def commit(self, offsets: list[int]) -> None:
        """Recreate the durable consumer, whose position cannot be changed. Its pending messages are the lag.

        Raises:
            ConfigurationError: a foreign consumer has this name, or the stream keeps messages for consumers.
        """
        self._run(self._commit(offsets))

    async def _commit(self, offsets: list[int]) -> None:
        from nats.js import api, errors  # noqa: PLC0415 - only if there is such a source

        jetstream = await self._jetstream()
        for stream, offset in zip(self._streams, offsets, strict=True):
            kept = (await jetstream.stream_info(stream)).config.retention
            if kept != api.RetentionPolicy.LIMITS:
                raise ConfigurationError(
                    f"The stream {stream} of {self.address} keeps messages by its consumers ({kept}); a group is"
                    " for streams that keep them by limits."
                )
            try:
                known = await jetstream.consumer_info(stream, self.group)
            except errors.NotFoundError:
                known = None
            if known is not None and known.config.description != _OURS:
                raise ConfigurationError(
                    f"The consumer {self.group} of the stream {stream} of {self.address} belongs to another program."
                )
            if known is not None:
                await jetstream.delete_consumer(stream, self.group)
            await jetstream.add_consumer(
                stream,
                durable_name=self.group,
                description=_OURS,
                deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=max(1, offset),
                ack_policy=api.AckPolicy.EXPLICIT,
                filter_subject=self._subject or None,
            )

    async def _jetstream(self) -> Any:
        import nats  # noqa: PLC0415 - only if there is such a source

        if self._connection is None:
            credentials: dict[str, Any] = {}
            if self.address.password:
                credentials = {"user": self.address.user, "password": self.address.password}
            elif self.address.user:
                credentials = {"token": self.address.user}
            scheme = self.address.scheme
            client = _client(self.address)
            try:
                await client.connect(
                    [f"{scheme}://{server}" for server in self.address.servers.split(",")],
                    connect_timeout=int(TIMEOUT),
                    allow_reconnect=False,
                    error_cb=self._note,
                    **credentials,
                )
            except BaseException as error:
                # The client leaves a connection open that was not answered, and waits for ever for one without TLS.
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(client.close(), _CLOSE)
                if "authorization violation" in str(error).lower():  # of no class of its own
                    raise nats.errors.AuthorizationError from None
                raise
            self._connection = client
        return self._connection.jetstream(timeout=TIMEOUT)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine of the client, which lives in an event loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_turn, args=(self._loop,), name="dlrover-nats", daemon=True
            )
            self._thread.start()
        self._refusal = self._cause = ""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(3 * TIMEOUT)
        except BaseException as error:
            future.cancel()
            if isinstance(error, self.transient):  # not Ctrl-C
                if self._refusal:
                    raise PermissionError(self._refusal) from error
                if self._cause and not str(error):
                    raise ConnectionError(self._cause) from error
            raise

    async def _note(self, error: Exception) -> None:
        """Keep what the client does not raise: refused permissions, and why it connects again and again."""
        if "permissions violation" in str(error).lower():
            self._refusal = str(error)
        self._cause = str(error)

    def close(self) -> None:
        """Close the connection, and end the event loop."""
        if self._loop is None:
            return
        if self._connection is not None:
            # The broker may be away; it forgets idle readers by itself.
            with contextlib.suppress(Exception):
                self._run(asyncio.wait_for(self._end(), _CLOSE))
        self._connection, self._readers = None, {}
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT)
        self._loop = None

    async def _end(self) -> None:
        for reader in self._readers.values():
            await reader.end()
        await self._connection.close()


class _Consumer:
    """A consumer on the server: messages from ``at`` on, in order."""

    def __init__(
        self, jetstream: Any, consumer: tuple[str, str], subject: str, subscription: Any, at: int
    ) -> None:
        self._jetstream, self._consumer, self._subject = jetstream, consumer, subject
        self._subscription, self.at = subscription, at

    @classmethod
    async def begin(
        cls, jetstream: Any, stream: str, subject: str, start: int, **where: Any
    ) -> _Consumer:
        """Begin at an offset, or with ``where`` at a place in the server's own terms."""
        from nats.js import api  # noqa: PLC0415 - only if there is such a source

        at_offset = {
            "deliver_policy": api.DeliverPolicy.BY_START_SEQUENCE,
            "opt_start_seq": max(1, start),
        }
        config = api.ConsumerConfig(
            **(where or at_offset),
            ack_policy=api.AckPolicy.NONE,
            inactive_threshold=_INACTIVE,
            filter_subject=subject or None,
        )
        info = await jetstream.add_consumer(stream, config=config)
        subscription = await jetstream.pull_subscribe_bind(info.name, stream)
        return cls(jetstream, (stream, info.name), subject, subscription, start)

    async def read(self, stop: int, most: int) -> tuple[list[Any], int]:
        """Return messages up to offset ``stop``, and the offset up to which there are no others."""
        import nats  # noqa: PLC0415 - only if there is such a source

        got: list[Any] = []
        asked = min(most, stop - self.at, (await self._subscription.consumer_info()).num_pending)
        if asked:
            try:
                got = await self._subscription.fetch(asked, _WAIT)
            except nats.errors.TimeoutError:
                raise TimeoutError("the messages that it has do not come") from None
        last = got[-1].metadata if got else None
        at = last.sequence.stream + 1 if last is not None else self.at
        if at < stop and (last is None or last.num_pending == 0):
            following = await self._of_leader(seq=at, subject=self._subject or ">", next=True)
            if following is not None and following.seq < stop:
                raise TimeoutError(_BEHIND)
            at = stop
        # The rest may be on its way: it would come here later, and the server counts it as read.
        self.at = at if len(got) >= asked else _NOWHERE
        return [m for m in got if m.metadata.sequence.stream < stop], min(at, stop)

    async def first(self, since: datetime, default: int) -> int:
        """Return the offset of the first message, which is not older than ``since``."""
        if not (await self._subscription.consumer_info()).num_pending:
            last = await self._of_leader(subject=self._subject or ">")
            if last is not None and last.time >= since:
                raise TimeoutError(_BEHIND)
            return default
        (message,) = await self._subscription.fetch(1, _WAIT)
        return int(message.metadata.sequence.stream)

    async def _of_leader(self, **which: Any) -> Any:
        """Return a message of the stream's leader, or None; the server of the consumer may not have all of them yet."""
        from nats.js import errors  # noqa: PLC0415 - only if there is such a source

        try:
            return await self._jetstream.get_msg(self._consumer[0], **which)
        except errors.NotFoundError:
            return None

    async def end(self) -> None:
        """Remove the consumer from the server."""
        with contextlib.suppress(Exception):
            await self._subscription.unsubscribe()
            await self._jetstream.delete_consumer(*self._consumer)


def _client(address: Address) -> Any:
    """Return a client that sends no credentials over a line without TLS if the address demands TLS."""
    import nats  # noqa: PLC0415 - only if there is such a source

    class Client(nats.NATS):  # type: ignore[misc]  # nats is not typed here
        def _connect_command(self) -> Any:
            if address.scheme == "tls" and not self._server_info.get("tls_required"):
                raise ConfigurationError(
                    f"The server of {address} does not use TLS; write nats:// if it need not."
                )
            return super()._connect_command()

    return Client()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    # Those of connections that did not close in time.
    loop.run_until_complete(tasks.stop(asyncio.all_tasks(loop)))
    loop.close()
