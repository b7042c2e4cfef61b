"""``python -m dlrover.embedding``: an embedding server of a job; ``dlrover-run --embedding-servers`` starts it."""

from __future__ import annotations

import logging
import signal
import threading

from dlrover import config, launched
from dlrover.checkpoint.storage.stores import open_store
from dlrover.embedding.remote import stored
from dlrover.embedding.remote.directory import JobDirectory
from dlrover.embedding.remote.holding import HeldSlots, Slots
from dlrover.embedding.remote.server import EmbeddingServer
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.spec.node import SERVER
from dlrover.spec.requests.placement import PlacementReply

logger = logging.getLogger("dlrover.embedding")

LEAVE_TIMEOUT = 3.0
"""Seconds that a server which is to end waits for a master that is away."""


def main() -> int:
    """Serve until the job ends or this server has given its slots to others."""
    env = config.environ()
    if not launched.given.relay or env.get("ROLE_NAME") != SERVER:
        raise ConfigurationError(
            "python -m dlrover.embedding runs as a server of a job only; start the job with dlrover-run"
            " --embedding-servers N."
        )
    index, servers = int(env["ROLE_RANK"]), int(env["ROLE_WORLD_SIZE"])
    directory = JobDirectory(launched.given.relay)
    holding = HeldSlots()

    def recover(placement: PlacementReply, slots: Slots) -> int | None:
        last = placement.stored
        if last is None:
            logger.warning(
                "The rows of %d slots are lost: there is no checkpoint of them", len(slots)
            )
            return None
        step = stored.restore(
            open_store(last.place),
            last.id,
            lambda found, parts: holding.replay(found, parts, slots),
        )
        logger.info("The rows of %d slots are those of step %d", len(slots), step)
        return step

    server = EmbeddingServer(
        index, launched.given.round, servers, directory, holding, recover, env["MASTER_ADDR"]
    )
    ending = threading.Event()

    def leave() -> None:
        ending.wait()
        try:
            server.leave(JobDirectory(launched.given.relay, LEAVE_TIMEOUT))
        except InfrastructureError as error:
            logger.info("No master takes this server's slots: %s", error)
            directory.close()

    threading.Thread(target=leave, name="leave", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    logger.info("Embedding server %d of %d listens on port %d", index, servers, server.port)
    launched.imported()  # the next start is a fork that has the modules
    try:
        server.run()
    except InfrastructureError:
        if not ending.is_set():
            raise
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
