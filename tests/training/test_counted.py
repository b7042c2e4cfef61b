"""Which optimizer's steps count, from the order of steps alone."""

import gc
import weakref

import pytest

from dlrover.training.worker.counted import OTHERS, CountedOptimizer


class Optimizer:
    pass


def counted(order: list[Optimizer]) -> list[bool]:
    found = CountedOptimizer()
    return [found.counts(one) for one in order]


@pytest.mark.parametrize("others", [1, 5, OTHERS])
def test_those_beside_the_first_do_not_count(others: int) -> None:
    first, second = Optimizer(), Optimizer()
    assert counted([first, *others * [second]] * 20) == [True, *others * [False]] * 20


def test_a_program_goes_over_to_another_one() -> None:
    first, second = Optimizer(), Optimizer()
    made = counted([*5 * [first], *30 * [second], first])
    assert made == [*5 * [True], *OTHERS * [False], *(30 - OTHERS) * [True], False]


def test_more_steps_of_others_may_be_usual() -> None:
    first, second = Optimizer(), Optimizer()
    made = counted([first, *OTHERS * [second], first, *2 * OTHERS * [second], first])
    assert sum(made) == 3


def test_one_that_the_program_has_left_is_not_kept() -> None:
    found, first = CountedOptimizer(), Optimizer()
    assert found.counts(first)
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    second = Optimizer()
    assert [found.counts(second) for _ in range(OTHERS + 1)] == [*OTHERS * [False], True]
