"""Trainings with TensorFlow's estimators (TensorFlow 2.15 or earlier)."""
