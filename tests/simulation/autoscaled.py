"""What tests of jobs that find their size by themselves ask of a simulated cluster."""

from typing import TypeVar

from dlrover.spec.job import Limits
from dlrover.spec.plan import ScaleStage
from tests.simulation.cluster import Cluster

LIMITS = Limits(autoscale_window=10.0, autoscale_interval=120.0, autoscale_patience=120.0)
NOISE = 0.05
"""Relative spread of the time of a step."""
WITHIN = 0.85
"""Share of the best size's worth that is to be reached."""

_Body = TypeVar("_Body")


def settled(cluster: Cluster) -> bool:
    """Whether the search is over."""
    scaling = cluster.machine.autoscaling
    return scaling.stage is ScaleStage.RUNNING and scaling.change is None


def told(cluster: Cluster, kind: type[_Body]) -> list[_Body]:
    """The events of a kind so far."""
    return [event.body for event in cluster.events if isinstance(event.body, kind)]
