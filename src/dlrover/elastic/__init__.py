"""What runs inside a training process, and what a training script may import."""

from dlrover.elastic.tracker import activity, steps_left

__all__ = ["activity", "steps_left"]
