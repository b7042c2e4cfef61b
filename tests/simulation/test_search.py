"""The search for the best size alone: named laws, changed ones, and a thousand random ones."""

import random

import pytest

pytest.importorskip("scipy")

from dlrover.spec.node import Size
from dlrover.spec.plan import ScaleStage
from tests.simulation.searching import Law, Search, ServerSearch, drawn, drawn_with_servers, table

WITHIN = 0.95
"""Share of the best size's worth that is to be reached, and of the random laws under which it is."""
PARTS = 4
LAWS = 250
"""In each part."""
LAWS_WITH_SERVERS = 100
MOST_CHANGES = 30
"""Of a size until a search is over, the ways back included."""


@pytest.mark.parametrize(
    ("law", "most", "start", "best"),
    [
        (table(10, 19, 27.3, 20), 4, 1, 3),
        (lambda _: 10.0, 4, 4, 1),
        (lambda _: 10.0, 8, 8, 1),
        (lambda n: 10.0 * n, 4, 4, 4),
        (table(10, 16, 23.9, 20), 4, 4, 3),
    ],
    ids=["three of four", "one as fast as four", "one as fast as eight", "all pay", "a bump"],
)
def test_the_best_size_is_found(law: Law, most: int, start: int, best: int):
    search = Search(law, most, start)
    search.settle()
    assert search.best == best
    assert search.nodes == best, search.visited


def test_what_the_model_rules_out_is_not_tried():
    """Where speed grows in proportion, and no node waits for another, no smaller size can be better."""
    search = Search(lambda n: 10.0 * n, 4, 4)
    search.compute = 0.1
    search.settle()
    assert search.visited == [4]


@pytest.mark.parametrize("slowly", [False, True], ids=["at once", "little by little"])
def test_a_changed_law_is_a_new_search(slowly: bool):
    """First four nodes pay, then one is as fast as four."""
    search = Search(lambda n: 10.0 * n / (1 + 0.1 * n), 4, 2)
    search.settle()
    assert search.nodes == 4
    before = search.law
    for part in range(1, 41):
        share = part / 40 if slowly else 1.0
        search.law = lambda n, share=share: (1 - share) * before(n) + share * 9.0
        search.window()
    for _ in range(40):
        search.window()
    assert search.machine.stage is ScaleStage.RUNNING
    assert search.nodes == 1, search.visited


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "part", [pytest.param(n, marks=pytest.mark.heavy if n > 1 else ()) for n in range(PARTS)]
)
def test_of_random_laws_nearly_all_are_searched_with_success(part: int):
    """Rings, saturation, cliffs, uneven and any speeds, on up to 2 to 32 nodes, from any size, with noise."""
    reached, changes = [], []
    for seed in range(part * LAWS, (part + 1) * LAWS):
        draw = random.Random(seed)
        law = drawn(draw)
        search = Search(law.speed, law.most, draw.choice((1, law.most, draw.randint(1, law.most))))
        search.compute = law.compute
        search.settle()
        reached.append(search.reached)
        changes.append(search.changes)
    assert sum(share >= WITHIN for share in reached) >= WITHIN * LAWS, sorted(reached)[:20]
    assert max(changes) <= MOST_CHANGES


def three_are_best(size: Size) -> float:
    """Each server serves three workers, and three servers are an even division."""
    return 10.0 * min(size.workers, 3 * size.servers) * (1.3 if size.servers == 3 else 1.0)


@pytest.mark.parametrize(
    ("speeds", "start", "best"),
    [
        (lambda s: (10, 19, 27.3, 20)[s.workers - 1], Size(1, 1), Size(3, 1)),
        (lambda s: (10, 16, 23.9, 20)[s.workers - 1], Size(4, 1), Size(3, 1)),
        (three_are_best, Size(4, 2), Size(8, 3)),
    ],
    ids=["three workers of four", "a bump", "three servers of four"],
)
def test_the_best_size_with_servers_is_found(speeds, start: Size, best: Size):
    most = Size(8, 4) if best.servers > 1 else Size(4, 1)
    search = ServerSearch("named", speeds, most, start)
    assert max(search.sizes(), key=search.worth) == best
    share, visited = search.reached(0)
    assert share >= WITHIN, visited


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_of_random_laws_with_servers_nearly_all_are_searched_with_success():
    """From any size, with noise; of cliffs in both numbers fewer than of smooth laws."""
    reached, changes = [], []
    for seed in range(LAWS_WITH_SERVERS):
        share, visited = drawn_with_servers(random.Random(seed)).reached(seed)
        reached.append(share)
        changes.append(len(visited) - 1)
    assert sum(share >= WITHIN for share in reached) >= 0.93 * LAWS_WITH_SERVERS, sorted(reached)
    assert max(changes) <= MOST_CHANGES
