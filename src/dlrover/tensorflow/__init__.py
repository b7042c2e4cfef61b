"""The package that a TensorFlow training script imports."""
