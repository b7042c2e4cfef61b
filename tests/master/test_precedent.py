"""What a job takes over from a similar one."""

import msgspec
import pytest

pytest.importorskip("scipy")

from dlrover.master.machine.scaling.planner import ALIKE, precedent_of
from dlrover.master.scaling.brainside import shape_of as wire_shape
from dlrover.spec import brain
from dlrover.spec.measurements import SpeedSample
from dlrover.spec.node import Size
from dlrover.spec.plan import NodeGroup


def sample(nodes: int, step: float, total: int = 0) -> SpeedSample:
    return SpeedSample(nodes=nodes, replicas=nodes, step_seconds=step, steps=20, total_batch=total)


def past(*samples: SpeedSample) -> brain.Similar:
    found = tuple(
        brain.Sample(shape=wire_shape(one, NodeGroup(count=1)), throughput=one.throughput)
        for one in samples
    )
    return brain.Similar(name="past", similarity=1.0, samples=found)


def test_it_is_as_fast_as_the_job_itself():
    similar = past(sample(1, 0.10), sample(2, 0.11))
    found = precedent_of(similar, [sample(1, 0.12)], range(1, 5))
    assert found.name == "past"
    assert found.throughput == {Size(1): pytest.approx(1 / 0.12), Size(2): pytest.approx(2 / 0.132)}
    assert [one.step_seconds for one in found.samples] == pytest.approx([0.12, 0.132])


def test_a_size_that_it_has_not_measured_is_compared_with_its_model():
    similar = past(sample(1, 0.10), sample(2, 0.11), sample(8, 0.115))
    found = precedent_of(similar, [sample(4, 0.113)], range(1, 9))
    assert set(found.throughput) == {Size(1), Size(2), Size(8)}
    assert found.throughput[Size(8)] == pytest.approx(8 / 0.115, rel=0.05)
    assert precedent_of(similar, [sample(4, 0.113 * 1.4)], range(1, 9)) is None


@pytest.mark.parametrize("factor", [ALIKE * 1.01, 1 / ALIKE / 1.01])
def test_a_job_with_another_speed_is_none(factor):
    similar = past(sample(1, 0.10), sample(2, 0.11))
    own = [sample(1, 0.10), sample(2, 0.11 * factor)]
    assert precedent_of(similar, own[:1], [1, 2]) is not None
    assert precedent_of(similar, own, [1, 2]) is None


def test_sizes_with_another_batch_are_not_those_of_the_job():
    """Half the global batch: two nodes of it have what one node of the other had."""
    similar = past(sample(1, 0.4, total=64), sample(2, 0.2, total=64), sample(4, 0.1, total=64))
    found = precedent_of(similar, [sample(1, 0.2, total=32)], [1, 2, 4])
    assert found.throughput == {}
    assert len(found.samples) == 3


def test_nobody_is_no_precedent():
    assert precedent_of(None, [sample(1, 0.1)], [1]) is None
    assert precedent_of(brain.Similar(), [sample(1, 0.1)], [1]) is None


@pytest.mark.parametrize(
    "wrong", [{"throughput": 5e-324}, {"throughput": 1e18}, {"compute_seconds": 1e18}]
)
def test_what_cannot_have_been_measured_is_none(wrong):
    similar = past(sample(1, 0.10), sample(2, 0.11))
    samples = [msgspec.structs.replace(one, **wrong) for one in similar.samples]
    for told in ([*samples], [similar.samples[0], samples[1]]):
        other = msgspec.structs.replace(similar, samples=tuple(told))
        assert precedent_of(other, [sample(1, 0.10)], range(1, 5)) is None
