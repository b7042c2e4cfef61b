"""Code that runs inside a training process, and the API for training scripts."""

from dlrover.elastic.tracker import activity, steps_left

__all__ = ["activity", "steps_left"]
