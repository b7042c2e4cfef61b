"""What a training script in TensorFlow imports."""
