"""Which random generators a fork seeds anew."""

import pytest

from dlrover.agent.workers.generators import Generators

np = pytest.importorskip("numpy")


@pytest.mark.parametrize("seed", [[1, 2], (1 << 60, 3), np.array([1, 2]), 7])
def test_a_seed_of_any_kind_that_was_chosen_is_kept(seed: object) -> None:
    chosen, by_system = np.random.default_rng(seed), np.random.default_rng()
    state, other = (one.bit_generator.state for one in (chosen, by_system))
    generators = Generators()
    generators.find()
    generators.renew()
    assert chosen.bit_generator.state == state
    assert by_system.bit_generator.state != other
