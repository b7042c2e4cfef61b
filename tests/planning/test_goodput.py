"""The models of goodput beside what was published."""

import pytest

from dlrover.planning.goodput import Fleet, expected_ratio, failures_in, steps_per_second

MINUTE, DAY = 60.0, 86_400.0
RSC1, RSC2 = 6.5e-3, 2.34e-3  # failures per node and day of Meta's two clusters
GPUS_PER_NODE = 8

POOL = [
    (56, 10), (36, 1), (31, 3), (29, 4), (31, 1), (33, 8), (41, 1), (52, 5), (51, 5), (56, 2), (55, 5), (54, 1),
    (53, 6), (51, 2), (53, 1), (54, 1), (55, 8), (52, 7), (51, 3), (53, 9), (55, 5), (54, 1), (53, 3), (54, 8),
    (52, 2), (53, 1), (49, 2), (48, 1), (47, 6), (51, 1), (47, 7), (39, 3), (47, 4), (39, 3), (45, 1), (46, 9),
    (44, 4), (41, 2), (42, 3), (46, 3), (42, 1), (40, 1), (42, 5), (46, 6), (42, 1), (46, 2), (48, 40), (15, 1),
    (0, 6),
]  # fmt: skip
"""PCcheck's trace of a pool of 64 spot GPUs, one size every 63 s: sizes, and how often in a row."""
TRACE_SECONDS = 13_482.0
LOAD = 0.878
"""Seconds to load a checkpoint, from the published row without checkpoints."""
STEP = 1 / 15.769409833983385
"""Seconds of a step of VGG-16 without checkpoints."""


def fleet(gpus: int, rate: float) -> Fleet:
    return Fleet(gpus // GPUS_PER_NODE, rate)


@pytest.mark.parametrize(
    ("gpus", "rate", "interval", "restart", "queue", "published"),
    [
        (16_000, RSC1, 60 * MINUTE, 5 * MINUTE, 0.0, 0.7),
        (16_000, RSC1, 5 * MINUTE, 5 * MINUTE, 0.0, 0.93),
        (8_000, RSC1, 30 * MINUTE, 5 * MINUTE, 1 * MINUTE, 0.9),
    ],
)
def test_the_published_ratios_of_large_clusters(gpus, rate, interval, restart, queue, published):
    found = expected_ratio(fleet(gpus, rate), restart=restart, queue=queue, interval=interval)
    assert found == pytest.approx(published, rel=0.03)


def test_a_hundred_thousand_devices_need_short_intervals():
    worse = fleet(100_000, RSC1)
    half = expected_ratio(worse, restart=5 * MINUTE, queue=0.0, interval=7 * MINUTE)
    assert round(half, 1) == 0.5, "published with one digit"
    better = fleet(100_000, RSC2)
    short = expected_ratio(better, restart=2 * MINUTE, queue=0.0, interval=2 * MINUTE)
    assert short == pytest.approx(0.939, abs=0.0005)
    assert expected_ratio(better, restart=DAY, queue=0.0, interval=DAY) == 0.0


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_the_published_times_to_failure(gpus, hours):
    assert fleet(gpus, RSC1).mean_time_to_failure / 3600 == pytest.approx(hours, rel=0.03)


def test_the_published_table_of_a_spot_pool():
    sizes = [size for size, count in POOL for _ in range(count)]
    assert len(sizes) == 215
    failures = failures_in(sizes, 4)
    assert failures == 51
    repeated = {"CheckFreq": 1.0, "GPM": 0.5, "Ideal": 0.5}
    throughput = {
        "CheckFreq": {0: 15.742874314174914, 10: 2.938627628113705, 25: 7.042363043171207, 50: 12.18658951925483},
        "GPM": {0: 15.756049145422713, 10: 6.651017406282624, 25: 10.387977578704326, 50: 12.998492611136836},
        "Ideal": dict.fromkeys((0, 10, 25, 50), 1 / STEP),
    }  # fmt: skip
    published = {
        "CheckFreq": {0: 15.690597341199657, 10: 2.9218082347356775, 25: 6.976672784383198, 50: 11.999707338861933},
        "GPM": {0: 15.703728423111512, 10: 6.620947425543189, 25: 10.322307257580645, 50: 12.877309632420706},
        "Ideal": {0: 15.71704474516446, 10: 15.698130637465306, 25: 15.669759475916575, 50: 15.622474206668688},
    }  # fmt: skip
    for mechanism, rows in published.items():
        for interval, expected in rows.items():
            found = steps_per_second(
                throughput=throughput[mechanism][interval],
                failures=failures,
                seconds=TRACE_SECONDS,
                redone=repeated[mechanism] * interval * STEP,
                load=LOAD,
            )
            assert found == pytest.approx(expected, rel=0.001), (mechanism, interval)
