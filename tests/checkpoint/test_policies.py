"""Which stored steps stay: what each policy promises, for any steps; and what is deleted."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.machine import policies
from dlrover.checkpoint.machine.policies import (
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    Policy,
    StepInfo,
)
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.formats import FORMAT
from dlrover.checkpoint.storage.stored_step import read_manifest
from dlrover.checkpoint.storage.stores import MANIFEST, open_store
from dlrover.errors import ConfigurationError

pytestmark = pytest.mark.torch

counts = st.integers(1, 6)
simple = st.one_of(
    st.builds(KeepLast, counts),
    st.builds(KeepEvery, st.integers(1, 40)),
    st.builds(
        KeepBest, counts, st.sampled_from(["loss", "score"]), st.sampled_from(["min", "max"])
    ),
)
any_policy = st.one_of(simple, st.builds(lambda a, b: a | b, simple, simple))


def info(step: int, metrics: dict) -> StepInfo:
    return StepInfo(step, number=step, metrics=metrics)


infos = st.lists(
    st.builds(
        info,
        st.integers(0, 200),
        st.dictionaries(st.sampled_from(["loss", "score"]), st.sampled_from([-1.0, 0.0, 0.5, 7.0])),
    ),
    min_size=1,
    max_size=25,
    unique_by=lambda info: info.step,
)


def numbers(steps: list[StepInfo]) -> set[int]:
    return {info.step for info in steps}


@given(any_policy, infos)
def test_the_newest_step_is_kept_and_nothing_is_invented(policy, steps):
    kept = policy.kept(steps)
    assert max(numbers(steps)) in kept
    assert kept <= numbers(steps)
    assert policy.kept([]) == set()


@given(any_policy, infos, st.randoms())
def test_the_order_of_the_steps_does_not_matter(policy, steps, random):
    shuffled = list(steps)
    random.shuffle(shuffled)
    assert policy.kept(steps) == policy.kept(shuffled)


@given(any_policy, infos)
def test_deleting_after_each_step_keeps_what_deleting_at_the_end_keeps(policy, steps):
    stored: list[StepInfo] = []
    ever_newest = set()
    for info in sorted(steps, key=lambda info: info.step):
        stored.append(info)
        ever_newest = {info.step}
        kept = policy.kept(stored)
        stored = [known for known in stored if known.step in kept]
    assert numbers(stored) == policy.kept(steps)
    assert ever_newest <= numbers(stored)


@given(any_policy, infos, st.data())
def test_a_step_that_was_let_go_is_not_wanted_again(policy, steps, data):
    more = data.draw(infos)
    more = [info for info in more if info.step not in numbers(steps)]
    assert policy.kept(steps + more) & numbers(steps) <= policy.kept(steps)


@given(counts, infos)
def test_the_last_are_the_newest(count, steps):
    assert KeepLast(count).kept(steps) == set(sorted(numbers(steps))[-count:])


WENT_BACK = [
    StepInfo(5, 20, 5),
    StepInfo(10, 20, 10),
    StepInfo(12, 0, 12),
    StepInfo(30, 0, 30),
    StepInfo(13, 20, 33),
]
"""A training that had saved up to step 30 went back to step 10, and has saved step 13."""


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepLast(1), {13}),
        (KeepLast(3), {5, 10, 13}),
        (KeepLast(4), {5, 10, 13, 30}),
        (KeepEvery(4), {5, 10, 13, 30}),
        (KeepEvery(12), {13, 30}),
    ],
)
def test_after_going_back_the_new_line_is_the_newest(policy, kept):
    assert policy.kept(WENT_BACK) == kept
    stored = [info for info in WENT_BACK if info.step in kept]
    assert policy.kept(stored) == kept


@given(st.integers(1, 40), infos)
def test_every_interval_keeps_one_step(interval, steps):
    kept = KeepEvery(interval).kept(steps)
    newest = max(numbers(steps))
    assert {s for s in numbers(steps) if s and s % interval == 0} <= kept
    for first in range(interval, 201, interval):
        there = {s for s in numbers(steps) if first <= s < first + interval}
        assert kept & there - {newest} == {min(there, default=-1)} & there - {newest}
    assert {s for s in kept if s < interval} <= {newest}


@given(counts, infos, st.sampled_from(["min", "max"]))
def test_no_step_that_is_let_go_is_better_than_one_of_the_best(count, steps, mode):
    kept = KeepBest(count, "loss", mode).kept(steps)
    measured = {info.step: info.metrics["loss"] for info in steps if "loss" in info.metrics}
    best = kept & measured.keys() - {max(numbers(steps))}
    assert len(kept & measured.keys()) >= min(count, len(measured))
    assert len(best) <= count
    for gone in measured.keys() - kept:
        for step in best:
            better = measured[gone] < measured[step] if mode == "min" else None
            better = measured[gone] > measured[step] if mode == "max" else better
            assert not better
            assert measured[gone] != measured[step] or gone < step, "of equal ones the newer stays"


@given(simple, simple, infos)
def test_a_union_keeps_what_either_keeps(one, other, steps):
    assert (one | other).kept(steps) == one.kept(steps) | other.kept(steps)


@given(any_policy)
def test_a_policy_survives_the_command_line(policy):
    text = policies.encode(policy)
    json.loads(text)
    assert policies.decode(text) == policy


def test_unions_are_flat_and_know_whether_metrics_matter():
    union = KeepLast(1) | KeepEvery(5) | KeepBest(1, "loss")
    assert union == KeepAny((KeepLast(1), KeepEvery(5), KeepBest(1, "loss")))
    assert union.uses_metrics
    assert not (KeepLast(1) | KeepEvery(5)).uses_metrics
    with pytest.raises(TypeError):
        KeepLast(1) | 5


def test_a_number_means_the_newest():
    assert policies.policy_of(3) == policies.decode("3") == KeepLast(3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KeepLast(0), "KeepLast's count is 0"),
        (lambda: KeepLast(1.5), r"KeepLast's count is 1\.5"),
        (lambda: KeepEvery(0), "KeepEvery's interval is 0"),
        (lambda: KeepBest(True, "loss"), "KeepBest's count is True"),
        (lambda: KeepBest(1, ""), "KeepBest's metric is ''"),
        (lambda: KeepBest(1, "loss", "least"), "KeepBest's mode is 'least'"),
        (lambda: policies.policy_of(0), "keep is 0; at least 1"),
        (lambda: policies.policy_of("3"), "keep is '3'; it must be a number"),
        (lambda: policies.decode('{"type":"KeepLast","count":0}'), "count is 0"),
        (lambda: policies.decode('{"type":"KeepSome"}'), "is not a policy"),
        (lambda: policies.decode("[3"), "is not a policy"),
        (lambda: policies.checked_metrics({"loss": "low"}), "The metric loss is 'low'"),
        (lambda: policies.checked_metrics({"loss": torch.ones(2)}), "The metric loss is tensor"),
        (lambda: policies.checked_metrics({"loss": 10**400}), "must be a number"),
        (lambda: policies.checked_metrics({1: 1.0}), "metrics has the name 1;"),
        (lambda: policies.checked_metrics({"\ud800": 1.0}), "metrics has the name"),
        (lambda: policies.checked_metrics(dict.fromkeys("a" * n for n in range(1, 66))), "has 65"),
    ],
)
def test_nonsense_is_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_metrics_become_numbers_and_what_is_not_finite_is_left_out():
    given = {"a": torch.tensor(0.5), "b": 2, "c": float("nan"), "d": float("inf")}
    assert policies.checked_metrics(given) == {"a": 0.5, "b": 2.0}


# ---- what is deleted


def store(directory: Path, step: int, metrics: dict[str, float] | None = None) -> None:
    path = directory / f"step-{step}"
    path.mkdir(parents=True)
    save = {"line": 0, "number": step, "step": step, "session": 1}
    manifest = {
        "format": FORMAT, "step": step, "save": save, "world_size": 1, "replicated": True, "files": {},
    }  # fmt: skip
    if metrics is not None:
        manifest["metrics"] = metrics
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (KeepLast(2), [5, 4]),
        (KeepLast(1) | KeepEvery(2), [5, 4, 2]),
        (KeepBest(2, "loss"), [5, 3, 2]),
        (KeepBest(2, "loss", "max"), [5, 4, 1]),
        (KeepBest(2, "score"), [5]),
    ],
)
def test_prune_deletes_what_the_policy_lets_go(tmp_path: Path, policy: Policy, expected: list[int]):
    for step, loss in ((1, 4.0), (2, 1.0), (3, 2.0), (4, 3.0)):
        store(tmp_path, step, {"loss": loss})
    store(tmp_path, 5)  # of a version without metrics
    storage.prune(open_store(tmp_path), policy)
    assert storage.steps(open_store(tmp_path)) == expected
    assert len(list(tmp_path.iterdir())) == len(expected)


def test_a_damaged_manifest_does_not_stop_pruning(tmp_path: Path):
    for step in (1, 2, 3):
        store(tmp_path, step, {"loss": float(step)})
    (tmp_path / "step-2" / MANIFEST).write_text("{")
    storage.prune(open_store(tmp_path), KeepBest(1, "loss"))
    assert storage.steps(open_store(tmp_path)) == [3, 2, 1], "it is left to a load"


@pytest.mark.slow
def test_a_training_keeps_what_its_policy_says(directory: Path):
    checkpointer = Checkpointer(directory, keep=KeepEvery(2) | KeepLast(1), linger=0.0)
    for step in (1, 2, 3, 5):
        checkpointer.save(step, {"step": step}, to="storage")
        checkpointer.wait()
    checkpointer.close()
    assert storage.steps(open_store(directory)) == [5, 2]


@pytest.mark.slow
def test_the_best_and_the_newest_step_of_a_training_stay(directory: Path):
    keep = KeepBest(1, "loss") | KeepLast(1)
    checkpointer = Checkpointer(directory, keep=keep, linger=0.0)
    losses = [3.0, torch.tensor(1.0), 2.0, float("nan")]
    for step, loss in enumerate(losses, 1):
        checkpointer.save(step, {"step": step}, to="storage", metrics={"loss": loss})
        checkpointer.wait()
    assert storage.steps(open_store(directory)) == [4, 2]
    assert read_manifest(open_store(directory), "step-2").metrics == {"loss": 1.0}
    assert read_manifest(open_store(directory), "step-4").metrics == {}
    checkpointer.save(5, {"step": 5}, metrics={"loss": 0.0})  # in memory only
    checkpointer.save(6, {"step": 6}, to="storage")
    checkpointer.wait()
    assert storage.steps(open_store(directory)) == [6, 2]
    with pytest.raises(ConfigurationError, match="The metric loss is None"):
        checkpointer.save(7, {"step": 7}, metrics={"loss": None})
    checkpointer.close()


@pytest.mark.slow
def test_a_checkpointer_says_what_keep_may_be(directory: Path):
    with pytest.raises(ConfigurationError, match="keep is '3'; it must be a number of steps"):
        Checkpointer(directory, keep="3")
    assert not directory.exists()
