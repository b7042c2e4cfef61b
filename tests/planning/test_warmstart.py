"""What past jobs say about a new one."""

import pytest

from dlrover.planning.warmstart import PastJob, expected_remaining, similarity, warm_start
from dlrover.spec.plan import NodeGroup

GIB = 1 << 30
NEW = {"model": "deepfm", "user": "ann", "parameters": 1e9, "batch": 512}


def past(name, workers, memory=8, **features):
    group = NodeGroup(count=workers, cpu=8.0, memory=memory * GIB)
    return PastJob(name, {**NEW, **features}, {"worker": group})


def test_similarity():
    assert similarity(NEW, NEW) == 1
    assert similarity(NEW, {**NEW, "parameters": 5e8}) == pytest.approx(0.875)
    assert similarity(NEW, {**NEW, "user": "bob"}) == pytest.approx(0.75)
    assert similarity(NEW, {"other": 1.0}) == 0
    assert similarity({}, {}) == 0


def test_the_nearest_job_counts_most_and_memory_is_the_largest():
    jobs = [past("near", 16), past("far", 4, memory=32, user="bob", parameters=3e8)]
    plan = warm_start(NEW, jobs)
    assert plan is not None
    assert plan.groups["worker"] == NodeGroup(count=10, cpu=8.0, memory=32 * GIB)
    assert plan.reason == "started from 2 similar past jobs, the nearest is near (similarity 1.00)"
    assert plan.effect is None
    assert warm_start(NEW, list(reversed(jobs))) == plan


def test_jobs_of_another_kind_are_no_guide():
    other = PastJob("other", {"model": "bert", "user": "bob"}, {"worker": NodeGroup(count=64)})
    assert warm_start(NEW, [other]) is None
    assert warm_start(NEW, []) is None


def test_what_remains_by_what_similar_jobs_had_in_all():
    assert expected_remaining(0.0, [100.0, 300.0], 50.0) == 200
    assert expected_remaining(150.0, [100.0, 300.0], 50.0) == 150
    assert expected_remaining(400.0, [100.0, 300.0], 50.0) == 400
    assert expected_remaining(0.0, [], 50.0) == 50
