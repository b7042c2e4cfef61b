"""Versions of weights, from the role that trains to those that work with them.

``publish`` copies a state into memory that a process of the job keeps; ``latest`` maps it, or reads it from another
machine. Each rank publishes its own parts of spread tensors, and each reader takes what its own layout needs.
"""

import sys

from dlrover.roles.messages import Version
from dlrover.roles.runtime.weights.following import is_valid, latest, versions
from dlrover.roles.runtime.weights.publishing import publish
from dlrover.roles.runtime.weights.reading import Weights

__all__ = ["Version", "Weights", "is_valid", "latest", "publish", "versions"]

weights = sys.modules[__name__]
"""The public name of this module: ``from dlrover.roles import weights``."""
