"""Our group for programs that import it: verl's module comes first, since after `install` that one imports ours."""

import verl.single_controller.ray.base

from dlrover.integrations.verl.group import WorkerGroup

__all__ = ["WorkerGroup", "verl"]
