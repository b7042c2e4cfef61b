"""Dividing a cluster: never more than there is, more where it ends jobs sooner."""

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ConfigurationError
from dlrover.planning.cluster import Demand, Option, allocate

COUNTS = (1, 2, 4, 8, 16)


def sizes(scaling=0.8, first=10.0, kind="gpu", counts=COUNTS):
    return [Option(str(n), {kind: float(n)}, first * n**scaling) for n in counts]


def given_to(shares):
    return {job: 0 if s.size is None else int(s.size.name) for job, s in shares.items()}


def demand(job, remaining=1e5, scaling=0.8, **more):
    return Demand(job, sizes(scaling, counts=range(1, 17)), remaining, **more)


@st.composite
def demands(draw):
    count = draw(st.integers(1, 12))
    return [
        Demand(
            f"job-{number}",
            [
                Option(str(n), {"gpu": float(n), "cpu": float(n * cpu)}, speed)
                for n, speed in zip(
                    COUNTS,
                    draw(st.lists(st.floats(0, 1e4), min_size=5, max_size=5)),
                    strict=True,
                )
            ],
            remaining=draw(st.floats(1e-3, 1e9)),
            current=draw(st.sampled_from([None, "1", "4"])),
            priority=draw(st.floats(0.1, 10)),
        )
        for number in range(count)
        for cpu in [draw(st.integers(0, 8))]
    ]


@settings(max_examples=50)
@given(demands(), st.integers(0, 40), st.integers(0, 100))
def test_never_more_than_there_is(jobs, gpus, cpus):
    shares = allocate(jobs, {"gpu": gpus, "cpu": cpus})
    assert shares.keys() == {job.job for job in jobs}
    for kind, there in (("gpu", gpus), ("cpu", cpus)):
        used = sum(s.size.use[kind] for s in shares.values() if s.size is not None)
        assert used <= there + 1e-6


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0.3, 0.95), st.floats(1e2, 1e7)), min_size=1, max_size=8),
    st.integers(1, 60),
)
def test_more_capacity_takes_nothing_away(jobs, capacity):
    counts = tuple(range(1, 17))
    asked = [
        Demand(str(i), sizes(scaling, counts=counts), remaining)
        for i, (scaling, remaining) in enumerate(jobs)
    ]
    less = given_to(allocate(asked, {"gpu": capacity}))
    more = given_to(allocate(asked, {"gpu": capacity + 1}))
    assert all(more[job] >= less[job] for job in less)
    assert sum(less.values()) == min(capacity, 16 * len(jobs))


def test_the_job_that_scales_better_gets_more():
    shares = given_to(
        allocate([demand("good", scaling=0.95), demand("bad", scaling=0.3)], {"gpu": 16})
    )
    assert shares["good"] > shares["bad"] > 0


def test_the_job_that_ends_sooner_gets_more():
    shares = given_to(allocate([demand("short", 1e3), demand("long", 1e6)], {"gpu": 16}))
    assert shares["short"] > shares["long"]


def test_priority_counts():
    shares = given_to(allocate([demand("a", priority=4.0), demand("b")], {"gpu": 16}))
    assert shares["a"] > shares["b"]


def test_a_size_is_kept_when_another_one_does_not_pay_for_the_restart():
    slightly_better = [Option("1", {"gpu": 1.0}, 100.0), Option("2", {"gpu": 2.0}, 103.0)]
    kept = allocate([Demand("a", slightly_better, 1e6, current="1")], {"gpu": 2})["a"]
    assert kept.size is not None
    assert kept.size.name == "1"
    assert kept.reason.startswith("keeps 1")
    free = allocate([Demand("a", slightly_better, 1e6, current="1", restart=0.0)], {"gpu": 2})["a"]
    assert free.size is not None
    assert free.size.name == "2"


def test_quotas_bound_jobs_together_and_cost_nothing():
    def of_queue(job, speed):
        offered = [Option(str(n), {"gpu": float(n), "queue": float(n)}, speed * n) for n in COUNTS]
        return Demand(job, offered, 1e5)

    jobs = [of_queue("a", 10.0), of_queue("b", 10.0), demand("c")]
    shares = given_to(allocate(jobs, {"gpu": 32}, quotas={"queue": 4}))
    assert shares["a"] + shares["b"] == 4
    assert shares["c"] == 16
    free = given_to(allocate(jobs, {"gpu": 32}, quotas={"queue": 1000}))
    assert free == given_to(allocate(jobs, {"gpu": 32, "queue": 32}))


def test_what_is_left_over_is_used():
    first = Demand("first", [Option("2", {"gpu": 2.0}, 100.0)], 1e4, priority=100.0)
    second = [Option("5", {"gpu": 5.0}, 50.0), Option("8", {"gpu": 8.0}, 1000.0)]
    shares = allocate([first, Demand("second", second, 1e4)], {"gpu": 9})
    assert given_to(shares) == {"first": 2, "second": 5}


def test_a_job_that_waits_is_told_why():
    shares = allocate([demand("a", 1e2), Demand("b", sizes(kind="tpu"), 1.0)], {"gpu": 1})
    assert shares["b"].size is None
    assert "no size of the job" in shares["b"].reason
    busy = allocate([demand("a", 1e2), demand("c", 1e9)], {"gpu": 1})
    assert "bring more in other jobs" in busy["c"].reason


def test_what_is_refused():
    with pytest.raises(ConfigurationError, match="remaining of job 'a' is 0"):
        allocate([demand("a", 0.0)], {"gpu": 1})
    with pytest.raises(ConfigurationError, match="two jobs of one name"):
        allocate([demand("a"), demand("a")], {"gpu": 1})
