"""What runs inside a training process, and what a training script may import."""
