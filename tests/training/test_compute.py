"""Times on a device: pairs of events in its queue, read when they have passed."""

from dlrover.training.worker.compute import PENDING_EVENTS, _Device


class Queue:
    """A device: what is recorded is reached when it has done what was put into its queue before."""

    def __init__(self) -> None:
        self.queued = 0.0
        self.done = 0.0
        self.made = 0
        self.capturing = False

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def Event(self, *, enable_timing: bool) -> "Event":  # noqa: N802 - torch's name
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.at = 0.0

    def record(self) -> None:
        self.at = self.queue.queued

    def query(self) -> bool:
        return self.queue.done >= self.at

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1e3


def step(device: _Device, queue: Queue, own: float, waits: float, gradients: int = 1) -> None:
    """One step of a program that runs ahead of the device."""
    device.step_ended()
    for _ in range(gradients):
        queue.queued += own / gradients
        device.gradient_ready()
    queue.queued += waits
    device.note(0)


def test_a_step_lasts_from_the_end_of_the_last_one_to_the_last_gradient():
    queue = Queue()
    device = _Device(queue)
    for own in (0.1, 0.2, 0.3):
        step(device, queue, own, waits=1.0, gradients=3)
    assert device.passed() == []
    queue.done = 2.5
    assert [round(ns / 1e6) for ns in device.passed()] == [100, 200]
    queue.done = 9.0
    assert [round(ns / 1e6) for ns in device.passed()] == [300]


def test_events_are_used_again_and_a_device_far_behind_costs_no_memory():
    queue = Queue()
    device = _Device(queue)
    for _ in range(PENDING_EVENTS * 3):
        step(device, queue, 0.1, 0.1)
    assert queue.made <= 2 * (PENDING_EVENTS + 2)
    assert len(device._pairs) == PENDING_EVENTS
    queue.done = queue.queued
    assert len(device.passed()) == PENDING_EVENTS
    made = queue.made
    for _ in range(PENDING_EVENTS):
        step(device, queue, 0.1, 0.1)
    assert queue.made == made


def test_nothing_is_recorded_while_a_graph_is_captured():
    queue = Queue()
    device = _Device(queue)
    queue.capturing = True
    step(device, queue, 0.1, 0.1)
    assert queue.made == 0
    assert device.passed() == []
