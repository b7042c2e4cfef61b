"""Where a rank begins that is started again, as its program's checkpoints say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dlrover import launched
from dlrover.errors import InfrastructureError

pytestmark = pytest.mark.torch


@pytest.fixture
def returning():
    unchanged = pytest.importorskip("dlrover.training.replicas.unchanged")
    given = launched.Given(round=1, rank=1, world_size=2, survive=True, attempt=1)
    return unchanged.Unchanged(SimpleNamespace(), given, {})


def test_it_begins_at_the_place_of_the_save(returning) -> None:
    here = returning._round
    returning.continued(7, (here, 40, 38))
    returning.continued(7, (here, 40, 38))  # read, and then loaded
    assert (returning._reductions, returning.steps) == (40, 38)


@pytest.mark.parametrize("other", [(0, 0, 0), (1, 40, 40), (-1, 35, 35)])
def test_checkpoints_of_several_places_do_not_say_where(returning, other) -> None:
    """The others would take the rank in at a step that is not its program's."""
    here = returning._round
    returning.continued(7, (here, 40, 40))
    with pytest.raises(InfrastructureError, match="several directories"):
        returning.continued(3, (here if other[0] < 0 else other[0], *other[1:]))
