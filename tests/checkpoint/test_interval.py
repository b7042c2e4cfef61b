import pytest
from hypothesis import given, strategies as st

from dlrover.checkpoint.machine import interval
from dlrover.checkpoint.machine.interval import Auto, Costs, Interval, advise, daly

HOUR = 3600.0


@pytest.mark.parametrize(
    ("cost", "hours", "seconds"),
    [(0.2, 3, 65.6), (60, 3, 1099), (120, 3, 1531), (600, 1, 1698)],
)
def test_dalys_interval_is_the_published_one(cost, hours, seconds):
    assert daly(cost, hours * HOUR) == pytest.approx(seconds, rel=1e-3)


def test_a_checkpoint_that_takes_longer_than_failures_leave_is_made_between_them():
    assert daly(10 * HOUR, HOUR) == HOUR


times = st.floats(1e-3, 1e3)


@given(times, times, times, st.floats(60, 1e7))
def test_the_bounds_hold(step, memory, storage, between_failures):
    costs = Costs(step, memory, storage)
    picked = advise(costs, between_failures)
    assert picked.storage % picked.memory == 0
    assert picked.storage * step >= storage * 0.999
    if picked.memory > 1:
        assert memory <= interval.MAX_OVERHEAD * (picked.memory + 0.5) * step * 1.001


@given(times, times, st.floats(60, 1e6))
def test_more_failures_never_make_saves_rarer(step, memory, between_failures):
    costs = Costs(step, memory, 1.0)
    rare, often = advise(costs, 2 * between_failures), advise(costs, between_failures)
    assert often.memory <= rare.memory


def train(auto: Auto, steps: int, step: float, memory: float, storage: float) -> list[str]:
    """What is done at each step of a training whose ranks are all alike."""
    now, done = 0.0, []
    for _ in range(steps):
        now += step
        do = auto.ask(now)
        done.append(do)
        if do != "nothing":
            now += memory
            auto.saved(memory, now)
        if do == "storage":
            auto.stored(storage)
        if auto.due:
            auto.settle(auto.costs)
    return done


def test_it_measures_first_and_then_keeps_its_interval():
    auto = Auto(between_failures=HOUR)
    done = train(auto, 1000, step=1.0, memory=0.1, storage=20.0)
    assert auto.costs == Costs(pytest.approx(1.0), pytest.approx(0.1), 20.0)
    assert auto.interval == Interval(27, 108)
    assert done[: interval.WARM_UP] == ["storage", *["memory"] * 9]
    assert [n for n, do in enumerate(done[10:], 11) if do == "storage"] == list(
        range(108, 1001, 108)
    )
    saved = [number for number, do in enumerate(done[10:], 11) if do != "nothing"]
    assert saved == list(range(27, 1001, 27))


def test_it_follows_what_changes():
    auto = Auto(between_failures=HOUR)
    train(auto, 200, step=1.0, memory=0.1, storage=20.0)
    before = auto.interval
    train(auto, 2000, step=1.0, memory=0.4, storage=200.0)
    assert auto.interval.memory > before.memory
    assert auto.interval.storage >= 200


def test_it_says_what_it_picked():
    costs = Costs(1.0, 0.1, 20.0)
    assert Interval(27, 108).sentence(costs) == (
        "Saving to memory every 27 steps (0.4% of the time) and to storage every 108 (108 s): a step takes"
        " 1 s, a save to memory 0.1 s, one to storage 20 s."
    )
