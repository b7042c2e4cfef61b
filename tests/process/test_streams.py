"""A job that learns from a stream while somebody sends: whoever dies, each message has its effect once."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from dlrover.spec import events
from tests.brokers import (
    TOPICS,
    Topic,
    kafka_port,
    nats_port,
    pulsar_port,
    rabbitmq_port,
    redis_port,
)

__all__ = ["kafka_port", "nats_port", "pulsar_port", "rabbitmq_port", "redis_port"]
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(120)]

MESSAGES = 600


RARE = [
    pytest.param(name, marks=pytest.mark.heavy) for name in ("nats", "rabbitmq", "kafka", "pulsar")
]


@pytest.fixture(params=["redis", *RARE])
def topic(request) -> Topic:
    return TOPICS[request.param](request.getfixturevalue(f"{request.param}_port"))


@pytest.fixture
def sending() -> Iterator[Callable]:
    """Sends numbers in the background, little by little."""
    over = threading.Event()
    senders = []

    def start(send: Callable[[Sequence[int]], None], numbers: range, every: float) -> None:
        def work() -> None:
            for first in range(numbers.start, numbers.stop, 20):
                send(range(first, min(first + 20, numbers.stop)))
                if over.wait(every):
                    return

        senders.append(threading.Thread(target=work))
        senders[-1].start()

    yield start
    over.set()
    for sender in senders:
        sender.join()


def test_every_message_counts_once_though_a_worker_and_the_master_are_killed(
    run, tmp_path, topic: Topic, sending
) -> None:
    topic.send(range(300))
    out = tmp_path / "out"
    out.mkdir()
    script = run.scripts / "count_stream.py"
    address = topic.url if topic.url.startswith("amqp") else topic.in_group("job")
    launch = run("--standalone", "--nproc-per-node=2", script, out, address, MESSAGES, 0.04)

    def steps() -> int:
        path = out / "steps-0"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def steps_more(count: int) -> None:
        wanted = steps() + count
        run.until(lambda: steps() >= wanted, 60, f"step {wanted}")

    steps_more(7)
    sending(topic.send, range(300, MESSAGES), 0.1)
    launch.of_kind("worker")[0].kill()
    steps_more(5)
    (master,) = launch.wait_for("master")
    master.kill()
    launch.until(lambda: launch.events_of(events.MasterRecovered), 10, "a new master")
    launch.succeed()
    assert Counter(json.loads((out / "counts").read_text())) == {1: MESSAGES}
    assert len(launch.events_of(events.RestartDecided)) == 1
    assert (out / "began-1-0").read_text() != "None", "it went on from a checkpoint"
    if address != topic.url:
        logs = "".join(path.read_text() for path in sorted(launch.job_dir.rglob("stderr.log")))
        assert topic.lag("job") == 0, f"the group does not have the last checkpoint:\n{logs}"
