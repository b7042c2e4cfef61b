"""``--auto-scale`` and ``dlrover plan``."""

import msgspec
import pytest

from dlrover.cli.run.arguments import parse
from dlrover.dashboard.inspect import plans
from dlrover.errors import ConfigurationError
from dlrover.master.journal.history import History
from dlrover.spec import events
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import JobDir, MasterConfig
from dlrover.spec.plan import Effect, ScaleKind

EFFECT = Effect(throughput=20.0, low=10.0, high=40.0)


def options(*argv: str, **environ: str):
    return parse([*argv, __file__], environ)


def test_a_range_of_nodes_that_are_started_here():
    assert options("--nnodes=1:4", "--local-nodes=1", "--auto-scale").job.auto_scale
    assert not options("--nnodes=1:4", "--local-nodes=1").job.auto_scale


def test_servers_alone_may_be_chosen():
    fixed = ("--nnodes=2", "--local-nodes=2")
    assert options(*fixed, "--servers=1:2", "--auto-scale").job.auto_scale


def test_a_node_of_a_job_elsewhere_may_have_the_flag():
    there = {"DLROVER_MASTER_ADDR": "master:1"}
    assert options("--nnodes=1:4", "--auto-scale", **there).job.auto_scale
    assert options("--auto-scale", **there).job.auto_scale, "the job's master knows the numbers"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["--nnodes=4", "--local-nodes=4"],
            "--auto-scale: 4 nodes leave no choice; give a range, as --nnodes 1:4.",
        ),
        (
            ["--nnodes=2", "--local-nodes=2", "--servers=3"],
            "--auto-scale: 2 nodes and 3 servers leave no choice; give a range, as --nnodes 1:2.",
        ),
        (
            ["--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=host:1"],
            "--auto-scale: DLRover must be able to start nodes; give --local-nodes N, the number to start with "
            "on this machine, or run the job on Kubernetes.",
        ),
    ],
)
def test_where_there_is_nothing_to_choose_it_is_refused(argv, sentence):
    with pytest.raises(ConfigurationError) as caught:
        options(*argv, "--auto-scale")
    assert str(caught.value) == sentence


def told(tmp_path, *bodies, auto_scale=True, servers=0) -> plans.Plans:
    job_dir = JobDir(tmp_path)
    job = JobSpec(
        name="job",
        min_nodes=1,
        max_nodes=4,
        min_servers=min(servers, 1),
        max_servers=servers,
        auto_scale=auto_scale,
    )
    job_dir.job.write_bytes(msgspec.json.encode(MasterConfig(job=job)))
    history = History(job_dir.events)
    for time, body in enumerate(bodies):
        history.add(body, float(time))
    history.close()
    return plans.plans(job_dir)


MADE = events.PlanMade(1, ScaleKind.GROW, 2, 1, "1 -> 2 nodes: +80% throughput", EFFECT)
MEASURED = events.PlanMeasured(1, 2, 19.0, -0.05, within=True, short=False)


def test_a_plan_is_shown_with_its_reason_and_what_came_of_it(tmp_path):
    shown = plans.render(told(tmp_path, MADE, MEASURED, events.SizeSettled(2, 19.0, 2)))
    assert shown.splitlines() == [
        "Auto-scaling from 1 to 4 nodes: the best size is 2 nodes, with 19 samples/s; 2 sizes were measured.",
        "",
        "plan 1, more nodes: 1 -> 2 nodes: +80% throughput",
        "  predicted 20 (10 to 40) samples/s, measured 19 (-5%), kept",
    ]


def test_of_a_job_with_servers_both_numbers_are_told(tmp_path):
    settled = events.SizeSettled(3, 19.0, 4, "worker steps/s", 2)
    found = told(tmp_path, MADE, MEASURED, settled, servers=3)
    assert plans.render(found).splitlines()[0] == (
        "Auto-scaling from 1 to 4 workers and from 1 to 3 servers: the best size is 3 workers and 2 servers, "
        "with 19 worker steps/s; 4 sizes were measured."
    )
    assert settled.sentence().startswith("The job stays at 3 workers and 2 servers with 19")


def test_a_number_that_is_fixed_is_told_once(tmp_path):
    shown = plans.render(told(tmp_path, servers=1))
    assert shown.startswith("Auto-scaling from 1 to 4 workers and with 1 server: ")


def test_plans_that_are_under_way_short_or_given_up(tmp_path):
    short = msgspec.structs.replace(MEASURED, short=True)
    again = msgspec.structs.replace(MADE, number=2)
    last = msgspec.structs.replace(MADE, number=3)
    found = told(tmp_path, MADE, short, again, events.PlanDropped(2, "no nodes"), last)
    assert [plan.outcome for plan in found.plans] == [
        "does not pay",
        "given up: no nodes",
        "under way",
    ]
    assert found.settled is None
    assert "the search for the best size goes on" in plans.render(found)


def test_a_later_plan_says_that_the_search_goes_on(tmp_path):
    found = told(tmp_path, events.SizeSettled(1, 10.0, 1), MADE)
    assert found.settled is None


def test_a_job_that_was_not_to_be_scaled_says_so(tmp_path):
    assert plans.render(told(tmp_path, auto_scale=False)) == (
        "The job has a fixed number of nodes; --auto-scale lets DLRover choose it."
    )


def test_a_directory_without_a_job_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="has no readable record of plans"):
        plans.plans(JobDir(tmp_path))
